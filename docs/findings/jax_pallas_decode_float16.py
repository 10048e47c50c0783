"""JAX Pallas: decode_attention.gqa and .mqa answer inf or 0 in float16 when many keys share the weight.

Each split of the keys stores its sum of exp(s - max) * v in float16 before it is divided: 8,192 keys of equal score with v = 10 give
81,920, which float16 cannot hold; the sum of exponentials is cast to float16 too, so that 65,536 keys divide by inf. Interpreted on
a CPU here; the casts are the same on a GPU.
"""

import os
import sys

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
try:
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.gpu import decode_attention
except ImportError as error:
    print(f"cannot run here: {error}")
    sys.exit(77)

interpret = jax.default_backend() == "cpu"
bug = False
print(f"jax {jax.__version__}, interpret={interpret}; float16, every score equal, v constant")
for keys, value in ((8192, 10.0), (65536, 0.5)):
    q = jnp.zeros((1, 4, 16), jnp.float16)
    k = jnp.zeros((1, keys, 16), jnp.float16)
    v = jnp.full((1, keys, 16), value, jnp.float16)
    expected = float(decode_attention.mqa_reference(q, k, v)[0, 0, 0])
    mqa = float(decode_attention.mqa(q, k, v, interpret=interpret)[0, 0, 0])
    gqa = float(decode_attention.gqa(q, k[:, :, None], v[:, :, None], interpret=interpret)[0, 0, 0])
    print(f"{keys} keys, v = {value}: expected {expected} (mqa_reference), actual {mqa} (mqa), {gqa} (gqa)")
    bug |= not (abs(mqa - value) < 0.01 * value and abs(gqa - value) < 0.01 * value)
sys.exit(bug)
