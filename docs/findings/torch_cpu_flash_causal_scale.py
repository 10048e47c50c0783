"""torch on a CPU: is_causal with a scale of 0 or below gives nan in the flash backend.

Scores that the causal mask has set to -inf are multiplied by the scale afterwards: -inf times 0 is nan, times -1 is +inf.
"""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

q = k = torch.ones(1, 1, 2, 1)
v = torch.tensor([[[[1.0], [3.0]]]])
expected = torch.tensor([[[[1.0], [2.0]]]])  # row 0 sees key 0; row 1 sees both, with equal scores

print(f"torch {torch.__version__}; is_causal=True")
bug = False
for scale in (-1.0, 0.0):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        actual = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    print(f"scale {scale}: expected {expected.flatten().tolist()}, actual {actual.flatten().tolist()}")
    bug |= not torch.allclose(actual, expected)
sys.exit(bug)
