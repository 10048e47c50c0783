"""Shrinking: the smallest case, as a person would have written it, that still fails in the same way.

Deterministic passes over a Case, run to a fixpoint. A candidate is taken only if it is simpler (`simpler.size`) and still
fails, so the result is never worse than the start, at any interruption. Cheap passes settle before costly ones begin:
features go first because every feature that is gone makes all later probes smaller and the sizes independent of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from .case import SIZES, Case
from .masks import BlockSparse, Mask, Packed, Random
from .packing import simpler as simpler_packed
from .simpler import (
    DEFAULT,
    FEATURES,
    LAYOUT_FIELDS,
    ORDERED,
    edges,
    heads,
    resets,
    shifted,
    simpler_masks,
    simpler_values,
    size,
)

SMALL_SEEDS = (0, 1, 2)
"""A smaller case may need other values to show the bug; more than these cost more probes than they gain."""
MANY_SEEDS = range(64)
"""Where one element must be larger than the sixteen before it, one seed in seventeen will do."""
LARGEST_TRADE = 512
"""A size may grow to this when another goes to 1 for it; beyond, a probe costs more than the reader gains."""


ONE_OF = ("Lk", "Lq", "D", "Dv", "B")
"""Sizes of which one alone often decides."""

TINY: tuple[Mapping[str, int], ...] = (
    {"Dv": 2}, {"D": 2}, {"Lk": 2}, {"Lq": 2}, {"B": 2}, {"Hq": 2}, {"Hq": 2, "Hkv": 2}, {"Lq": 2, "Lk": 2}, {"D": 2, "Dv": 2},
)  # fmt: skip
"""Sizes next to all ones."""
OTHERWISE = frozenset({*LAYOUT_FIELDS, "data", "grad", "sequence", "bias", "alibi", "sinks"})
"""Fields whose other values a person would try in place of a strange one."""


@dataclass(frozen=True)
class Budget:
    """How long a shrink may take: calls of the predicate, and seconds."""

    probes: int = 600
    seconds: float = 10.0


class BudgetSpentError(Exception):
    """The budget is used up; the message says of what: "time", "runs", or a reason of the predicate's own."""


class Shrinker:
    """One shrink: `best` is the simplest failing case so far and may be read at any time, also after an interruption."""

    def __init__(
        self,
        case: Case,
        still_fails: Callable[[Case], bool],
        budget: Budget = Budget(),
        clock: Callable[[], float] = time.monotonic,
        first: tuple[Pass, ...] = (),
    ) -> None:
        self.best = case
        self.probes = 0
        self.complete = False
        self.stopped = ""  # why no fixpoint was reached
        self.seeds: tuple[int, ...] = ()
        self._still_fails = still_fails
        self._budget = budget
        self._clock = clock
        self._end = clock() + budget.seconds
        self._known: dict[str, bool] = {case.key: True}
        self._first = first

    def run(self) -> Case:
        """The simplest failing case that the budget allows; `complete` says whether a fixpoint was reached."""
        try:
            self._settle()
            self.complete = True
        except BudgetSpentError as e:
            self.stopped = str(e)
        return self.best

    def _settle(self) -> None:
        self._fixpoint(self._first)
        while True:
            for self.seeds in ((), SMALL_SEEDS):
                self._fixpoint(CHEAP)
            self.seeds = ()
            if not any(self._improves(step) for step in THOROUGH):
                return

    def _fixpoint(self, passes: tuple[Pass, ...]) -> None:
        while sum(self._improves(step) for step in passes):
            pass

    def _improves(self, step: Pass) -> bool:
        before = self.best
        step(self)
        return self.best != before

    def fails(self, case: Case) -> bool:
        """Whether the case fails, asked once per case; raises BudgetSpentError when the budget is used up."""
        key = case.key
        if key not in self._known:
            if self.probes >= self._budget.probes:
                raise BudgetSpentError("runs")
            if self._clock() > self._end:
                raise BudgetSpentError("time")
            self.probes += 1
            self._known[key] = self._still_fails(case)
        return self._known[key]

    def accepts(self, case: Case | None, reseed: bool = True) -> bool:
        """Whether the case is simpler than the best and fails (perhaps with another small seed): it is then the best."""
        if case is None:
            return False
        seeds = self.seeds if reseed else ()
        for candidate in (case, *(case.but(seed=s) for s in seeds if s != case.seed)):
            if size(candidate) < size(self.best) and self.fails(candidate):
                self.best = candidate
                return True
        return False

    def takes(self, **changes: Any) -> bool:
        """Whether the best with these fields changed is accepted."""
        return self.accepts(changed(self.best, changes))

    def descend(self, make: Callable[[int], Case | None], current: int) -> int:
        """The smallest t in [1, current] whose case fails, by bisection as if failing were monotone."""
        low = 0
        while current - low > 1:
            middle = 1 if low == 0 else (low + current) // 2
            if self.accepts(make(middle)):
                current = middle
            else:
                low = middle
        return current


Pass = Callable[[Shrinker], None]


