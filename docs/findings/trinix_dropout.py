"""trinix: triton_attn_func drops weights before they are summed, so that the kept ones are divided by what is left of them.

Dropout of attention weights acts on the softmax: o of v = 1 is the kept weight over 1 - p, which varies from row to row around 1.
Here it is 1 in every row: the normaliser counts the dropped weights out. On a GPU if there is one, else in Triton's interpreter with
tensors that claim to be on a GPU (the function insists).
"""

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

import torch
from torch.nn.functional import scaled_dot_product_attention

real = torch.cuda.is_available()
device = "cuda" if real else "cpu"
x = torch.ones(1, 64, 1, 32, device=device)
torch.manual_seed(0)
heads_first = x.transpose(1, 2)
reference = scaled_dot_product_attention(heads_first, heads_first, heads_first, dropout_p=0.5)[0, 0, :, 0].std().item()
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

actual = triton_attn_func(x, x, x, dropout_p=0.5)[0, :, 0, 0].std().item()
print(f"trinix {release}, torch {torch.__version__}, {device}; 64 rows, v = 1, dropout_p = 0.5")
print(f"standard deviation of o over rows: expected near 0.125 (torch: {reference:.3f}), actual {actual:.1e}")
sys.exit(actual < 0.01)
