"""memory-efficient-attention-pytorch: causal attention of fewer queries than keys depends on memory_efficient and on the buckets.

The plain function aligns the diagonal at the last key, the memory-efficient one at the first; the flash one subtracts the difference
of the lengths where it should add it, so that the first query sees no key and gets the mean of the first bucket.
"""

import sys

import torch

try:
    from importlib.metadata import version

    from memory_efficient_attention_pytorch.flash_attention import FlashAttentionFunction
    from memory_efficient_attention_pytorch.memory_efficient_attention import attention, memory_efficient_attention
except ImportError as error:
    print(f"cannot run here: {error}")
    sys.exit(77)

q = torch.zeros(1, 1, 2, 1)
k = torch.zeros(1, 1, 4, 1)  # every score is equal: o is the mean of the v that a row sees
v = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4, 1)
plain = attention(q, k, v, causal=True).flatten().tolist()
efficient = memory_efficient_attention(q, k, v, causal=True).flatten().tolist()
flash = FlashAttentionFunction.apply(q, k, v, None, True, 512, 1024).flatten().tolist()

print(f"memory-efficient-attention-pytorch {version('memory-efficient-attention-pytorch')}, torch {torch.__version__}")
print("2 queries, 4 keys, causal, equal scores, v = 1, 2, 3, 4")
print(
    f"expected {plain} (attention), actual {efficient} (memory_efficient_attention), {flash} (FlashAttentionFunction)"
)
sys.exit(not (torch.allclose(torch.tensor(plain), torch.tensor(efficient)) and plain == flash))
