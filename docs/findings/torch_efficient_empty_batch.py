"""torch on a GPU: of an empty batch in bfloat16 with Dv = 160 the memory-efficient backend divides by 0 and the process dies (SIGFPE)."""

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
q = torch.ones(0, 1, 1, 8, device="cuda", dtype=torch.bfloat16)
v = torch.ones(0, 1, 1, 160, device="cuda", dtype=torch.bfloat16, requires_grad=True)
with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
    o = attention(q, q, v)
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
