"""JAX Pallas: causal gpu.attention.mha with more queries than keys reads keys that do not exist.

The loop over key blocks of a causal row ends at the diagonal, not at the last key. Rows beyond the keys take the block after it: in
the interpreter that is nan, on a GPU what memory holds.
"""

import os
import sys

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
try:
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha, mha_reference
except ImportError as error:
    print(f"cannot run here: {error}")
    sys.exit(77)

interpret = jax.default_backend() == "cpu"
q = jnp.ones((1, 32, 1, 16))
k = jnp.ones((1, 16, 1, 16))
v = jnp.ones((1, 16, 1, 16))
blocks = BlockSizes(block_q=16, block_k=16)
expected = mha_reference(q, k, v, None, causal=True)
actual = mha(q, k, v, None, causal=True, block_sizes=blocks, interpret=interpret)

print(f"jax {jax.__version__}, interpret={interpret}; 32 queries, 16 keys, causal, everything is 1")
print(f"o[0, 31, 0, 0]: expected {expected[0, 31, 0, 0]} (mha_reference), actual {actual[0, 31, 0, 0]}")
sys.exit(not bool(jnp.allclose(expected, actual, atol=0.01)))
