"""flash-linear-attention: parallel_attn accepts head dims up to 256, but on a Hopper GPU its backward kernels do not fit at 256.

Expected: o and gradients, or a refusal that names the head dim. Actual: OutOfResources, shared memory.
Seen with flash-linear-attention 0.6.0, triton 3.6.0, torch 2.11.0+cu130, NVIDIA H200. Exit: 1 fault seen, 0 not, 77 cannot run.
"""

import sys

try:
    import torch
    from fla.ops.attn import parallel_attn
except ImportError as e:
    print(f"cannot run here: {e}")
    sys.exit(77)
if not torch.cuda.is_available():
    print("cannot run here: no GPU")
    sys.exit(77)

bad = 0
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    for D in (64, 128, 136, 192, 256):
        g = torch.Generator("cuda").manual_seed(0)
        q, k, v = (
            torch.randn(1, 16, 1, D, device="cuda", generator=g).to(dtype).requires_grad_(True) for _ in range(3)
        )
        step = "forward"
        try:
            o = parallel_attn(q, k, v)
            step = "backward"
            o.sum().backward()
            torch.cuda.synchronize()
            said = "done"
        except Exception as e:
            said = f"{step}: {type(e).__name__}: {str(e)[:90]}"
            bad += 1
        print(f"{dtype}, D = {D}: expected done, actual {said}")
sys.exit(1 if bad else 0)
