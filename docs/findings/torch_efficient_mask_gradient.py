"""torch on a GPU: the memory-efficient backend accesses memory it must not when an additive mask alone requires a gradient.

float32, all sizes 1, D = 4: CUDA error: an illegal memory access.
"""

import subprocess
import sys

import torch

if not torch.cuda.is_available():
    print("cannot run here: no GPU")
    sys.exit(77)
CALL = """
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attention
q = torch.ones(1, 1, 1, 4, device="cuda")
mask = torch.zeros(1, 1, 1, 1, device="cuda", requires_grad=True)
with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
    o = attention(q, q, q, attn_mask=mask)
    o.sum().backward()
torch.cuda.synchronize()
print("done", type(o).__name__)
"""
done = subprocess.run(
    [sys.executable, "-c", CALL], capture_output=True, text=True, check=False
)  # a process of its own: it may die
lines = (done.stdout + done.stderr).strip().splitlines()
last = next((line for line in reversed(lines) if "Error" in line or "done" in line), "no message")
print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, cuDNN {torch.backends.cudnn.version()}")
if "No available kernel" in last:
    print(f"cannot run here: declined ({last})")
    sys.exit(77)
print(f"expected exit status 0 and 'done Tensor', or a refusal; actual exit status {done.returncode} and {last!r}")
sys.exit(int(done.returncode != 0))