def shrink(case: Case, still_fails: Callable[[Case], bool], budget: Budget = Budget()) -> Case:
    """The simplest case found from `case` for which `still_fails` holds; `case` itself is taken to fail."""
    return Shrinker(case, still_fails, budget).run()


def changed(case: Case, changes: Mapping[str, Any]) -> Case | None:
    """The case with these fields changed; None where the fields do not go together."""
    try:
        return case.but(**changes)
    except ValueError:
        return None


def _repeat(s: Shrinker, candidates: Callable[[Case], Iterable[Mapping[str, Any]]]) -> None:
    """Take the first change that is accepted, and ask again, until none is."""
    while any(s.takes(**changes) for changes in candidates(s.best)):
        pass


def leap(s: Shrinker) -> None:
    """The simplest case at once; all features off; all sizes 1."""
    off = {n: getattr(DEFAULT, n) for n in (*FEATURES, "mask")}
    ones = dict.fromkeys(SIZES, 1)
    grads = s.best.requires_grad.replace("b", "").replace("s", "")
    for changes in ({**off, **ones, "requires_grad": grads}, {**off, "requires_grad": grads}, ones):
        s.takes(**changes)


def keep_one_size(s: Shrinker) -> None:
    """Every size 1 but one, or but two: where failing runs are dear and passing ones cheap, most sizes go at once."""
    for kept in (*((n,) for n in ONE_OF), *combinations(ONE_OF, 2)):
        lower = {n: 1 for n in SIZES if n not in kept}
        if any(getattr(s.best, n) > 1 for n in lower) and s.takes(**lower):
            return


def drop_features(s: Shrinker) -> None:
    """Every field back to its default, groups first."""
    _repeat(s, resets)


def lower_sizes(s: Shrinker) -> None:
    """Each size to 1, else down by bisection, else to a smaller size where kernels change behaviour."""
    for name in ("B", "Lq", "Lk", "D", "Dv"):
        _lower(s, [name])


def lower_lengths(s: Shrinker) -> None:
    """The sizes that no kernel is compiled for."""
    for name in ("B", "Lq", "Lk"):
        _lower(s, [name])


def plain_arguments(s: Shrinker) -> None:
    """Default values of what kernels take as arguments, without another structure."""
    for name in ("data", "grad", "scale"):
        s.takes(**{name: getattr(DEFAULT, name)})


def _lower(s: Shrinker, names: list[str]) -> None:
    """Bring the named sizes to one common smaller value."""

    def make(t: int) -> Case | None:
        return changed(s.best, dict.fromkeys(names, t))

    top = s.descend(make, max(getattr(s.best, n) for n in names))
    any(s.accepts(make(t), reseed=t == top - 1) for t in edges(top))


def reseed_edges(s: Shrinker) -> None:
    """One more than a power of two, the largest below a size, with many seeds: a tail of one element shows a bug rarely.

    Only where the best case has a seed of its own: else the bug does not depend on values so much.
    """
    for name in () if s.best.seed == 0 else ("Lq", "Lk", "D", "Dv"):
        for t in sorted((2**p + 1 for p in range(1, 10) if 2**p + 1 < getattr(s.best, name)), reverse=True):
            if not any(s.accepts(changed(s.best, {name: t, "seed": n}), reseed=False) for n in MANY_SEEDS):
                break


def lower_heads(s: Shrinker) -> None:
    """Query and key heads together, so that their ratio stays whole."""
    any(s.takes(Hq=q, Hkv=k) for q, k in heads(s.best))


def lower_together(s: Shrinker) -> None:
    """Sizes that a bug ties to one another: equal, or at a constant distance; lengths with the mask's own."""
    for names in (["Lq", "Lk"], ["D", "Dv"], ["Lq", "Lk", "D", "Dv"], ["B", "Hq", "Hkv"]):
        if all(getattr(s.best, n) > 1 for n in names):
            _lower(s, names)
    _shift(s, ["D", "Dv"])
    for names in (["Lk"], ["Lq"], ["Lq", "Lk"]):
        _shift(s, names, with_mask=True)


def _shift(s: Shrinker, names: list[str], with_mask: bool = False) -> None:
    """Lower the named sizes, and the mask's parameters if asked, by the same amount."""
    start = s.best
    least = min(getattr(start, n) for n in names)

    def make(t: int) -> Case | None:
        lower = {n: getattr(start, n) - (least - t) for n in names}
        return changed(s.best, lower | ({"mask": shifted(start.mask, least - t)} if with_mask else {}))

    if least > 1 and (len(names) > 1 or shifted(start.mask, 1) != start.mask):
        s.descend(make, least)


def simplify_mask(s: Shrinker) -> None:
    """A simpler mask: none, a plain one, a part of it, smaller parameters, a small seed."""
    _repeat(s, lambda case: ({"mask": m} for m in _mask_candidates(case.mask, bool(s.seeds))))


