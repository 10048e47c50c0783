"""torch on a GPU: the cuDNN backend's gradients are nan when Lk is 64 more than a multiple of 128 and all scores are low.

Fits one cause: the keys that fill a tile of 128 are not masked in the backward pass; their scores are 0, exp(0 - lse) overflows, and
inf times the zero key is nan. Lk = 63 or 65 is right.
"""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

if not torch.cuda.is_available():
    print("cannot run here: no GPU")
    sys.exit(77)
print(
    f"torch {torch.__version__}, {torch.cuda.get_device_name()}, cuDNN {torch.backends.cudnn.version()}; every score is -60 or -200"
)
bug = ran = False
for dtype, score in ((torch.float16, -60.0), (torch.bfloat16, -200.0)):
    for keys in (63, 64):
        q = torch.zeros(1, 1, 64, 8, device="cuda", dtype=dtype)
        q[..., 0] = score / 8
        q.requires_grad_()
        k = torch.zeros(1, 1, keys, 8, device="cuda", dtype=dtype)
        k[..., 0] = 8.0
        v = torch.randn(1, 1, keys, 8, device="cuda", dtype=dtype)
        try:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                scaled_dot_product_attention(q, k.requires_grad_(), v.requires_grad_(), scale=1.0).sum().backward()
        except RuntimeError as error:
            print(f"{dtype}, Lk = {keys}: declined ({str(error).splitlines()[0]})")
            continue
        nans = [int(x.grad.isnan().sum()) for x in (q, k, v)]
        print(f"{dtype}, Lk = {keys}: nan in dq, dk, dv: expected [0, 0, 0], actual {nans}")
        ran, bug = True, bug or sum(nans) > 0
sys.exit(int(bug) if ran else 77)
