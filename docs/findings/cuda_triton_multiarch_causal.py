"""cuda-triton-multiarch: flash_attention_bhsd with its Triton backend ignores is_causal, and reads and writes past the last row.

The loop over heads calls the kernel without the flag. The mask of rows compares the offset within a block, not the row, with the
length: at 65 rows the second block covers rows 64 to 127. On a GPU if there is one, else in Triton's interpreter with tensors that
claim to be on a GPU (the wrapper asks).
"""

import os
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

real = torch.cuda.is_available()
device = "cuda" if real else "cpu"
if not real:
    os.environ["TRITON_INTERPRET"] = "1"
try:
    from kernels.attention_api import flash_attention_backend, flash_attention_bhsd
    from torch.nn.functional import scaled_dot_product_attention

    release = version("cuda-triton-multiarch")
except (ImportError, PackageNotFoundError) as error:
    print(f"cannot run here: {error}")
    sys.exit(77)

torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 1, 64, 16, device=device).half()
expected = scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
if not real:
    torch.Tensor.is_cuda = property(lambda self: True)
actual = flash_attention_bhsd(q, k, v, is_causal=True)
without = flash_attention_bhsd(q, k, v, is_causal=False)
if not real:
    del torch.Tensor.is_cuda

print(f"cuda-triton-multiarch {release}, torch {torch.__version__}, {device}, {flash_attention_backend()}")
print(
    f"o[0, 0, 0, 0]: expected {expected[0, 0, 0, 0].item():.4f} = v[0, 0, 0, 0], actual {actual[0, 0, 0, 0].item():.4f}"
)
print(f"the same bits with is_causal=False: expected False, actual {torch.equal(actual, without)}")
sys.exit(torch.equal(actual, without))
