"""The time for what a hunt found: one bound for all of it, shared among the distinct failures, and why it did not do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

LEAST, MOST = 10.0, 60.0
"""Bounds of the default, half of the time for drawing."""
WITHOUT_SECONDS = 20.0
"""The default of a hunt that is bounded by a number of cases."""
TO_SHRINK = 2 / 3
"""Part of a failure's share that shrinking may take; the rest is for what is said of the smallest case."""
FOR_CALLS = 2 / 3
"""Part of all that is left for the search of calls that a failure needs: what else fails is then mostly its consequence."""
SHORTEST, LONGEST = 1.0, 5.0
"""Bounds in seconds of the wait for one run while a hang is shrunk; a slower right answer lengthens the second."""
SLOWER = 4
"""How many times the slowest right answer a smaller case may take before it is taken to hang."""
CONFIRMED = 3
"""How many times as long the smallest hanging case is waited for, once, in a new process."""


def default_seconds(seconds: float | None) -> float:
    """How long what is found may be studied when nothing was asked for: half as long as was drawn, within bounds."""
    return WITHOUT_SECONDS if seconds is None else min(max(seconds / 2, LEAST), MOST)


@dataclass
class Allowance:
    """Time from its making on. `until` is the end of what the present failure may take, never after the end of all."""

    seconds: float
    clock: Callable[[], float]
    started: float = field(init=False)
    until: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()
        self.until = self.started + self.seconds

    @property
    def left(self) -> float:
        """Seconds until all of it is over."""
        return max(self.started + self.seconds - self.clock(), 0.0)

    def share(self, ahead: int) -> float:
        """Begin with one of `ahead` failures: an equal part of what is left, so that what one spares the others have."""
        part = self.left / max(ahead, 1)
        self.until = self.clock() + part
        return part

    def extend(self, part: float) -> None:
        """Let the present failure have at least this part of all that is left."""
        self.until = max(self.until, self.clock() + self.left * part)

    @property
    def in_time(self) -> bool:
        """Whether the present failure may have another run."""
        return self.clock() < self.until


def patience(slowest: float) -> float:
    """Seconds to wait for a run while a hang is shrunk, where right answers took up to `slowest`."""
    return min(max(SHORTEST, SLOWER * slowest), max(LONGEST, slowest))


@contextmanager
def hurried(runner: Any, seconds: float) -> Iterator[None]:
    """Within it a runner that has a deadline waits for so long at most."""
    deadline = getattr(runner, "deadline", None)
    if deadline is None:
        yield
        return
    runner.deadline = min(deadline, seconds)
    try:
        yield
    finally:
        runner.deadline = deadline
