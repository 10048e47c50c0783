"""torch on a GPU: where a boolean mask leaves a row no key, the cuDNN backend answers the mean of v; the math backend answers 0.

Such a row also sends a gradient to v, though no key takes part.
"""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

if not torch.cuda.is_available():
    print("cannot run here: no GPU")
    sys.exit(77)
q = k = torch.ones(1, 1, 8, 8, device="cuda", dtype=torch.float16)
answers = []
print(
    f"torch {torch.__version__}, {torch.cuda.get_device_name()}, cuDNN {torch.backends.cudnn.version()}; row 0 may see no key, v = 1"
)
for backend in (SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION):
    v = torch.ones(1, 1, 8, 8, device="cuda", dtype=torch.float16, requires_grad=True)
    mask = torch.ones(8, 8, dtype=torch.bool, device="cuda")
    mask[0] = False
    try:
        with sdpa_kernel(backend):
            o = scaled_dot_product_attention(q, k, v, attn_mask=mask)
            o[0, 0, 0].sum().backward()
    except RuntimeError as error:
        print(f"cannot run here: {backend.name} declines: {str(error).splitlines()[0]}")
        sys.exit(77)
    answers.append((o[0, 0, 0, 0].item(), v.grad.abs().sum().item()))
print(f"o[0] and the sum of |dv| from row 0: expected {answers[0]} (math), actual {answers[1]} (cuDNN)")
sys.exit(answers[0] != answers[1])
