"""torch on a GPU: the cuDNN backend dies of a misaligned address for a boolean mask whose rows are not aligned to 16 bytes.

Ten queries and six keys are enough. No later call on the GPU survives it in the same process.
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
q = torch.ones(1, 1, 10, 16, device="cuda", dtype=torch.float16)
k = torch.ones(1, 1, 6, 16, device="cuda", dtype=torch.float16, requires_grad=True)
mask = torch.ones(10, 6, dtype=torch.bool, device="cuda")
with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
    o = attention(q, k, k, attn_mask=mask)
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
