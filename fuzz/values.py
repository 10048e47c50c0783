"""The numbers in q, k, v and do: every data regime as a function of (seed, tensor, b, h, i, d).

Everything is exact in float64 and rounded to the dtype afterwards: integer hashes, a table of normal quantiles with
linear interpolation, products with powers of two, IEEE divisions. No function of libm is involved, so that two machines
agree in every bit. Channel 0 carries what a regime needs (a shift, a ramp), so that it survives any head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .hashing import STREAMS, number, uniform_bits

Array = NDArray[np.float64]
Index = NDArray[np.int64]

_SEGMENTS = 1024
_STEPS = (1 << 31) // _SEGMENTS


def _quantile_table() -> Array:
    """Normal quantiles at n/1024, ends at -4 and 4, rounded to 2**-20: far from ties, so libm's last bit cannot matter."""
    inner = [NormalDist().inv_cdf(n / _SEGMENTS) for n in range(1, _SEGMENTS // 2)]
    half = [-4.0, *(round(x * 2.0**20) / 2.0**20 for x in inner), 0.0]
    return np.array(half + [-x for x in half[-2::-1]])


QUANTILES = _quantile_table()
_RISES = np.diff(QUANTILES) / _STEPS


def normal(bits: Index) -> Array:
    """Standard normal numbers within [-4, 4] from 31 uniform bits; the product and the sum are exact in float64."""
    segment, step = bits >> 21, bits & (_STEPS - 1)
    return QUANTILES[segment] + _RISES[segment] * step


def uniform(bits: Index) -> Array:
    """Uniform numbers in [-1, 1) from 31 uniform bits."""
    return (bits - (1 << 30)) / float(1 << 30)


def trailing_zeros(bits: Index) -> Index:
    """How many low bits are zero: n with probability 2**-(n+1)."""
    low = bits & -bits
    return np.where(low == 0, 31, np.frexp(low.astype(np.float64))[1] - 1).astype(np.int64)


@lru_cache(maxsize=4096)
def _axis(n: int, axis: int) -> Index:
    """0..n-1 along one of four axes."""
    index = np.arange(n, dtype=np.int64).reshape([n if a == axis else 1 for a in range(4)])
    index.setflags(write=False)
    return index


@dataclass(frozen=True)
class Place:
    """Where numbers are wanted: a tensor of a case and its indices b (B,1,1,1), h (1,H,1,1), i (1,1,L,1), d (1,1,1,D)."""

    seed: int
    tensor: str
    dtype: str
    b: Index
    h: Index
    i: Index
    d: Index

    @classmethod
    def of(cls, seed: int, tensor: str, dtype: str, shape: tuple[int, ...]) -> Place:
        """The whole tensor of that shape."""
        return cls(seed, tensor, dtype, *(_axis(n, a) for a, n in enumerate(shape)))

    def bits(self, use: int = 0, axes: str = "bhid") -> Index:
        """31 uniform bits for each element; those that differ in no index of `axes` share theirs."""
        index = [getattr(self, a) if a in axes else _axis(1, 0) for a in "bhid"]
        return uniform_bits(self.seed, STREAMS[self.tensor] + 64 * use, *index)

    def normal(self, use: int = 0, axes: str = "bhid") -> Array:
        return normal(self.bits(use, axes))

    def choose(self, *options: float) -> float:
        """One of the options, the same for every tensor of the case."""
        return options[number(self.seed, "place") % len(options)]


def _powers(exponent: Array) -> Array:
    """2**round(exponent)."""
    return np.ldexp(1.0, np.rint(exponent).astype(np.int64))


def _channel0(at: Place, first: NDArray[Any] | float, rest: Array) -> Array:
    return np.where(at.d == 0, first, rest)


def _uniform(at: Place) -> Array:
    return uniform(at.bits())


def _large(at: Place) -> Array:
    """Every row of scores is shifted by +-1e2 .. 1e6: q's channel 0 holds the shift, k's is 1."""
    x = at.normal()
    if at.tensor == "q":
        bits = at.bits(1, "bhi")
        size = np.array([1e2, 1e2, 1e2, 1e3, 1e3, 1e4, 1e5, 1e6])[bits & 7]
        return _channel0(at, np.where(bits & 8, size, -size), x)
    return _channel0(at, 1.0, x) if at.tensor == "k" else x


def _negative(at: Place) -> Array:
    """All scores are near -900/sqrt(D): sums of exponentials vanish unless the maximum is taken out."""
    x = at.normal()
    if at.tensor == "q":
        return _channel0(at, 30.0, x / 4)
    return _channel0(at, x / 4 - 30.0, x / 4) if at.tensor == "k" else x


def _constant(at: Place) -> Array:
    """All rows of q, of k, and for half of the seeds of v, are the same."""
    rows = "bhd" if at.tensor in "qk" or (at.tensor == "v" and at.choose(0, 1)) else "bhid"
    return at.normal(0, rows) + np.zeros(at.i.shape)


def _ties(at: Place) -> Array:
    """q and k hold -1, 0 and 1, v integers: exact ties of scores."""
    x = at.normal()
    if at.tensor in "qk":
        return np.sign(x) * (np.abs(x) > 0.7)
    return np.rint(x) if at.tensor == "v" else x


def _onehot(at: Place) -> Array:
    """Rows of q and k have one non-zero channel, channel n with probability 2**-(n+1); those beyond the width are zero."""
    if at.tensor not in "qk":
        return at.normal()
    hot = trailing_zeros(at.bits(1, "bhi")) == at.d
    return np.where(hot, 3.0 if at.tensor == "q" else 64.0, 0.0)


def _needle(at: Place) -> Array:
    """Scores of a few keys stand far above the others, the rarer the higher, so that one key dominates."""
    x = at.normal()
    if at.tensor == "q":
        return _channel0(at, 3.0, x)
    height = 16.0 * trailing_zeros(at.bits(1, "bhi"))
    return _channel0(at, height + x / 4, x) if at.tensor == "k" else x


def _outlier(at: Place) -> Array:
    """Channel 0 is 10 to 100 times the others."""
    x = at.normal()
    return _channel0(at, x * {"q": 20, "k": 10, "v": 100, "do": 1}[at.tensor], x)


def _heavy(at: Place) -> Array:
    """A ratio of normals: tails to +-200."""
    return at.normal() / (np.abs(at.normal(1)) + 0.02)


def _sparse_int(at: Place) -> Array:
    """Three quarters zeros, the others integers of -3..3: many results are exact."""
    bits = at.bits()
    return np.where(bits & 3, 0, (bits >> 8) % 7 - 3).astype(np.float64)


def _cancel(at: Place) -> Array:
    """v alternates between +1000 and -1000 along the keys: o is a small difference of large sums."""
    x = at.normal()
    if at.tensor == "v":
        return np.where(at.i & 1, -1000.0, 1000.0) + x
    return x / 32 if at.tensor == "k" else x


def _subnormal(at: Place) -> Array:
    """v, and for half of the seeds do, lie around the smallest normal number of the dtype."""
    x = at.normal()
    small = {"float32": -129, "bfloat16": -129, "float16": -18, "float64": -1025}[at.dtype]
    if at.tensor == "v" or (at.tensor == "do" and at.choose(0, 1)):
        return np.ldexp(x, small)
    return x


def _ascending(at: Place) -> Array:
    """Scores grow along the keys, so that every tile raises the running maximum."""
    x = at.normal() / 4
    if at.tensor == "q":
        return _channel0(at, 4.0, x)
    return _channel0(at, at.i * 0.25, x) if at.tensor == "k" else x


def _offset(at: Place) -> Array:
    """v has a mean of 10, 100 or 1000; do has one of 0 or 3."""
    x = at.normal()
    if at.tensor == "v":
        return x + at.choose(10, 100, 1000)
    return x + at.choose(0, 3) if at.tensor == "do" else x


def _lowrank(at: Place) -> Array:
    """Rows of q and k are one direction plus a hundredth; v is negative."""
    x = at.normal()
    if at.tensor in "qk":
        direction = normal(uniform_bits(at.seed, "place", at.d))
        return direction + x / 64
    return -np.abs(x) if at.tensor == "v" else x


def _mixedscale(at: Place) -> Array:
    """Rows of q, v and do differ by powers of two."""
    spread = {"q": 2, "k": 0, "v": 3, "do": 2}[at.tensor]
    return at.normal() * _powers(spread * at.normal(1, "bhi"))


def _tiny(at: Place) -> Array:
    """Everything is 2**-7 or much smaller, but normal in the dtype."""
    return np.ldexp(at.normal(), -int(at.choose(7, 9, 10) if at.dtype == "float16" else at.choose(7, 13, 20)))


def _huge(at: Place) -> Array:
    """q and k are 8 to 128 times larger: the softmax is nearly one-hot."""
    return at.normal() * (at.choose(8, 32, 128) if at.tensor in "qk" else 1)


REGIMES: dict[str, Callable[[Place], Array]] = {
    "normal": Place.normal, "uniform": _uniform, "large": _large, "negative": _negative, "constant": _constant, "ties": _ties,
    "onehot": _onehot, "needle": _needle, "outlier": _outlier, "heavy": _heavy, "sparse_int": _sparse_int, "cancel": _cancel,
    "subnormal": _subnormal, "ascending": _ascending, "offset": _offset, "lowrank": _lowrank, "mixedscale": _mixedscale,
    "tiny": _tiny, "huge": _huge, "nonfinite": Place.normal, "nonfinite_masked": Place.normal,
}  # fmt: skip
"""The finite numbers of each regime; `plants` adds the NaN and Inf of the two non-finite ones."""


def _grad_scaled(at: Place) -> Array:
    """A loss scale of 2**16 (2**8 in float16, whose largest number is 65504)."""
    return np.ldexp(at.normal(), 8 if at.dtype == "float16" else 16)


def _grad_cancel(at: Place) -> Array:
    """Rows near +10 and -10 in turn: dV sums cancel, and with a v of large mean dP - delta does too."""
    return np.where(at.i & 1, -1.0, 1.0) * (10 + at.normal() / 8)


GRADIENTS: dict[str, Callable[[Place], Array]] = {
    "ones": lambda at: np.ones(np.broadcast_shapes(at.b.shape, at.h.shape, at.i.shape, at.d.shape)),
    "zero": lambda at: np.zeros(np.broadcast_shapes(at.b.shape, at.h.shape, at.i.shape, at.d.shape)),
    "scaled": _grad_scaled,
    "cancel": _grad_cancel,
}
"""The output gradients that do not follow the data regime."""

_LARGEST = {"float32": 1e6, "bfloat16": 1e6, "float16": 6e4, "float64": 1e6}


def finite(data: str, grad: str, at: Place) -> Array:
    """The float64 numbers of a tensor under a data regime; do follows it unless `grad` names its own."""
    rule = GRADIENTS[grad] if at.tensor == "do" and grad in GRADIENTS else REGIMES[data]
    return np.clip(rule(at), -_LARGEST[at.dtype], _LARGEST[at.dtype])


_BIAS_SIZES = {"": 0.0, "normal": 1.0, "large": 64.0, "negative": -8.0}


def bias(kind: str, seed: int, shape: tuple[int, ...]) -> Array:
    """Additive values over (b, h, query, key): normal, 64 times that, or -8 times its magnitude."""
    x = Place.of(seed, "bias", "", shape).normal()
    return (np.abs(x) if kind == "negative" else x) * _BIAS_SIZES[kind]


def alibi(kind: str, seed: int, B: int, Hq: int) -> Array:
    """Slopes of ALiBi, (Hq,), or (B, Hq) of kind batch; to be rounded to float32, which hides a last bit of libm's power."""
    standard = np.array([2.0 ** (-8.0 * (h + 1) / Hq) for h in range(Hq)])
    if kind == "batch":
        return (1.0 + uniform(uniform_bits(seed, "alibi", *_index(B, Hq)))) / 2
    if kind == "large":
        return 15.0 * (1.0 + uniform(uniform_bits(seed, "alibi", _index(Hq)[0])))
    return standard * {"standard": 1.0, "negative": -1.0, "zero": 0.0}[kind]


def sinks(kind: str, seed: int, Hq: int) -> Array:
    """Logits of the sinks, (Hq,): normal, 30 times that, that minus 8, or -inf in heads 0, 2, 4 and so on."""
    x = normal(uniform_bits(seed, "sinks", _index(Hq)[0]))
    if kind == "-inf":
        return np.where(np.arange(Hq) % 2, x, -np.inf)
    return {"normal": x, "large": 30.0 * x, "negative": x - 8.0}[kind]


def _index(*sizes: int) -> list[Index]:
    return list(np.ix_(*(np.arange(n, dtype=np.int64) for n in sizes)))


NONFINITE = (float("nan"), float("inf"), float("-inf"))


def live_plant(
    seed: int, tensor: str, live: NDArray[np.bool_], width: int
) -> tuple[tuple[int, int, int, int], float] | None:
    """Where regime `nonfinite` puts one non-finite number in a tensor, and which; None where it puts none.

    live (B, H, L): the rows that take part. The place is clamped into the tensor, so that it stays while sizes shrink.
    """
    chosen = number(seed, "place") % 15 + 1  # a non-empty subset of the four tensors
    rows = np.argwhere(live)
    if not chosen >> ("q", "k", "v", "do").index(tensor) & 1 or not len(rows) or not width:
        return None
    pick = number(seed, STREAMS[tensor] + 64 * 2)
    wanted = [min(pick >> shift & 7, size - 1) for shift, size in zip((4, 8, 12), live.shape, strict=True)]
    b, h, i = min(rows.tolist(), key=lambda row: [abs(r - w) for r, w in zip(row, wanted, strict=True)])
    return (b, h, i, min(pick >> 16 & 7, width - 1)), NONFINITE[pick % 3]


def masked_plant(seed: int, tensor: str) -> float | None:
    """What regime `nonfinite_masked` puts into all masked-out rows of k or v; None where it leaves them alone."""
    chosen = number(seed, "place") % 3 + 1  # k, v or both
    if tensor not in "kv" or not chosen >> "kv".index(tensor) & 1:
        return None
    return NONFINITE[number(seed, STREAMS[tensor] + 64 * 2) % 3]
