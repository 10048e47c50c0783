"""Cases next to a smallest failing one that pass: "Lk = 64 passes, 65 fails", "without softcap it passes"."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .case import Case
from .masks import Causal, Full, Packed
from .shrink import changed
from .simpler import DEFAULT, FEATURES, GROUPS

MOST = 24
"""Neighbours asked about; each is one run of the target."""
_LENGTH_AND_WIDTH = ("B", "Lq", "Lk", "D", "Dv")


@dataclass(frozen=True)
class Neighbour:
    """A case that passes, and what that says in words."""

    words: str
    case: Case


def neighbours(case: Case, passes: Callable[[Case], bool]) -> tuple[Neighbour, ...]:
    """Those among the cases one step away that pass; `passes` means judged and right, not refused."""
    out, asked = [], 0
    for words, other in _steps(case):
        if other != case and asked < MOST:
            asked += 1
            if passes(other):
                out.append(Neighbour(words + _beyond(case, other, passes), other))
    return tuple(out)


def _steps(case: Case) -> Iterator[tuple[str, Case]]:
    for words, changes in (*_sizes(case), *_packed(case), *_mask(case), *_features(case)):
        other = changed(case, changes)
        if other is not None:
            yield words, other


def _sizes(case: Case) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in _LENGTH_AND_WIDTH:
        n = getattr(case, name)
        if n != 1:
            less = n - 1 if n else 1
            yield f"{name} = {less} passes, {n} fails", {name: less}
    if case.Hkv > 1:
        yield f"Hkv = 1, Hq = {case.G} passes, Hkv = {case.Hkv}, Hq = {case.Hq} fails", {"Hq": case.G, "Hkv": 1}
    if case.G > 1:
        yield f"Hq = Hkv = {case.Hkv} passes, Hq = {case.Hq} fails", {"Hq": case.Hkv}
    if case.Hq > 1 and case.G == 1:
        yield f"Hq = Hkv = {case.Hq - 1} passes, {case.Hq} fails", {"Hq": case.Hq - 1, "Hkv": case.Hkv - 1}


def _packed(case: Case) -> Iterator[tuple[str, Mapping[str, Any]]]:
    mask = case.mask
    if not isinstance(mask, Packed):
        return
    for size, name in (("Lq", "lengths_q"), ("Lk", "lengths_k")):
        lengths = getattr(mask, name)
        for s, n in enumerate(lengths):
            less = (*lengths[:s], n - 1 if n else 1, *lengths[s + 1 :])
            if n != 1:
                changes: dict[str, Any] = {name: less}
                yield f"{name} = {less} passes, {lengths} fails", {size: sum(less), "mask": replace(mask, **changes)}


def _mask(case: Case) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if case.mask == Causal("bottom_right"):
        yield "causal top-left passes", {"mask": Causal()}
    if case.mask == Causal():
        yield "causal bottom-right passes", {"mask": Causal("bottom_right")}
    if case.mask != Full():
        yield "without the mask it passes", {n: getattr(DEFAULT, n) for n in GROUPS["mask"] if n != "layout_mask"}


def _features(case: Case) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in FEATURES:
        value, plain = getattr(case, name), getattr(DEFAULT, name)
        if value != plain:
            yield _without(name, value, plain), {name: plain}


def _without(name: str, value: Any, plain: Any) -> str:
    if name in ("softcap", "dropout", "bias", "scale", "sequence", "alibi", "sinks", "mode"):
        return f"without {name} it passes"
    if name == "lse_grad":
        return "without a gradient through lse it passes"
    if name == "dtype":
        return f"{plain} passes, {value} fails"
    if name.startswith("layout_"):
        return f"with {name.removeprefix('layout_')} contiguous it passes"
    return f"{name} {plain or 'none'} passes, {value} fails"


def _beyond(case: Case, other: Case, passes: Callable[[Case], bool]) -> str:
    """What follows a passing size that is a whole number of tiles: that twice as many pass, if so; only the edge fails."""
    for name in ("Lq", "Lk", "D", "Dv"):
        n, less = getattr(case, name), getattr(other, name)
        if n == less + 1 and less % 8 == 0 and less > 0:
            twice = changed(case, {name: 2 * less})  # None where packed lengths add up to something else
            if twice is not None and passes(twice):
                return f", {2 * less} passes"
    return ""
