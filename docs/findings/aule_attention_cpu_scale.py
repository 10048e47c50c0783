"""aule-attention: the CPU backend ignores `scale`, in flash_attention and in its scaled_dot_product_attention.

_cpu_attention has no such parameter. Nor does it take fewer heads of k and v, which enable_gqa promises. The backend is set as
aule.install(backend="cpu") sets it, without replacing torch's function.
"""

import sys
from importlib.metadata import PackageNotFoundError, version

import torch
from torch.nn.functional import scaled_dot_product_attention

try:
    import aule

    release = version("aule-attention")
except (ImportError, PackageNotFoundError) as error:
    print(f"cannot run here: {error}")
    sys.exit(77)

aule._forced_backend = "cpu"
q = torch.ones(1, 1, 1, 1)
k = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)
v = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)
expected = scaled_dot_product_attention(q, k, v, scale=0.0).item()
one = aule.flash_attention(q, k, v, causal=False, scale=0.0).item()
two = aule.scaled_dot_product_attention(q, k, v, scale=0.0).item()
print(f"aule-attention {release}, torch {torch.__version__}; scale = 0: equal weights of v = [0, 1]")
print(f"expected {expected}, actual {one:.4f} (flash_attention), {two:.4f} (scaled_dot_product_attention)")
sys.exit(not abs(one - expected) < 1e-6 or not abs(two - expected) < 1e-6)
