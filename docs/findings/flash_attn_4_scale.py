"""flash-attn 4 on a GPU: with softmax_scale of 0 or below the answer is nan or wrong, for float16 and bfloat16.

Equal scores of every key: the answer is the mean of v. float16, head dimension 64, one query, two keys.
"""

import sys

import torch

try:
    from flash_attn import cute
except ImportError as e:
    print(f"cannot run here: {e}")
    sys.exit(77)
if not torch.cuda.is_available():
    print("cannot run here: no GPU")
    sys.exit(77)
q = torch.ones(1, 1, 1, 64, device="cuda", dtype=torch.float16)
k = torch.ones(1, 2, 1, 64, device="cuda", dtype=torch.float16)
v = torch.tensor([1.0, 3.0], device="cuda", dtype=torch.float16).view(1, 2, 1, 1).repeat(1, 1, 1, 64)
print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {cute.__name__} {getattr(cute, '__version__', '')}")
wrong = 0
for scale in (1.0, 0.0, -1.0):
    o = cute.flash_attn_func(q, k, v, softmax_scale=scale)
    o = o[0] if isinstance(o, tuple) else o
    print(f"softmax_scale {scale}: expected 2.0, actual {float(o[0, 0, 0, 0])}")
    wrong += float(o[0, 0, 0, 0]) != 2.0
sys.exit(int(wrong > 0))
