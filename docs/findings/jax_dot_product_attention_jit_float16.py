"""JAX on a CPU: jax.nn.dot_product_attention of float16 works eagerly and fails under jax.jit; so does bfloat16 at T = S = 1.

The function asks for a dot algorithm that the CPU lacks and catches the error to fall back; under jit the error comes later, from
the compiler, where nothing catches it.
"""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    print(f"cannot run here: {error}")
    sys.exit(77)


def outcome(call, x):
    """What a call answers, or the first line of its error."""
    try:
        return str(call(x, x, x).ravel()[0])
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


bug = False
print(f"jax {jax.__version__}; query, key and value are 1")
for dtype, length in ((jnp.float16, 4), (jnp.bfloat16, 1)):
    x = jnp.ones((1, length, 1, 8), dtype)
    expected = outcome(jax.nn.dot_product_attention, x)
    actual = outcome(jax.jit(jax.nn.dot_product_attention), x)
    print(f"{dtype.__name__}, T = S = {length}: expected {expected} (without jit), actual {actual} (with jit)")
    bug |= actual != expected
sys.exit(bug)
