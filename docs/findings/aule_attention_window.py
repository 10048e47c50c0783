"""aule-attention: flash_attention_triton with window_size gives nan when causal, drops keys when not, and ignores it backwards.

Causal: a block of keys that a row's window masks out wholly gives exp(-inf - -inf). Otherwise: the block loop covers window / 2 on
either side of the middle of the query block, the mask window. The backward kernel has no window at all. On a GPU if there is one,
else in Triton's interpreter.
"""

import os
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
try:
    from aule.triton_flash import flash_attention_triton
    from torch.nn.functional import scaled_dot_product_attention

    release = version("aule-attention")
except (ImportError, PackageNotFoundError) as error:
    print(f"cannot run here: {error}")
    sys.exit(77)

torch.manual_seed(0)
print(f"aule-attention {release}, torch {torch.__version__}, {device}; float32, 128 rows, D = 16, equal scores")
v = torch.arange(128.0, device=device).view(1, 1, 128, 1).expand(1, 1, 128, 16).contiguous()
distance = torch.arange(128, device=device)[:, None] - torch.arange(128, device=device)
bug = False


def report(name, expected, actual):
    """Print one value of each; true if they differ anywhere."""
    wrong = ~torch.isclose(expected, actual, atol=1e-2, rtol=1e-2)
    at = tuple(wrong.nonzero()[0].tolist()) if wrong.any() else (0, 0, 0, 0)
    print(f"{name}{list(at)}: expected {expected[at].item():.4f}, actual {actual[at].item():.4f}; {wrong.sum()} wrong")
    return bool(wrong.any())


for causal, window in ((True, 8), (False, 8)):
    allowed = (distance >= 0) & (distance <= window) if causal else distance.abs() <= window
    q = torch.zeros(1, 1, 128, 16, device=device, requires_grad=True)
    k = torch.ones(1, 1, 128, 16, device=device)
    expected = scaled_dot_product_attention(q, k, v, attn_mask=allowed)
    actual = flash_attention_triton(q, k, v, causal=causal, window_size=window)
    bug |= report(f"causal={causal}, window_size={window}: o", expected, actual)

x = [torch.ones(1, 1, 64, 16, device=device, requires_grad=True) for _ in range(3)]
scaled_dot_product_attention(*x, attn_mask=((distance >= 0) & (distance <= 8))[:64, :64])[0, 0, 63].sum().backward()
expected = x[2].grad.clone()
x[2].grad = None
flash_attention_triton(*x, causal=True, window_size=8)[0, 0, 63].sum().backward()
bug |= report("64 rows, causal, window_size=8, only row 63 has a gradient: dv", expected, x[2].grad)
sys.exit(bug)
