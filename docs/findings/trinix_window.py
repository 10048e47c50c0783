"""trinix: triton_attn_func gives nan when a window or a mask leaves a block of keys without an allowed one.

exp(-inf - -inf) for the rows of a block that the window or the mask takes out before any key was seen; the docstring's own mask
example (128 rows, the first 64 keys masked) is nan throughout. On a GPU if there is one, else in Triton's interpreter with tensors
that claim to be on a GPU (the function insists).
"""

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

import torch

real = torch.cuda.is_available()
device = "cuda" if real else "cpu"
if not real:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, total_memory=2**36, name="none")
    torch.Tensor.is_cuda = property(lambda self: True)
try:
    from trinix.layers.attention.functional import triton_attn_func

    release = version("trinix")
except (ImportError, PackageNotFoundError) as error:
    print(f"cannot run here: {error}")
    sys.exit(77)

bug = False
for name, rows in (("window_size=(16, 16)", 256), ("attn_mask with keys 0 to 63 at -inf", 128)):
    q = k = v = torch.ones(1, rows, 1, 32, device=device)
    mask = torch.zeros(rows, rows, device=device)
    mask[:, :64] = -torch.inf
    more = {"window_size": (16, 16)} if "window" in name else {"attn_mask": mask}
    actual = triton_attn_func(q, k, v, **more)
    nans = int(actual.isnan().sum())
    print(f"trinix {release}, torch {torch.__version__}, {device}; {rows} rows, everything is 1; {name}")
    print(
        f"expected 1.0 everywhere, actual {actual[0, -1, 0, 0].item()} in the last row; {nans} of {actual.numel()} are nan"
    )
    bug |= nans > 0
sys.exit(bug)
