"""What "simpler" means for a case: a total order, and the changes that go down in it.

A person who writes a failing case by hand uses few features first, then small tensors, then plain values, and seed 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from itertools import combinations
from typing import Any

from .case import (
    ALIBI,
    BIAS,
    DATA,
    DTYPES,
    GRADS,
    LAYOUTS,
    MASK_FILLS,
    MASK_FORMS,
    MODES,
    SEQUENCES,
    SINKS,
    SIZES,
    Case,
)
from .masks import ALIGNMENTS, KINDS, And, Causal, Full, Mask, Not, Or, Packed, Padding, Window

DEFAULT = Case()
LENGTHS = ("B", "Lq", "Lk")
"""Sizes that may be 0. An empty tensor is an edge to be told about, not a small size: it counts as a feature."""
LAYOUT_FIELDS = tuple(f"layout_{t}" for t in ("q", "k", "v", "do", "mask"))
ORDERED: dict[str, tuple[str, ...]] = {
    "dtype": DTYPES, "mask_form": MASK_FORMS, "mask_fill": MASK_FILLS, "bias": BIAS, "data": DATA, "grad": GRADS,
    "sequence": SEQUENCES, "alibi": ALIBI, "sinks": SINKS, "mode": MODES, **dict.fromkeys(LAYOUT_FIELDS, LAYOUTS),
}  # fmt: skip
"""Fields whose values are names, plainest first."""
NUMBERS = ("scale", "softcap", "dropout")
FEATURES = tuple(f.name for f in fields(Case) if f.name not in (*SIZES, "seed", "mask", "requires_grad"))
GROUPS: dict[str, tuple[str, ...]] = {
    "mask": ("mask", "mask_form", "mask_fill", "mask_axes", "layout_mask"),
    "bias": ("bias", "bias_axes", "layout_mask"),
    "layouts": LAYOUT_FIELDS,
    "gradients": ("grad", "lse_grad", "layout_do"),
    "scores": ("scale", "softcap", "dropout"),
}
"""Fields that make sense only together: they are reset together before one by one."""
_PLAIN = (1.0, 2.0, 0.5, 0.0, -1.0, 10.0)
_PERCENT = (0, 100, 50)
_LEAST = {"left": -1, "right": -1, "stride": 1, "block_q": 1, "block_k": 1}
PLAIN_MASKS = (Full(), Causal(), Causal("bottom_right"), Padding((0,)), Padding((1,)), Window(0, 0), Window(0, -1))
"""Masks that a person would try first."""
_SHARED_AXES = "qk"  # the default of masks and biases: what a person writes first


def size(case: Case) -> tuple[Any, ...]:
    """How far the case is from the simplest one; comparing these tuples is the total order of shrinking."""
    sizes = tuple(_extent(getattr(case, n)) for n in SIZES)
    return (
        feature_count(case),
        _work(case),
        sum(n != 1 for n in sizes),
        sum(sizes),
        sizes,
        mask_rank(case.mask),
        tuple(_ordinal(case, n) for n in FEATURES),
        _axes_rank(case.requires_grad, ""),
        case.seed,
    )


def feature_count(case: Case) -> int:
    """How many things a reader must take in besides sizes and seed."""
    changed: int = sum(getattr(case, n) != getattr(DEFAULT, n) for n in FEATURES)
    masks: int = sum(_told(m) for m in case.mask.walk())
    empty: int = sum(getattr(case, n) == 0 for n in LENGTHS)
    return changed + masks + empty + len(case.requires_grad) + (case.Hq != case.Hkv)


def _told(mask: Mask) -> int:
    """Things to take in about one mask: sequences without queries or keys and masks inside them are told apart."""
    if isinstance(mask, Packed):
        return 1 + len(mask.inside) + (0 in mask.lengths_q) + (0 in mask.lengths_k)
    return not isinstance(mask, Full)


def _extent(n: int) -> float:
    return n or 1.5


def _work(case: Case) -> float:
    return _extent(case.B) * case.Hq * _extent(case.Lq) * _extent(case.Lk) * (case.D + case.Dv)


def _ordinal(case: Case, name: str) -> tuple[float, ...]:
    value = getattr(case, name)
    if name in ORDERED:
        return (ORDERED[name].index(value),)
    if name in NUMBERS:
        return _plainness(value)
    if name.endswith("_axes"):
        return _axes_rank(value, getattr(DEFAULT, name))
    return (float(value),)


def _plainness(x: float | None) -> tuple[float, ...]:
    """Few digits first: None, 1.0, 2.0, ..., then by the length of the text."""
    if x is None:
        return (-1.0, 0.0)
    return (_PLAIN.index(x) if x in _PLAIN else len(_PLAIN) + len(repr(x)), abs(x))


def _axes_rank(axes: str, default: str) -> tuple[int, ...]:
    letters = "bhqkvs"  # also ranks requires_grad: its own letters b, k, q, s, v are all here
    return (axes != default, len(axes), *(letters.index(c) for c in axes))


def mask_rank(mask: Mask) -> tuple[Any, ...]:
    """Order of masks: fewer nodes, then the kind in the order of KINDS, then smaller parameters."""
    nodes = list(mask.walk())
    kinds = list(KINDS)
    return (len(nodes), tuple(kinds.index(m.kind) for m in nodes), tuple(_parameters(m) for m in nodes))


def _parameters(mask: Mask) -> tuple[Any, ...]:
    out: list[Any] = []
    for f in fields(mask):  # type: ignore[arg-type]
        value = getattr(mask, f.name)
        if not isinstance(value, Mask):
            out.append(_parameter_rank(f.name, value))
    return tuple(out)


def _parameter_rank(name: str, value: Any) -> tuple[int, ...]:
    if name == "align":
        return (ALIGNMENTS.index(value),)
    if name == "causal":
        return (("", *ALIGNMENTS).index(value),)
    if name == "axes":
        return _axes_rank(value, _SHARED_AXES)
    if name in ("percent", "dead_rows"):
        return (_PERCENT.index(value) if value in _PERCENT else len(_PERCENT) + value,)
    if isinstance(value, tuple):
        return (len(value), sum(value), *value)
    return (value,)


def simpler_masks(mask: Mask) -> Iterator[Mask]:
    """Masks to try in place of this one, boldest first."""
    yield from (m for m in PLAIN_MASKS if mask_rank(m) < mask_rank(mask))
    inner = {f.name: getattr(mask, f.name) for f in fields(mask)}  # type: ignore[arg-type]
    for name, value in inner.items():
        if isinstance(value, Mask):
            yield value
            yield from (_with(mask, name, m) for m in simpler_masks(value))
    for name, value in inner.items():
        if not isinstance(value, Mask):
            yield from (_with(mask, name, v) for v in _simpler_parameters(name, value))


def _with(mask: Mask, name: str, value: Any) -> Mask:
    """The mask with one field changed; itself if the value is not allowed; `and`, `or`, `not` of Full collapse."""
    try:
        made: Mask = replace(mask, **{name: value})  # type: ignore[type-var]
    except ValueError:
        return mask
    match made:
        case And(first=Full(), second=other) | And(first=other, second=Full()):
            return other
        case Or(first=Full()) | Or(second=Full()):
            return Full()
        case Not(inner=Not(inner=other)):
            return other
    return made


def _simpler_parameters(name: str, value: Any) -> Iterator[Any]:
    if name == "align":
        yield from ALIGNMENTS[: ALIGNMENTS.index(value)]
    elif name == "causal":
        yield from ("", *ALIGNMENTS)[: ("", *ALIGNMENTS).index(value)]
    elif name == "axes":
        shorter = ["".join(c) for n in range(1, len(value) + 1) for c in combinations(value, n)]
        yield from sorted(
            (a for a in {_SHARED_AXES, *shorter} if a != value), key=lambda a: _axes_rank(a, _SHARED_AXES)
        )
    elif name in ("percent", "dead_rows"):
        yield from (p for p in (*_PERCENT, 25, 75) if p != value)
    elif isinstance(value, tuple):
        yield from _simpler_lengths(value)
    else:
        yield from below(value, _LEAST.get(name, 0))


def _simpler_lengths(lengths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    yield from ((n,) for n in sorted({0, 1, *lengths}) if (n,) != lengths)
    for at in range(len(lengths)):
        if len(lengths) > 1:
            yield lengths[:at] + lengths[at + 1 :]
        yield from ((*lengths[:at], n, *lengths[at + 1 :]) for n in below(lengths[at]))


def below(n: int, low: int = 0) -> Iterator[int]:
    """Integers under n worth trying: the smallest, then closer and closer to n."""
    seen = {n}
    for value in (low, 0, 1, 2, *(n - (n - low) // step for step in (2, 4, 8, 16, 32, 64)), n - 1):
        if low <= value < n and value not in seen:
            seen.add(value)
            yield value


def edges(n: int) -> Iterator[int]:
    """Sizes under n where kernels change behaviour: tiny ones, around powers of two, whole tiles less; ascending."""
    near = {2**p + d for p in range(1, 10) for d in (-1, 0, 1)} | {5, 6, 10, 12, 20, 24, 40, 48}
    less = {n - t for t in (1, 2, 8, 16, 32, 64, 128)}
    yield from sorted(m for m in near | less if 1 < m < n)


def simpler_values(case: Case) -> Iterator[Mapping[str, Any]]:
    """Changes of one field to a plainer value that is not its default."""
    for name, order in ORDERED.items():
        yield from ({name: v} for v in order[1 : order.index(getattr(case, name))])
    for name in NUMBERS:
        value = getattr(case, name)
        if value != getattr(DEFAULT, name):
            plain = sorted({*_PLAIN, round(value, 1), round(value)}, key=_plainness)
            yield from ({name: float(v)} for v in plain if _plainness(float(v)) < _plainness(value))
    for name in ("mask_axes", "bias_axes"):
        value = getattr(case, name)
        yield from ({name: "".join(c)} for n in range(len(value)) for c in combinations(value, n))
    letters = case.requires_grad
    yield from ({"requires_grad": "".join(c)} for n in range(len(letters)) for c in combinations(letters, n))


def resets(case: Case) -> Iterator[Mapping[str, Any]]:
    """Changes that bring fields back to their defaults: whole groups first, then single fields."""
    off = {n: getattr(DEFAULT, n) for n in (*FEATURES, "mask")}
    changed = {n: v for n, v in off.items() if getattr(case, n) != v}
    for name, members in GROUPS.items():
        part = {n: changed[n] for n in members if n in changed}
        if len(part) > 1:
            yield part | _no_gradient(case, name)
    yield from ({n: v} | (_no_gradient(case, n) if n == "sinks" else {}) for n, v in changed.items())
    if case.requires_grad:
        yield {"requires_grad": "", "grad": "normal", "lse_grad": False, "layout_do": "contiguous"}


def _no_gradient(case: Case, name: str) -> dict[str, str]:
    """What else changes when a tensor with a gradient of its own goes."""
    letter = {"bias": "b", "sinks": "s"}.get(name, "")
    return {"requires_grad": case.requires_grad.replace(letter, "")} if letter and letter in case.requires_grad else {}


def heads(case: Case) -> list[tuple[int, int]]:
    """(Hq, Hkv) pairs worth trying instead of the case's, simplest first."""
    few = sorted({n for n in (1, 2, 3, 4, 5, 6, 8, case.Hkv, case.G, case.Hq // 2) if 1 <= n <= case.Hq})
    same = [(n, n) for n in few]
    grouped = [(n, k) for n in few for k in few if k < n and n % k == 0]
    ratio = [(k * case.G, k) for k in few if k < case.Hkv]
    return sorted({*same, *grouped, *ratio} - {(case.Hq, case.Hkv)}, key=lambda p: (p[0] != p[1], p))


def shifted(mask: Mask, by: int) -> Mask:
    """The mask with its lengths and window sides smaller by `by`, so that it moves together with a length of the case."""
    changes: dict[str, Any] = {}
    for f in fields(mask):  # type: ignore[arg-type]
        value = getattr(mask, f.name)
        if isinstance(value, Mask):
            changes[f.name] = shifted(value, by)
        elif f.name in ("left", "right", "length") and value >= 0:
            changes[f.name] = max(0, value - by)
        elif f.name == "lengths":
            changes[f.name] = tuple(max(0, n - by) for n in value)
    return replace(mask, **changes)  # type: ignore[type-var]
