"""flash-attention-softmax-n: slow_attention_n ignores a boolean mask, and sets every element of the caller's mask to True.

`attn_mask.masked_fill_(attn_mask.logical_not(), -inf)` writes -inf, which is True, into the mask itself; the scores are not touched.
The function is loaded from its file where the package insists on a GPU when it is imported.
"""

import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import module_from_spec, spec_from_file_location

import torch
from torch.nn.functional import scaled_dot_product_attention

try:
    library = distribution("flash-attention-softmax-n")
except PackageNotFoundError as error:
    print(f"cannot run here: no package {error}")
    sys.exit(77)
spec = spec_from_file_location("functional", library.locate_file("flash_attention_softmax_n/core/functional.py"))
functional = module_from_spec(spec)
spec.loader.exec_module(functional)

q = torch.ones(1, 1, 1, 1)
k = torch.zeros(1, 1, 2, 1)
v = torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)
mask = torch.tensor([True, False]).view(1, 1, 1, 2)
expected = scaled_dot_product_attention(q, k, v, attn_mask=mask).item()
actual = functional.slow_attention_n(q, k, v, attn_mask=mask).item()

print(f"flash-attention-softmax-n {library.version}, torch {torch.__version__}; mask = [True, False], v = [1, 3]")
print(
    f"expected o = {expected}, actual {actual}; expected mask [True, False] afterwards, actual {mask.flatten().tolist()}"
)
sys.exit(actual != expected or mask.flatten().tolist() != [True, False])
