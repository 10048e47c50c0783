"""Every distinct failure of a hunt: its smallest case, its pattern, what passes beside it, how often it comes again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..oracles.exact import Problem, Reference
from .book import Book
from .case import Case
from .found import Campaign, Failure, Policy
from .judge import Verdict
from .nearest import neighbours
from .pattern import explain
from .shrink import Budget, Shrinker
from .stateful import preceding
from .tensors import build

PLAIN_ORACLES = frozenset(
    {"value", "nonfinite", "dead-row", "crash", "hang", "exception", "shape", "dtype", "refusal", "statistical"}
)
"""Oracles that one plain run decides; the others need the repeated call or the exact run in every probe."""
FORWARD_FIRST = ("o", "lse", "dq", "dk", "dv", "dbias")


@dataclass
class Study:
    """Adds the failures of a book to a campaign; `rest` adds those that it did not come to, as far as they are shrunk."""

    book: Book
    campaign: Campaign
    policy: Policy
    emit: Callable[..., None]
    clock: Callable[[], float]

    def run(self) -> None:
        """Shrink and study one failure after the other, those of the forward pass first, as far as the policy allows."""
        end = self.clock() + self.policy.shrink_seconds
        done: list[str] = []
        while len(done) < self.policy.distinct:
            left = [k for k in self.book.found if k not in done]
            if not left:
                return
            ahead = min(len(left), self.policy.distinct - len(done))
            done.append(min(left, key=_forward_first))
            self._one(done[-1], max((end - self.clock()) * 2 / (1 + ahead), 1.0))

    def _one(self, key: str, seconds: float) -> None:
        """Shrink one failure, add it, study it; interrupted before it is added, the book has its simplest case."""
        began = self.clock()
        self.emit("shrinking", text=key)
        self._hint(key)
        thorough = key.partition(":")[0] not in PLAIN_ORACLES
        s = Shrinker(
            self.book.found[key].simplest.case,
            self._still_fails(key, thorough),
            Budget(self._probes(key), seconds),
            self.clock,
        )
        s.run()
        failure = self._failure(key, s, thorough)
        self.campaign.failures.append(failure)
        self.emit("shrunk", failure=failure)
        self.campaign.failures[-1] = replace(self._studied(failure, thorough), seconds=self.clock() - began)
        self.emit("studied", failure=self.campaign.failures[-1])

    def _probes(self, key: str) -> int:
        if key.startswith("hang:"):
            return self.policy.slow_probes
        alone = not self.book.found[key].beside & {f.key for f in self.campaign.failures}
        return self.policy.probes if alone else min(self.policy.probes, self.policy.behind_probes)

    def _hint(self, key: str) -> None:
        """Ask first whether the smallest cases of earlier failures, with a backward pass, show this one too."""
        for failure in self.campaign.failures:
            for letters in {"qkv", self.book.found[key].simplest.case.requires_grad}:
                self.book.check(failure.case.but(requires_grad=letters.replace("b", "")))

    def _still_fails(self, key: str, thorough: bool) -> Callable[[Case], bool]:
        def fails(case: Case) -> bool:
            self.emit("shrinking", text=key)
            return key in self.book.check(case, thorough).keys

        return fails

    def _failure(self, key: str, s: Shrinker, thorough: bool) -> Failure:
        entry = self.book.found[key]
        same = entry.simplest.case == s.best
        verdict = entry.simplest if same else self.book.judge.check(s.best, thorough, explain=False)
        earlier = {f.key for f in self.campaign.failures}
        behind = next((k for k in verdict.keys if k != key and k in earlier), "")
        return Failure(
            key, s.best, entry.first.case, verdict, entry.count, behind=behind, shrunk=s.complete, probes=s.probes
        )

    def _studied(self, failure: Failure, thorough: bool) -> Failure:
        """The failure with its pattern, its passing neighbours, how often it comes again, and what would explain it."""
        if failure.behind:
            return failure
        first = self.book.found[failure.key].first
        failure = replace(failure, pattern=described(failure.verdict))
        if first.case != failure.case:
            failure = replace(failure, original_pattern=described(first))
        if not failure.key.startswith("hang:"):
            failure = replace(failure, nearest=neighbours(failure.case, lambda c: self.book.check(c).status == "pass"))
            explained = self.book.judge.check(failure.case, thorough)
            failure = replace(failure, verdict=explained) if failure.key in explained.keys else failure
        return self._reproduced(failure)

    def _reproduced(self, failure: Failure) -> Failure:
        """Run it again here, then once in a new process; where that passes, look for the cases that must come before."""
        key, case = failure.key, failure.case
        times = 0 if key.startswith("hang:") else self.policy.again
        seen = sum(key in self.book.judge.again(case).keys for _ in range(times))
        if not callable(getattr(self.book.judge.runner, "restart", None)):
            return replace(failure, reproduced=(seen, times))
        fresh = self._fresh([case], key)
        failure = replace(failure, reproduced=(seen + fresh, times + 1), fresh=fresh)
        if fresh or seen < times:
            return failure
        before = preceding(case, self.book.before(case), lambda run: self._fresh(run, key), clock=self.clock)
        return replace(failure, preceding=before)

    def _fresh(self, run: Sequence[Case], key: str) -> bool:
        """Whether the last case fails with this key in a new process, after the others."""
        self.book.judge.restart()
        self.emit("shrinking", text=f"{key} in a new process")
        for case in run[:-1]:
            self.book.judge.again(case, thorough=False)
        return key in self.book.judge.again(run[-1]).keys

    def rest(self) -> None:
        """Enter the failures that were not shrunk: whole after an interruption, else by their key and case."""
        c = self.campaign
        shown = {f.key for f in c.failures}
        for key, entry in self.book.found.items():
            if key in shown:
                continue
            first, best = entry.first, entry.simplest
            if c.stopped == "interrupted" and len(c.failures) < self.policy.distinct:
                c.failures.append(Failure(key, best.case, first.case, best, entry.count, pattern=described(best)))
            else:
                c.unshrunk[key] = best.case


def _forward_first(key: str) -> int:
    tensor = key.partition(":")[2]
    return FORWARD_FIRST.index(tensor) if tensor in FORWARD_FIRST else -1


def described(verdict: Verdict) -> str:
    """Where the outputs of a verdict are wrong and by what factor; empty where there are no values to compare."""
    report, execution = verdict.report, verdict.execution
    if report is None or execution is None or not report.wrong or not execution.outputs:
        return ""
    want: Any = {} if verdict.case.dropout else Reference(Problem.of(build(verdict.case))).outputs()
    got = {t: x for t, x in execution.outputs.items() if t in report.budget or t in report.wrong}
    return explain(verdict.case, report.wrong, got, want)
