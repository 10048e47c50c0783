"""The book of a hunt: every verdict passes through it, and every distinct failure is entered, whoever asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..oracles.finding import is_cause
from .case import Case
from .judge import Verdict
from .region import Region
from .simpler import size

HISTORY = 512
"""Cases before a failure that are searched for what led to it."""


class Judging(Protocol):
    """What a hunt needs of a Judge."""

    region: Region | None
    runner: Any

    def check(self, case: Case, thorough: bool = False, *, explain: bool = True) -> Verdict:
        """The verdict on a case, remembered."""

    def again(self, case: Case, thorough: bool = True) -> Verdict:
        """The verdict of another run, in the same process."""

    def restart(self) -> None:
        """Begin a new process."""


@dataclass
class Entry:
    """What is known of one failure before it is shrunk. `beside` are keys that failed every time this one did."""

    first: Verdict
    simplest: Verdict
    count: int
    beside: frozenset[str]

    def add(self, verdict: Verdict) -> None:
        """Another case that fails so."""
        self.count += 1
        self.beside &= frozenset(verdict.keys)
        if size(verdict.case) < size(self.simplest.case):
            self.simplest = verdict


@dataclass
class Book:
    """Asks the judge, enters what fails, and remembers in which order cases ran. `on_new` hears of a key not seen before."""

    judge: Judging
    on_new: Callable[[str, Verdict], None] = lambda _, __: None
    found: dict[str, Entry] = field(default_factory=dict)
    _history: list[Case] = field(default_factory=list)
    _ran_at: dict[str, int] = field(default_factory=dict)
    _entered: set[str] = field(default_factory=set)

    def check(self, case: Case, thorough: bool = False) -> Verdict:
        """The verdict on a case; what fails is entered once for each case."""
        if case.key not in self._ran_at:
            self._ran_at[case.key] = len(self._history)
            self._history.append(case)
        verdict = self.judge.check(case, thorough, explain=False)
        for key in sorted(verdict.keys, key=lambda k: not is_cause(k)):
            self._enter(key, verdict)
        return verdict

    def _enter(self, key: str, verdict: Verdict) -> None:
        entered = f"{key} {verdict.case.key}"
        if key not in self.found:
            self.found[key] = Entry(verdict, verdict, 1, frozenset(verdict.keys))
            self.on_new(key, verdict)
        elif entered not in self._entered:
            self.found[key].add(verdict)
        self._entered.add(entered)

    def before(self, case: Case) -> Sequence[Case]:
        """The cases that ran before this one, at most HISTORY, oldest first."""
        at = self._ran_at.get(case.key, len(self._history))
        return self._history[max(0, at - HISTORY) : at]
