"""cuda-triton-multiarch: flash_attention_full_triton writes past the end of its output when the length is not a multiple of 64.

`mask_row = offsets_row < seq_len` compares the offset within a block with the length, so that a last, partial block stores all of its
64 rows: of one (batch, head) over the next, and of the last one over foreign memory. In Triton's interpreter here, where the answer
is placed inside a larger allocation to show it; the kernel is the same on a GPU.
"""

import os
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

os.environ["TRITON_INTERPRET"] = "1"
try:
    import kernels.flash_attention_full as library

    release = version("cuda-triton-multiarch")
except (ImportError, PackageNotFoundError) as error:
    print(f"cannot run here: {error}")
    sys.exit(77)

ROWS, D = 65, 16
memory = torch.full((3, 256, D), 7.0, dtype=torch.float16)  # q, k and v, each followed by rows that are nobody's
answer = torch.full((256, D), -1.0, dtype=torch.float16)
q, k, v = (x[:ROWS].view(1, 1, ROWS, D) for x in memory.clone())
real = torch.empty_like
torch.empty_like = lambda x, **more: answer[:ROWS].view(1, 1, ROWS, D) if x is q else real(x, **more)
library.flash_attention_full_triton(q, k, v)
torch.empty_like = real
touched = int((answer[ROWS:] != -1.0).any(1).sum())
print(f"cuda-triton-multiarch {release}, torch {torch.__version__}, Triton's interpreter; {ROWS} rows, D = {D}")
print(f"rows beyond the output that were written: expected 0, actual {touched}")
sys.exit(touched != 0)
