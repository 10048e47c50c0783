"""Values as a function of (seed, stream, indices): never a sequential generator.

Shrinking a size keeps the values that remain, and a case is bit-for-bit the same on every machine: the indices are
combined with odd 64-bit constants and mixed by splitmix64's finaliser (Steele, Lea, Flood 2014), in integers that wrap
modulo 2**64. The functions take int64 tensors or int64 NumPy arrays (faster on small cases) and give equal numbers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeVar

Ints = TypeVar("Ints")
"""A torch int64 tensor or a NumPy int64 array with at least one dimension."""

_WORD = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15
# Odd multipliers without simple ratios, one per index: sums of small multiples of them do not collide.
_WEIGHTS = (0xD1342543DE82EF95, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3, 0x589965CC75374CC3)
_USES = (
    "q",
    "k",
    "v",
    "do",
    "bias",
    "dlse",
    "dropout",
    "block_sparse",
    "random",
    "dead_rows",
    "place",
    "alibi",
    "sinks",
)
STREAMS = {name: n for n, name in enumerate(_USES)}
"""One stream of numbers per use."""


def _signed(x: int) -> int:
    """The int64 with the same 64 bits."""
    x %= _WORD
    return x - _WORD if x >= _WORD >> 1 else x


_M1, _M2 = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
_SIGNED_WEIGHTS = tuple(map(_signed, _WEIGHTS))


def _mix(x: Any) -> Any:
    """splitmix64's finaliser, elementwise; `>>` is arithmetic on int64, hence the masks."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _M1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _M2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@lru_cache(maxsize=1024)
def number(seed: int, stream: int | str) -> int:
    """A 64-bit integer (signed) that depends on the seed and the stream alone."""
    x = (seed * _GOLDEN + (STREAMS[stream] if isinstance(stream, str) else stream) + 1) % _WORD
    for _ in range(2):
        x = ((x ^ (x >> 30)) * (_M1 % _WORD)) % _WORD
        x = ((x ^ (x >> 27)) * (_M2 % _WORD)) % _WORD
        x = (x ^ (x >> 31)) + _GOLDEN
    return _signed(x)


def uniform_bits(seed: int, stream: int | str, *index: Ints) -> Ints:
    """Non-negative int64 below 2**31, uniform, a hash of the seed, the stream and the broadcast indices (one to five)."""
    x: Any = index[0] * _SIGNED_WEIGHTS[0] + number(seed, stream)  # type: ignore[operator]
    for i, weight in zip(index[1:], _SIGNED_WEIGHTS[1:], strict=False):
        x = x + i * weight  # type: ignore[operator]
    return (_mix(x) >> 33) & 0x7FFFFFFF
