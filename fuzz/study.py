"""Every distinct failure of a hunt: its smallest case, its pattern, what passes beside it, how often it comes again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from ..oracles.exact import Problem, Reference
from ..oracles.finding import is_cause
from ..oracles.invariants import same_bits
from .book import Book
from .case import Case
from .found import Campaign, Failure, Policy
from .judge import Verdict
from .nearest import neighbours
from .pattern import explain
from .shrink import WITHIN_BUCKET, Budget, Shrinker
from .simpler import size
from .stateful import as_sequence, preceding, together
from .tensors import MAX_ORACLE_BYTES, build, oracle_bytes

PLAIN_ORACLES = frozenset(
    {"value", "nonfinite", "dead-row", "crash", "hang", "exception", "shape", "dtype", "refusal", "statistical"}
)
"""Oracles that one plain run decides; the others need the repeated call or the exact run in every probe."""
SECOND_LOOK = frozenset(
    {"exact", "statistical", "identity", "repeat", "sequence", "guard", "allocation", "alias", "global-state"}
)
"""Oracles that compare runs or look around the outputs: what they find is shown after wrong values."""
HANG_SECONDS = 5.0
"""Deadline of a probe while a hang is shrunk: its cases are smaller than one that had the full deadline."""
FORWARD_FIRST = ("o", "lse", "dq", "dk", "dv", "dbias", "dsinks")


@dataclass
class Study:
    """Adds the failures of a book to a campaign; `rest` adds those that it did not come to, as far as they are shrunk."""

    book: Book
    campaign: Campaign
    policy: Policy
    emit: Callable[..., None]
    clock: Callable[[], float]
    leak: Failure | None = None
    """The first failure that needs calls before it: what fails only in a used process is then its consequence."""

    def run(self) -> None:
        """Shrink and study one failure after the other, the most telling first, as far as the policy allows."""
        end = self.clock() + self.policy.shrink_seconds
        done: list[str] = []
        while len(done) < self.policy.distinct:
            left = [k for k in self.book.found if k not in done and not self._implied(k)]
            if not left:
                return
            ahead = min(len(left), self.policy.distinct - len(done))
            done.append(min(left, key=_promising))
            self._one(done[-1], max((end - self.clock()) * 2 / (1 + ahead), 1.0))

    def _implied(self, key: str) -> bool:
        """Whether a failure says of an output only what wrong values of it say better."""
        oracle, _, tensor = key.partition(":")
        return bool(self._cause(key)) or (oracle in ("exact", "statistical") and f"value:{tensor}" in self.book.found)

    def _cause(self, key: str) -> str:
        """A failure that every case of this one shows too, and that makes answers wrong; empty without."""
        beside = sorted(self.book.found[key].beside & set(self.book.found))
        return "" if is_cause(key) else next((k for k in beside if is_cause(k)), "")

    def _one(self, key: str, seconds: float) -> None:
        """Shrink one failure, add it, study it; interrupted before it is added, the book has its simplest case."""
        began = self.clock()
        self.emit("shrinking", text=key)
        if self.leak is not None and not self._fresh([self.book.found[key].simplest.case], key):
            self.campaign.failures.append(self._leaked(key, self.leak))
            return
        self._hint(key)
        thorough = key.partition(":")[0] not in PLAIN_ORACLES
        hangs = key.startswith("hang:")
        budget = Budget(self._probes(key), self.policy.slow_probes * HANG_SECONDS if hangs else seconds)
        first = WITHIN_BUCKET if self.policy.variants else ()
        s = Shrinker(self.book.found[key].simplest.case, self._still_fails(key, thorough), budget, self.clock, first)
        with _hurried(self.book.judge.runner) if hangs else nullcontext():
            s.run()
        failure = self._failure(key, s, thorough)
        self.campaign.failures.append(failure)
        self.emit("shrunk", failure=failure)
        self.campaign.failures[-1] = replace(self._studied(failure, thorough), seconds=self.clock() - began)
        self.emit("studied", failure=self.campaign.failures[-1])

    def _leaked(self, key: str, leak: Failure) -> Failure:
        """A failure that a new process does not show, where it is known already that calls leak into later ones.

        It is told with the calls of that failure if they show it too.
        """
        entry = self.book.found[key]
        case = leak.case.but(requires_grad=_asked_for(key))
        verdict = self._run([*leak.preceding, case])
        if key in verdict.keys:
            return replace(
                leak, key=key, case=case, verdict=verdict, behind=leak.key, count=entry.count, original=entry.first.case
            )
        return Failure(
            key, entry.simplest.case, entry.first.case, entry.simplest, entry.count,
            behind=leak.key, reproduced=(0, 1), fresh=False, shrunk=True,
        )  # fmt: skip

    def _probes(self, key: str) -> int:
        if key.startswith("hang:"):
            return self.policy.slow_probes
        alone = not self.book.found[key].beside & {f.key for f in self.campaign.failures}
        return self.policy.probes if alone else min(self.policy.probes, self.policy.behind_probes)

    def _hint(self, key: str) -> None:
        """Ask first whether the smallest cases of earlier failures, with a backward pass, show this one too."""
        for failure in self.campaign.failures:
            for letters in {"qkv", self.book.found[key].simplest.case.requires_grad}:
                asked = letters if failure.case.bias else letters.replace("b", "")
                asked = asked if failure.case.sinks else asked.replace("s", "")
                self.book.check(failure.case.but(requires_grad=asked))

    def _still_fails(self, key: str, thorough: bool) -> Callable[[Case], bool]:
        declared = self.campaign.declared
        if declared is not None and declared.refuses(self.book.found[key].simplest.case):
            declared = None  # found outside: a refusal was due

        def fails(case: Case) -> bool:
            self.emit("shrinking", text=key)
            if declared is not None and declared.refuses(case):
                return False  # what is wrong inside is shown inside
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
        failure = self._reproduced(failure)
        first = self.book.found[failure.key].first
        failure = replace(failure, pattern=described(failure.verdict))
        if first.case != failure.case:
            failure = replace(failure, original_pattern=described(first, failure.key.partition(":")[2]))
        if not failure.key.startswith("hang:") and not failure.preceding:
            failure = replace(failure, nearest=neighbours(failure.case, lambda c: self.book.check(c).status == "pass"))
            explained = self.book.judge.check(failure.case, thorough)
            failure = replace(failure, verdict=explained) if failure.key in explained.keys else failure
            failure = self._told_apart(failure)
        return failure

    def _told_apart(self, failure: Failure) -> Failure:
        """The failure without explanations that only hold because its case has next to no elements."""
        if not failure.verdict.deviations:
            return failure
        try:
            large = wider(failure.case)
        except ValueError:  # a structure that does not stretch
            return failure
        if oracle_bytes(large) > MAX_ORACLE_BYTES:
            return failure
        told = _on_both(failure.verdict, failure.key, self.book.judge.check(large))
        return replace(failure, verdict=told)

    def _reproduced(self, failure: Failure) -> Failure:
        """Run it again here, then once in a new process; where that passes, look for the cases that must come before."""
        key, case = failure.key, failure.case
        times = 0 if key.startswith("hang:") else self.policy.again
        seen = sum(key in self.book.judge.again(case).keys for _ in range(times))
        if not callable(getattr(self.book.judge.runner, "restart", None)):
            return replace(failure, reproduced=(seen, times))
        self.emit("shrinking", text=f"{key} in a new process")
        verdict = self._run([case])
        fresh = key in verdict.keys
        failure = replace(failure, reproduced=(seen + fresh, times + 1), fresh=fresh)
        failure = replace(failure, verdict=verdict) if fresh and not times else failure  # with the full deadline
        failure = failure if fresh else replace(failure, varies=_differ(verdict, self._run([case])))
        if fresh or seen < times:
            return failure
        self.leak = self._with_calls_before(failure)
        return self.leak

    def _with_calls_before(self, failure: Failure) -> Failure:
        """The failure as a call sequence that a new process shows too, else with the cases that must come before it."""
        key, case = failure.key, failure.case

        def fails(run: Sequence[Case]) -> bool:
            return self._fresh(run, key)

        sequence = as_sequence(case, fails)
        if sequence is not None:
            return self._again_as(failure, sequence, ())
        before = preceding(case, self.book.before(case), fails, clock=self.clock)
        if not before:
            return failure
        smaller, before = together(case, before, fails)
        return self._again_as(failure, smaller, preceding(smaller, before, fails, clock=self.clock) or before)

    def _again_as(self, failure: Failure, case: Case, before: tuple[Case, ...]) -> Failure:
        """The failure with another smallest case, run in new processes."""
        verdicts = [self._run([*before, case]) for _ in range(self.policy.again)]
        seen = sum(failure.key in v.keys for v in verdicts)
        return replace(
            failure,
            case=case,
            preceding=before,
            verdict=verdicts[-1],
            reproduced=(seen, len(verdicts)),
            fresh=not before,
        )

    def _fresh(self, run: Sequence[Case], key: str) -> bool:
        """Whether the last case fails with this key in a new process, after the others."""
        self.emit("shrinking", text=f"{key} in a new process")
        return key in self._run(run).keys

    def _run(self, run: Sequence[Case]) -> Verdict:
        """The verdict on the last case in a new process, after the others."""
        self.book.judge.restart()
        for case in run[:-1]:
            self.book.judge.again(case, thorough=False)
        return self.book.judge.again(run[-1])

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
                c.caused |= {key: cause} if (cause := self._cause(key)) else {}
        c.failures[:] = arranged(c.failures)


def wider(case: Case) -> Case:
    """The same structure with more elements and plain data, on which a rounding shows everywhere and a lost key does not."""
    width = {"D": max(case.D, 32), "Dv": max(case.Dv, 32)} if case.D == case.Dv else {}
    return case.but(Lq=max(case.Lq, 33), Lk=max(case.Lk, 70), data="normal", **width)


@contextmanager
def _hurried(runner: Any) -> Iterator[None]:
    """Within it a runner that has a deadline waits for HANG_SECONDS at most."""
    deadline = getattr(runner, "deadline", None)
    if deadline is None:
        yield
        return
    runner.deadline = min(deadline, HANG_SECONDS)
    try:
        yield
    finally:
        runner.deadline = deadline


def _on_both(smallest: Verdict, key: str, large: Verdict) -> Verdict:
    """The smallest case's verdict without deviations that do not explain the larger case too, where that fails alike."""
    if key not in large.keys:
        return smallest
    wanted = [d.label for d in large.deviations]
    both = sorted((d for d in smallest.deviations if d.label in wanted), key=lambda d: wanted.index(d.label))
    return replace(smallest, deviations=tuple(both))


