"""Failures that a new process does not show: the call sequence, or the fewest earlier cases, that must come before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from .case import LAYOUTS, SEQUENCES, SIZES, Case
from .shrink import Budget, BudgetSpentError, changed, shrink

Fails = Callable[[Sequence[Case]], bool]
"""Whether, in a new process, the last of these cases fails after the others ran."""
RUNS = Budget(probes=60, seconds=60.0)
"""A run here starts a process, which costs seconds."""
REPEATS = (1, 2, 3, 4, 8)
"""How often the case itself is run before: what counts calls fails at one of the next."""


class _Counted:
    """The predicate, asked once per list and at most as often as a budget allows."""

    def __init__(self, fails: Fails, budget: Budget, clock: Callable[[], float]) -> None:
        self.fails, self.budget, self.clock = fails, budget, clock
        self.end = clock() + budget.seconds
        self.known: dict[tuple[str, ...], bool] = {}

    def __call__(self, cases: Sequence[Case]) -> bool:
        key = tuple(c.key for c in cases)
        if key not in self.known:
            if len(self.known) >= self.budget.probes or self.clock() > self.end:
                raise BudgetSpentError("runs")
            self.known[key] = self.fails(cases)
        return self.known[key]


def as_sequence(case: Case, fails: Fails, budget: Budget = RUNS) -> Case | None:
    """The simplest case that fails in a new process by a call sequence of its own, as `case` with one does; None without."""
    for sequence in SEQUENCES[1:]:
        whole = case.but(sequence=sequence)
        if fails([whole]):
            return shrink(whole, lambda c: fails([c]), budget)
    return None


def after_another(case: Case, fails: Fails) -> tuple[Case, ...]:
    """A case that differs in one thing of the same shape, after which `case` fails in a new process: a cache keyed too narrowly.

    A call sequence does not show it, since the call that fills the cache is the right one there. Empty where none does it.
    """
    plain = case.but(sequence="")
    others = [case.but(sequence=name).varied().but(sequence="") for name in SEQUENCES[1:]]
    others += [plain.but(layout_q=rule, layout_k=rule, layout_v=rule, layout_do=rule) for rule in LAYOUTS]
    for other in dict.fromkeys(others):
        if other != case and fails([other, case]):
            return (other,)
    return ()


def together(case: Case, before: Sequence[Case], fails: Fails, budget: Budget = RUNS) -> tuple[Case, tuple[Case, ...]]:
    """The case made simpler, and the cases before it with the same sizes wherever they had those of the case."""

    def follow(smaller: Case) -> list[Case]:
        sizes = {n: getattr(smaller, n) for n in SIZES}
        moved = (changed(c, {n: t for n, t in sizes.items() if getattr(c, n) == getattr(case, n)}) for c in before)
        return [c for c in moved if c is not None]

    best = shrink(case, lambda c: fails([*follow(c), c]), budget)
    return best, tuple(follow(best))


def preceding(
    case: Case, before: Sequence[Case], fails: Fails, budget: Budget = RUNS, clock: Callable[[], float] = time.monotonic
) -> tuple[Case, ...]:
    """The fewest, simplest cases of `before` after which `case` fails in a new process; empty when none is found."""
    asked = _Counted(fails, budget, clock)
    best: list[Case] = []
    try:
        best = _suffix(case, before, asked)
        for smaller in _smaller(case, best, asked):
            best = smaller
    except BudgetSpentError:
        pass
    return tuple(best)


def _suffix(case: Case, before: Sequence[Case], fails: Fails) -> list[Case]:
    """The case itself a few times before, else the shortest of the last 1, 2, 4, ... cases that leads to the failure."""
    tails = [*([case] * n for n in REPEATS), *(list(before[-n:]) for n in _doubling(len(before)))]
    return next((tail for tail in tails if fails([*tail, case])), [])


def _doubling(most: int) -> list[int]:
    sizes = []
    n = 1
    while n < most:
        sizes.append(n)
        n *= 2
    return [*sizes, most] if most else []


def _smaller(case: Case, best: list[Case], fails: Fails) -> Iterator[list[Case]]:
    """Shorter and simpler lists that still lead to the failure, each better than the one before."""
    step = len(best) // 2
    while step:
        at = 0
        while at < len(best):
            rest = best[:at] + best[at + step :]
            if rest and fails([*rest, case]):
                best = rest
                yield best
            else:
                at += step
        step //= 2
    for at in range(len(best)):
        first, last = best[:at], best[at + 1 :]
        one = shrink(best[at], lambda c, a=first, b=last: fails([*a, c, *b, case]), Budget(probes=25, seconds=30.0))  # type: ignore[misc]
        best = [*first, one, *last]
        yield best
