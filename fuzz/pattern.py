"""Where an answer is wrong and by what factor, in words: "forward right; dk wrong in the last key tile of kv heads >= 1".

Read from masks of wrong elements; a claim is made only when every wrong element fits it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from .case import Case

_QUERY = ("batch", "query head", "row", "column")
_KEY = ("batch", "kv head", "key", "column")
AXES: dict[str, tuple[str, ...]] = {
    "o": _QUERY, "lse": _QUERY[:3], "dq": _QUERY, "dk": _KEY, "dv": _KEY, "dbias": ("batch", "query head", "row", "key"),
    "dsinks": ("query head",),
}  # fmt: skip
"""Names of the axes of every output."""
FORWARD = ("o", "lse")
TILES = (128, 64, 32, 16, 8)
"""Tile heights of kernels; a wrong region that starts at a multiple of one hints at it."""
FITS = 0.01
"""A factor is constant when every element is this close to it, relatively: above bfloat16 rounding, 2**-8."""
NAMED = 0.004
"""A factor is called by name when it is this close; the names below differ by more."""

NAMED_EXACTLY = 5e-5
"""The same where the outputs are float32 or wider: 0.5001 is not one half there."""
ENOUGH = 3
"""Elements that a factor must hold for before it is called by name; one or two numbers fit many names."""
PLAIN = ("ln 2", "1/ln 2", "it is counted twice", "half of it is missing")
"""Names that say no more than the number: another name that fits is preferred, two others that fit are a guess."""


def pattern(case: Case, wrong: Mapping[str, Tensor], judged: Iterable[str], only: str = "") -> str:
    """Which outputs are right, and where the others are wrong; empty when nothing is wrong. `only` leaves one output."""
    bad = [t for t in AXES if t in wrong and bool(wrong[t].any())]
    good = [t for t in AXES if t in set(judged) and t not in bad]
    if not bad:
        return ""
    parts = []
    if not any(t in FORWARD for t in bad) and any(t in FORWARD for t in good):
        parts.append("forward right")
    places: dict[str, list[str]] = {}
    for t in [only] if only in bad else bad:
        places.setdefault(where(case, t, wrong[t]), []).append(t)
    parts += [f"{_and(tensors)} wrong {place}".rstrip() for place, tensors in places.items()]
    if only in bad:
        return "; ".join(parts)
    rest = [t for t in good if not (t in FORWARD and parts[0] == "forward right")]
    return "; ".join(parts + ([f"{_and(rest)} right"] if rest else []))


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def where(case: Case, tensor: str, wrong: Tensor) -> str:
    """The place of the wrong elements of one output, as "in <keys> of <heads> of <batches>" or "everywhere"."""
    if bool(wrong.all()):
        return "everywhere" if wrong.numel() > 1 else ""
    only_dead = _dead_rows_only(case, tensor, wrong)
    if only_dead:
        return only_dead
    spans, box = [], 1
    for axis, noun in reversed(list(enumerate(AXES[tensor][: wrong.dim()]))):
        others = tuple(d for d in range(wrong.dim()) if d != axis)
        found = wrong.any(dim=others).nonzero().flatten().tolist() if others else wrong.nonzero().flatten().tolist()
        box *= len(found)
        spans.append(span(found, wrong.shape[axis], noun))
    count = int(wrong.sum())
    scattered = f"at {count} of {box} elements " if count < 0.9 * box else ""
    place = " of ".join(s for s in spans if s)
    if not place and not scattered:
        return f"nearly everywhere ({count} of {wrong.numel()})"
    return scattered + (f"in {place}" if place else "scattered over all of it")


def span(found: Sequence[int], n: int, noun: str) -> str:
    """A set of indices of an axis of length n in words; empty when it is the whole axis."""
    first, last, count = found[0], found[-1], len(found)
    if count == n:
        return ""
    if count == 1:
        return f"the last {noun} ({first})" if first == n - 1 and n > 2 else f"{noun} {first}"
    if last - first + 1 == count:
        return _run(first, last, n, noun)
    step = found[1] - found[0]
    if all(b - a == step for a, b in itertools.pairwise(found)) and count > 2:
        return f"every {step}{_ordinal(step)} {noun} from {first} on"
    shown = ", ".join(map(str, found[:4])) + (", ..." if count > 4 else "")
    return f"{count} of {n} {_plural(noun)} ({shown})"


def _run(first: int, last: int, n: int, noun: str) -> str:
    tile = next((t for t in TILES if first % t == 0 and first > 0), 0)
    if noun in ("row", "key") and last == n - 1 and tile and n - first <= tile:
        return f"the last {noun} tile ({_plural(noun)} {first}..{last}, tile {tile} or a divisor)"
    if last == n - 1 and first > 0:
        return f"{_plural(noun)} >= {first}"
    hint = next(
        (
            f", tile {t} or a divisor"
            for t in TILES
            if noun in ("row", "key") and (last + 1) % t == 0 and first % t == 0
        ),
        "",
    )
    return f"{_plural(noun)} {first}..{last}{hint}"


def _plural(noun: str) -> str:
    return noun + ("es" if noun.endswith("h") else "s")


def _ordinal(n: int) -> str:
    return {2: "nd", 3: "rd"}.get(n, "th")


def _dead_rows_only(case: Case, tensor: str, wrong: Tensor) -> str:
    """Says so when exactly rows (or keys) that the mask forbids altogether are wrong, and others exist."""
    if tensor in ("dbias", "dsinks") or (case.mask_form == "additive" and case.mask_fill != "-inf"):
        return ""
    keep = case.mask.dense(case.B, case.Hq, case.Lq, case.Lk).expand(case.B, case.Hq, case.Lq, case.Lk)
    if tensor in ("dk", "dv"):
        dead = (~keep.any(2)).reshape(case.B, case.Hkv, case.G, case.Lk).all(2)
        name = "keys that no row may see"
    else:
        dead, name = ~keep.any(3), "rows without an allowed key"
    rows = wrong if wrong.dim() == 3 else wrong.any(-1)
    if not bool(dead.any()) or bool(dead.all()) or bool((rows & ~dead).any()):
        return ""
    return f"only in {name}"


def factor(case: Case, tensor: str, got: Tensor, want: Tensor, wrong: Tensor) -> str:
    """What relates got to want where it is wrong: a constant factor, a constant difference, zero, NaN; empty if nothing."""
    g, w = got.double()[wrong], want.double()[wrong]
    if g.numel() == 0:
        return ""
    for name, holds in (("NaN", g.isnan()), ("infinite", g.isinf()), ("zero", g == 0)):
        if bool(holds.all()):
            place = " wherever it is wrong" if not bool(wrong.all()) else " everywhere" if wrong.numel() > 1 else ""
            return f"got is {name}{place}"
    clear = g.isfinite() & w.isfinite() & (w.abs() >= 0.05 * _largest(w))
    if not bool(clear.any()):
        return ""
    return _ratio(case, tensor, g[clear], w[clear]) or _difference(case, tensor, g[clear], w[clear])


def _largest(w: Tensor) -> float:
    finite = w[w.isfinite()]
    return max(float(finite.abs().max()) if finite.numel() else 0.0, 1e-300)


def _ratio(case: Case, tensor: str, g: Tensor, w: Tensor) -> str:
    ratio = g / w
    middle = float(ratio.median())
    if abs(middle - 1) < FITS:  # nothing that a factor would explain
        return ""
    if not bool(((ratio - middle).abs() <= FITS * abs(middle)).all()):
        return ""
    named = NAMED if case.dtype in ("float16", "bfloat16") else NAMED_EXACTLY
    meant = [m for value, m in _factors(case, tensor) if abs(middle / value - 1) < named and abs(value - 1) > 2 * NAMED]
    own = [m for m in meant if m not in PLAIN] or meant[:1]
    if len(own) == 1 and len(ratio) >= ENOUGH:
        return f"got is {middle:.4g} times want: {own[0]}"
    return f"got is {middle:.4g} times want" if len(ratio) > 2 and abs(middle) > 1e-6 else ""


def _factors(case: Case, tensor: str) -> list[tuple[float, str]]:
    """Factors that a known slip produces, most telling first."""
    scale = abs(case.resolved_scale)
    out = [(-1.0, "the sign is flipped")]
    if tensor == "lse":
        out += [
            (1 / math.log(2), "it looks like base 2; natural log is asked for"),
            (math.log(2), "it looks like ln 2 was applied twice"),
        ]
    if scale > 0:
        out += [(scale, "the softmax scale is applied once too often"), (1 / scale, "the softmax scale is missing")]
    out += [(1 / case.D, "1/D"), (float(case.D), "D")]
    out += [
        (1 / case.G, "1/G, as if the heads of a group were averaged or only one counted"),
        (float(case.G), "G, the heads of a group"),
    ]
    out += [
        (math.log(2), "ln 2"),
        (1 / math.log(2), "1/ln 2"),
        (2.0, "it is counted twice"),
        (0.5, "half of it is missing"),
    ]
    if case.dropout:
        out += [
            (1 - case.dropout, "the 1/(1-p) of dropout is missing"),
            (1 / (1 - case.dropout), "the 1/(1-p) of dropout is doubled"),
        ]
    return [*out, (1 / max(case.Lk, 1), "1/Lk"), (float(max(case.Lk, 1)), "Lk")]


def _difference(case: Case, tensor: str, g: Tensor, w: Tensor) -> str:
    difference = g - w
    middle = float(difference.median())
    if len(difference) < 3 or not bool(((difference - middle).abs() <= FITS * abs(middle)).all()):
        return ""
    names = ((math.log(2), "ln 2"), (math.log(max(case.Lk, 1)), "log Lk"), (-math.log(max(case.Lk, 1)), "-log Lk"))
    named = next((f" ({n})" for v, n in names if tensor == "lse" and v and abs(middle / v - 1) < NAMED), "")
    return f"got is want {'+' if middle > 0 else '-'} {abs(middle):.4g}{named}"


def explain(
    case: Case, wrong: Mapping[str, Tensor], got: Mapping[str, Tensor], want: Mapping[str, Tensor], only: str = ""
) -> str:
    """The pattern, then the factor of every wrong output that has one. `only` leaves one output."""
    told = [pattern(case, wrong, got, only)]
    same: dict[str, list[str]] = {}
    for t in [only] if only in wrong else AXES:
        if t in wrong and t in got and t in want and got[t].shape == want[t].shape == wrong[t].shape:
            text = factor(case, t, got[t], want[t], wrong[t].to(torch.bool))
            if text:
                same.setdefault(text, []).append(t)
    told += [f"{_and(tensors)}: {text}" for text, tensors in same.items()]
    return "; ".join(t for t in told if t)
