"""flash-attention-jax: more than 1,024 keys, not a multiple of 1,024, are counted twice in part.

Keys are taken in chunks of 1,024 by dynamic_slice, which moves a slice that would overrun back into the array: of 1,536 keys the
last chunk is 512 to 1,535 again. Gradients raise TypeError at such lengths.
"""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
try:
    from importlib.metadata import version

    import flash_attention_jax as library
    import jax
    import jax.numpy as jnp
except ImportError as error:
    print(f"cannot run here: {error}")
    sys.exit(77)

keys = 1536
q = jnp.zeros((1, 1, 1, 4))
k = jnp.zeros((1, 1, keys, 4))
v = jnp.zeros((1, 1, keys, 4)).at[:, :, :512].set(1.0)  # the first third of the keys says 1: every score is equal
mask = jnp.ones((1, keys), bool)
expected = float(library.plain_attention(q, k, v, mask)[0, 0, 0, 0])
flash = float(library.flash_attention(q, k, v, mask)[0, 0, 0, 0])
causal = float(library.causal_flash_attention(q, k, v)[0, 0, 0, 0])

print(
    f"flash-attention-jax {version('flash-attention-jax')}, jax {jax.__version__}; one query, {keys} keys of equal score"
)
print(
    f"expected {expected:.4f} (plain_attention), actual {flash:.4f} (flash_attention), {causal:.4f} (causal_flash_attention)"
)
sys.exit(abs(flash - expected) > 1e-3 or abs(causal - expected) > 1e-3)
