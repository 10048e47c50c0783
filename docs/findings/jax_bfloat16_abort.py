"""jax.jit(jax.nn.dot_product_attention) on a CPU: bfloat16, one batch, two heads, D = 1, 17 queries and 127 keys end the process.

Expected: an answer of shape (1, 17, 2, 1), as without jit. Actual: SIGABRT, "Check failed: instr->opcode() == HloOpcode::kBitcast".
Seen with jax and jaxlib 0.10.2, x86-64 with AMX. Exit: 1 fault seen, 0 not, 77 cannot run.
"""

import importlib.util
import os
import subprocess
import sys

if importlib.util.find_spec("jax") is None:
    print("cannot run here: no jax")
    sys.exit(77)

CODE = """
import jax, jax.numpy as jnp
q, k = jnp.ones((1, 17, 2, 1), jnp.bfloat16), jnp.ones((1, 127, 2, 1), jnp.bfloat16)
f = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, implementation="xla")
print("done", {call}(q, k, k).shape)
"""


def told(call: str) -> str:
    """How a process of its own ended."""
    p = subprocess.run(
        [sys.executable, "-c", CODE.replace("{call}", call)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    checks = [line for line in p.stderr.splitlines() if "Check failed" in line]
    return f"exit status {p.returncode}, {(checks or [p.stdout.strip() or 'no message'])[0][-70:]!r}"


plain, jitted = told("f"), told("jax.jit(f)")
print(f"expected (without jit): {plain}")
print(f"actual   (with jit):    {jitted}")
sys.exit(int("exit status 0" not in jitted))
