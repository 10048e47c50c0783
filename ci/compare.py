"""Two revisions of a target on the same cases: which failures are new, which were there, and what is no longer answered."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..fuzz.case import Case
from ..fuzz.found import Failure
from ..fuzz.judge import Verdict, one_in
from ..fuzz.learn import kinds
from ..fuzz.ledger import Entry, without
from ..fuzz.region import Region
from ..fuzz.session import Session
from ..fuzz.simpler import size
from ..fuzz.words import sentence
from ..oracles.finding import Finding

RACY = ("repeat", "sequence", "crash", "hang", "memory")
"""Oracles whose findings may come and go: the base revision is asked TRIES times before it is said to be free of one."""
TRIES = 3
GAINED_ONE_IN, MOST_GAINED = 8, 64
"""The base revision is asked about one right answer in so many, to see what it refuses, and about no more than that."""
NAME_WIDTH = 60


@dataclass
class Existing:
    """A failure that the base revision has too: its smallest case so far, and how many there were."""

    case: Case
    finding: Finding
    count: int = 0


@dataclass
class Compared:
    """A sieve for the judge of the new revision: what the old one does as well is taken out, what it no longer does is put in.

    `unexcused` are ledger entries that the change removes: what they excused counts as the change's own.
    """

    old: Session
    label: str
    allow_lost: bool = False
    unexcused: tuple[Entry, ...] = ()
    existing: dict[str, Existing] = field(default_factory=dict)
    gained: list[Case] = field(default_factory=list)
    asked: int = 0
    unknown: int = 0  # cases on which the old revision's worker was lost: their failures count as new
    _counted: set[tuple[str, str]] = field(default_factory=set)
    _ignored: frozenset[str] | None = None

    def skips(self, case: Case) -> bool:  # noqa: ARG002 (a sieve)
        """Nothing is left out."""
        return False

    def sift(self, verdict: Verdict) -> Verdict:
        """The verdict with new failures and lost coverage only."""
        refused = verdict.status in ("refused", "inexpressible") or any(f.oracle == "refusal" for f in verdict.failures)
        if refused:
            return self._refused(verdict)
        if verdict.failures:
            return self._failed(verdict, self._keys(verdict))
        if verdict.status == "pass":
            self._right(verdict.case)
        return verdict

    def _failed(self, verdict: Verdict, old: frozenset[str]) -> Verdict:
        kept = []
        for finding in verdict.findings:
            known = finding.severity == "fail" and finding.key in old and not self._removed(verdict.case, finding.key)
            if known:
                self.shared(verdict.case, finding)
            else:
                kept.append(finding)
        return without(verdict, tuple(kept))

    def _removed(self, case: Case, key: str) -> bool:
        return any(e.excuses(case, key) for e in self.unexcused)

    def shared(self, case: Case, finding: Finding) -> None:
        """Count a finding on a case that the old revision has too."""
        seen = self.existing.setdefault(finding.key, Existing(case, finding))
        if size(case) < size(seen.case):
            seen.case, seen.finding = case, finding
        if (case.key, finding.key) not in self._counted:
            self._counted.add((case.key, finding.key))
            seen.count += 1

    def _keys(self, verdict: Verdict) -> frozenset[str]:
        """Keys of what fails on the old revision on the same case."""
        old = self.old.judge.check(verdict.case, thorough=True, explain=False)
        self.unknown += old.status == "infrastructure"
        keys = set(old.keys) | self._probed(verdict)
        racy = {f.key for f in verdict.failures if f.oracle in RACY}
        for _ in range(TRIES - 1):
            if racy <= keys:
                break
            keys |= set(self.old.judge.again(verdict.case).keys)
        return frozenset(keys)

    def _probed(self, verdict: Verdict) -> frozenset[str]:
        """Keywords that the old revision ignores, asked when the new one does."""
        if not any(f.oracle == "ignored-keyword" for f in verdict.failures):
            return frozenset()
        if self._ignored is None:
            self._ignored = frozenset(f.key for f in self.old.runner.probe()[1])
        return self._ignored

    def _refused(self, verdict: Verdict) -> Verdict:
        """What the old revision answers rightly and the new one refuses is lost, whatever region is declared."""
        old = self.old.judge.check(verdict.case, explain=False)
        if old.status != "pass":
            return self._failed(verdict, frozenset(old.keys)) if verdict.failures else verdict
        message = verdict.execution.message if verdict.execution else ""
        said = f"no longer answered: {message}; {self.label} answers it rightly"
        lost = Finding("coverage", kind(message), said, severity="warning" if self.allow_lost else "fail")
        kept = tuple(f for f in verdict.findings if f.oracle != "refusal")
        failed = lost.severity == "fail" or any(f.severity == "fail" for f in kept)
        return replace(verdict, findings=(*kept, lost), status="fail" if failed else "refused")

    def _right(self, case: Case) -> None:
        """Ask now and then whether the old revision refuses what the new one answers."""
        outside = self.old.region.refuses(case) != ""
        if self.asked < MOST_GAINED and (outside or one_in(GAINED_ONE_IN, case, "gained")):
            self.asked += 1
            old = self.old.judge.check(case, explain=False)
            refused = old.status in ("refused", "inexpressible") or any(f.oracle == "refusal" for f in old.failures)
            self.gained += [case] * refused

    def after(self, failure: Failure) -> bool:
        """Whether a failure that needs earlier calls is there on the old revision too, after the same calls."""
        if not failure.preceding:
            return False
        self.old.judge.restart()
        for case in failure.preceding:
            self.old.runner.run(case)
        return failure.key in self.old.judge.again(failure.case).keys

    def document(self) -> dict[str, Any]:
        """What was there before, and what is gained, as JSON."""
        return {
            "existing": [
                {"finding": key, "case": sentence(e.case), "message": e.finding.message, "cases": e.count}
                for key, e in self.existing.items()
            ],
            "gained": {"asked": self.asked, "cases": len(self.gained), "smallest": smallest(self.gained)},
            "not_compared": self.unknown,
        }

    def lines(self) -> list[str]:
        """The same for a reader."""
        out = [
            f"already at {self.label}: {key}, {e.count} cases, such as {sentence(e.case)}"
            for key, e in self.existing.items()
        ]
        if self.gained:
            out.append(f"gained: {len(self.gained)} of {self.asked} cases asked, such as {smallest(self.gained)}")
        if self.unknown:
            out.append(f"{self.unknown} cases could not be run at {self.label}; their failures count as new")
        return out


def smallest(cases: Iterable[Case]) -> str:
    """The simplest of some cases in words; empty for none."""
    return next((sentence(c) for c in sorted(cases, key=size)), "")


def kind(message: str) -> str:
    """A refusal without its numbers, so that one reason is one failure."""
    return re.sub(r"\d+", "#", message)[:NAME_WIDTH] or "call"


def withdrawn(old: dict[str, Any], new: dict[str, Any], before: Region | None, now: Region | None) -> list[str]:
    """What the new revision no longer promises: regions by declaration, lse and gradients by what the runner understood."""
    out = []
    if before is not None and now is None:
        out.append("a region is no longer declared")
    elif before is not None and now is not None:
        out += [f"the region no longer declares {what}" for what in narrower(now, before)]
    if old["returns_lse"] and not new["returns_lse"]:
        out.append("lse is no longer returned")
    return out


def narrower(now: Region, before: Region) -> list[str]:
    """What a region leaves out that another one holds, in words."""
    out = [k.name for k in kinds() if k.counted and k.served(before) and not k.served(now)]
    lost = sorted(set(before.head_dims) - set(now.head_dims)) if now.head_dims else []
    out += [f"head dim {n}" for n in lost]
    out += [f"head dims other than {', '.join(map(str, now.head_dims))}"] * bool(now.head_dims and not before.head_dims)
    out += [f"head dims above {now.max_head_dim}"] * (now.max_head_dim < before.max_head_dim)
    out += [f"lengths above {now.max_len}"] * (now.max_len < before.max_len)
    return out + [f"lengths below {now.min_len}"] * (now.min_len > max(before.min_len, 1))


def widest(first: Region, second: Region) -> Region:
    """A region that holds both: what either serves is drawn."""
    values: dict[str, Any] = {}
    for f in fields(Region):
        one, other = getattr(first, f.name), getattr(second, f.name)
        if f.name == "head_dims":
            values[f.name] = tuple(sorted({*one, *other})) if one and other else ()
        elif isinstance(one, tuple):
            values[f.name] = (*one, *(x for x in other if x not in one))
        else:
            values[f.name] = min(one, other) if f.name.startswith("min") else max(one, other)
    return Region(**values)
