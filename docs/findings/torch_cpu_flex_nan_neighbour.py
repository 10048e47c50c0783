"""torch on a CPU with AMX: in bfloat16 FlexAttention gives nan for a row whose query and keys hold none.

The product of P (17 x 17) and v (17 x 16) reads one element beyond the odd row end: the first element of the next row, times 0.
If that row is nan, the row before it becomes nan too. The same happens to `P @ v` outside of attention.
"""

import sys

import torch
from torch.nn.attention import flex_attention as module

module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True  # no tracing: the eager path
q = torch.zeros(1, 1, 17, 16, dtype=torch.bfloat16)
k = v = torch.zeros(1, 1, 17, 16, dtype=torch.bfloat16)
q[0, 0, 8] = float("nan")


def rows_with_nan(x):
    """The rows of the last but one dimension that hold a nan."""
    return x.isnan().any(-1).flatten().nonzero().flatten().tolist()


flex = rows_with_nan(module.flex_attention(q, k, v))
product = rows_with_nan((q @ k.mT).softmax(-1) @ v)
print(f"torch {torch.__version__}; row 8 of q is nan, the rest and k and v are 0")
print(f"expected rows with nan: [8]; actual {flex} (FlexAttention), {product} (matmul alone)")
sys.exit(flex != [8] or product != [8])