def _differ(one: Verdict, other: Verdict) -> bool:
    """Whether two runs of a case gave different bits."""
    first, second = (v.execution.outputs if v.execution else {} for v in (one, other))
    return first.keys() != second.keys() or bool(same_bits("repeat", "", first, second))


def _asked_for(key: str) -> str:
    """The gradient that a failure of it needs: "q" for dq; empty for others."""
    tensor = key.partition(":")[2]
    return tensor[1] if tensor in ("dq", "dk", "dv", "dsinks") else ""


def _forward_first(key: str) -> int:
    tensor = key.partition(":")[2]
    return FORWARD_FIRST.index(tensor) if tensor in FORWARD_FIRST else -1


def arranged(failures: Sequence[Failure]) -> list[Failure]:
    """The failures as they are shown: the most telling first, each followed by those that its own cause may explain.

    One stands behind another if its smallest case shows the other as well.
    """
    heads: list[Failure] = []
    behind: dict[str, list[Failure]] = {}
    for failure in sorted(failures, key=_telling):
        leaked = failure.behind if failure.fresh is False else ""
        cause = leaked or next((h.key for h in heads if h.key in failure.verdict.keys), "")
        if cause:
            behind.setdefault(cause, []).append(replace(failure, behind=cause))
        else:
            heads.append(replace(failure, behind=""))
    return [f for head in heads for f in (head, *behind.get(head.key, ()))]


def _telling(failure: Failure) -> tuple[object, ...]:
    """Order of failures: plain mistakes, then those that are seen from a second call or run; outputs before gradients."""
    return (*_promising(failure.key), failure.key.startswith("dead-row:"), size(failure.case))


def _promising(key: str) -> tuple[bool, bool, int]:
    """Order of keys by how much their failures tell: memory written to, plain mistakes, what a second look shows."""
    return (
        not is_cause(key) and not key.startswith("guard:"),
        key.partition(":")[0] in SECOND_LOOK,
        _forward_first(key),
    )


def described(verdict: Verdict, only: str = "") -> str:
    """Where the outputs of a verdict (or one of them) are wrong and by what factor; empty where no values are compared."""
    report, execution = verdict.report, verdict.execution
    if report is None or execution is None or not report.wrong or not execution.outputs:
        return ""
    if only not in ("", *report.wrong):
        return ""
    want: Any = {} if verdict.case.dropout else Reference(Problem.of(build(verdict.case))).outputs()
    got = {t: x for t, x in execution.outputs.items() if t in report.budget or t in report.wrong}
    return explain(verdict.case, report.wrong, got, want, only)
