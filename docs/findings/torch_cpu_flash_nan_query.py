"""torch on a CPU: the flash backend answers 0 for a row of the query that is nan.

Softmax of nan is nan: the math backend, a GPU and torch 2.4 on a CPU answer so. A diverged model looks like one that answers 0.
"""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

q = torch.full((1, 1, 1, 1), float("nan"))
k = v = torch.ones(1, 1, 1, 1)

print(f"torch {torch.__version__}; q is nan, k and v are 1")
with sdpa_kernel(SDPBackend.MATH):
    expected = scaled_dot_product_attention(q, k, v)
with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
    actual = scaled_dot_product_attention(q, k, v)
print(f"expected {expected.item()} (math backend), actual {actual.item()} (flash backend)")
sys.exit(not actual.isnan().item())
