"""JAX: with is_causal and a bias of finfo.min, jax.nn.dot_product_attention lets a row see the future.

Masked scores are set to 0.7 times finfo.min, which is more than finfo.min: where the bias of every allowed key is finfo.min (left
padding as most libraries write it), the softmax goes to the masked keys, that is to later tokens.
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

q = k = jnp.ones((1, 2, 1, 1), jnp.float32)
padded = jnp.zeros((1, 1, 2, 2), jnp.float32).at[..., 0].set(jnp.finfo(jnp.float32).min)  # key 0 is padding
answers = []
for future in (10.0, 20.0):
    v = jnp.array([1.0, future], jnp.float32).reshape(1, 2, 1, 1)
    answers.append(float(jax.nn.dot_product_attention(q, k, v, bias=padded, is_causal=True)[0, 0, 0, 0]))

print(f"jax {jax.__version__}; row 0 may see key 0 alone, v[0] = 1, v[1] = 10 and then 20")
print(f"expected o[0] = [1.0, 1.0]: one allowed key, whatever v[1] is; actual {answers}")
sys.exit(answers[0] != answers[1])