def _mask_candidates(mask: Mask, reseed: bool) -> Iterator[Mask]:
    for candidate in simpler_masks(mask):
        yield candidate
        if reseed and isinstance(candidate, Random | BlockSparse):
            yield from (changed_seed(candidate, n) for n in SMALL_SEEDS if n != candidate.seed)


def changed_seed(mask: Random | BlockSparse, seed: int) -> Mask:
    """The mask with another seed."""
    values = {k: v for k, v in vars(mask).items() if k != "seed"}
    return type(mask)(**values, seed=seed)


def lower_packed(s: Shrinker) -> None:
    """Fewer and shorter packed sequences, or an ordinary batch in their place."""
    if isinstance(s.best.mask, Packed):
        _repeat(s, simpler_packed)


def simplify_values(s: Shrinker) -> None:
    """A plainer value of one field."""
    _repeat(s, simpler_values)


def lower_seed(s: Shrinker) -> None:
    """A small seed, else one with fewer bits."""
    seed = s.best.seed
    any(s.takes(seed=n) for n in (*range(8), *(seed >> k for k in range(24, 0, -8)), seed // 2) if n < seed)


def trade_sizes(s: Shrinker) -> None:
    """One size becomes 1 and another takes it over: (6, 17) may fail as (1, 102), which is one number to read.

    Or two of a kind change places, which opens a way that the first order closed.
    """
    for a, b in combinations(("B", "Lq", "Lk", "D", "Dv"), 2):
        s.takes(**{a: getattr(s.best, b), b: getattr(s.best, a)})
    if s.best.B == 1:
        s.takes(B=s.best.Hq, Hq=1, Hkv=1)
    for a, b in combinations(("B", "Lq", "Lk", "D", "Dv"), 2):
        product = getattr(s.best, a) * getattr(s.best, b)
        if min(getattr(s.best, a), getattr(s.best, b)) > 1 and product <= LARGEST_TRADE:
            s.takes(**{a: 1, b: product}) or s.takes(**{a: product, b: 1})
        for one, other in ((a, b), (b, a)):
            n = getattr(s.best, other)
            if getattr(s.best, one) > n > 1:  # half of a tile of two sizes may be a tile of one
                s.takes(**{one: 1, other: 2 * n - 1}) or s.takes(**{one: 1, other: 4 * n - 3})
    for name in ("Lq", "Lk", "D", "Dv"):
        if s.best.Hq * getattr(s.best, name) <= LARGEST_TRADE:
            s.takes(**{"Hq": 1, "Hkv": 1, name: s.best.Hq * getattr(s.best, name)})


def size_for_feature(s: Shrinker) -> None:
    """A feature goes and one size becomes 2: another head or row may do what the feature did."""
    for off in list(resets(s.best)):
        for shape in TINY:
            if all(getattr(s.best, n) < t for n, t in shape.items()) and s.takes(**off, **shape):
                return


def other_kinds(s: Shrinker) -> None:
    """Another value of a named field at the smallest sizes: fewer numbers beat a plainer name."""
    ones = dict.fromkeys(SIZES, 1)
    for changes in _other_kinds(s.best):
        if any(s.takes(**changes, **{**ones, **shape}) for shape in ({}, *TINY)):
            return


def _other_kinds(case: Case) -> Iterator[Mapping[str, Any]]:
    for name, order in ORDERED.items():
        if name in OTHERWISE and getattr(case, name) != order[0]:
            yield from ({name: v} for v in order[1:] if v != getattr(case, name))


def lower_pairs(s: Shrinker) -> None:
    """Two small steps at once, where neither alone still fails."""
    for first, second in combinations(_steps(s.best), 2):
        if s.takes(**first, **{n: v for n, v in second.items() if n not in first}):
            return


def _steps(case: Case) -> list[Mapping[str, Any]]:
    steps: list[Mapping[str, Any]] = list(resets(case))
    for name in ("B", "Lq", "Lk", "D", "Dv"):
        n = getattr(case, name)
        steps += [{name: t} for t in sorted({1, n // 2, n - 1}) if 1 <= t < n]
    steps += [{"Hq": q, "Hkv": k} for q, k in heads(case)[:6] if q < case.Hq]
    steps += [{"mask": m} for m, _ in zip(simpler_masks(case.mask), range(8), strict=False)]
    steps += list(simpler_values(case))[:8]
    return steps


CHEAP: tuple[Pass, ...] = (
    leap, drop_features, lower_packed, lower_sizes, lower_heads, lower_together, simplify_mask, simplify_values, lower_seed,
)  # fmt: skip
FEW_FAILING: tuple[Pass, ...] = (leap, keep_one_size)
"""Passes for a failure whose every failing run is slow: each of their first steps that is taken makes the case much smaller."""
WITHIN_BUCKET: tuple[Pass, ...] = (plain_arguments, lower_lengths, lower_seed)
"""Passes that compile nothing new: run first where a structure costs seconds to compile, so that the others begin small."""
THOROUGH: tuple[Pass, ...] = (trade_sizes, size_for_feature, other_kinds, reseed_edges, lower_pairs)
