"""torch on a GPU: the flash and the cuDNN backend answer nan for a scale of 0 or below.

A scale is a factor: softmax(scale q k^T) v is defined for each real one, 0 gives the mean of v. The math and the memory-efficient
backend answer so.
"""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

if not torch.cuda.is_available():
    print("cannot run here: no GPU")
    sys.exit(77)
q = k = torch.ones(1, 1, 2, 8, device="cuda", dtype=torch.float16)
v = torch.tensor([1.0, 3.0], device="cuda", dtype=torch.float16).view(1, 1, 2, 1).expand(1, 1, 2, 8).contiguous()
print(
    f"torch {torch.__version__}, {torch.cuda.get_device_name()}, cuDNN {torch.backends.cudnn.version()}; equal scores, v = [1, 3]"
)
bug = ran = False
for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
    for scale in (-1.0, 0.0):
        try:
            with sdpa_kernel(backend):
                actual = scaled_dot_product_attention(q, k, v, scale=scale)[0, 0, 0, 0].item()
        except RuntimeError as error:
            print(f"{backend.name}, scale {scale}: declined ({str(error).splitlines()[0]})")
            continue
        print(f"{backend.name}, scale {scale}: expected 2.0, actual {actual}")
        ran, bug = True, bug or actual != 2.0
sys.exit(int(bug) if ran else 77)
