"""Every distinct failure of a hunt: its smallest case, its pattern, what passes beside it, how often it comes again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from ..oracles.exact import Problem, Reference
from ..oracles.finding import is_cause
from ..oracles.invariants import same_bits
from .allowance import CONFIRMED, FOR_CALLS, TO_SHRINK, Allowance, hurried, patience
from .book import Book
from .case import Case
from .found import Campaign, Failure, Policy
from .judge import Verdict
from .nearest import neighbours
from .order import arranged, promising
from .pattern import explain
from .shrink import FEW_FAILING, WITHIN_BUCKET, Budget, BudgetSpentError, Shrinker
from .stateful import after_another, as_sequence, preceding, together
from .tensors import MAX_ORACLE_BYTES, build, oracle_bytes

PLAIN_ORACLES = frozenset(
    {"value", "nonfinite", "dead-row", "crash", "hang", "exception", "shape", "dtype", "refusal", "statistical"}
)
"""Oracles that one plain run decides; the others need the repeated call or the exact run in every probe."""
DIED = "the worker died"
LOST_IN_A_ROW = 3
"""Runs that the worker loses, after which a shrink ends."""


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
    left_out: list[str] = field(default_factory=list)
    """What is not looked at of the present failure, for want of time."""

    def run(self) -> None:
        """Shrink and study one failure after the other, the most telling first, each with an equal share of the time left."""
        self.time = Allowance(self.policy.shrink_seconds, self.clock)
        self.campaign.shrink_seconds = self.policy.shrink_seconds
        self.campaign.unshrunk_because = f"at most {self.policy.distinct} are"
        try:
            self._all()
        finally:
            self.campaign.studied = self.clock() - self.time.started

    def _all(self) -> None:
        done: list[str] = []
        while len(done) < self.policy.distinct:
            left = [k for k in self.book.found if k not in done and not self._implied(k)]
            if not left:
                self.campaign.unshrunk_because = "the others say it better"
                return
            unusable: str = getattr(self.book.judge.runner, "unusable", "")
            if unusable or not self.time.left:
                self.campaign.unshrunk_because = unusable or f"the {self.time.seconds:g} s were over"
                return
            done.append(min(left, key=promising))
            self.left_out = []
            self._one(done[-1], self.time.share(min(len(left), self.policy.distinct + 1 - len(done))))

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
        thorough = key.partition(":")[0] not in PLAIN_ORACLES
        hangs = key.startswith("hang:")
        with hurried(self.book.judge.runner, patience(self.campaign.slowest_right)) if hangs else nullcontext():
            self._hint(key)
            to_shrink = seconds * TO_SHRINK - (self.clock() - began)
            budget = Budget(self._probes(key), to_shrink)
            first = FEW_FAILING if hangs else WITHIN_BUCKET if self.policy.variants else ()
            s = Shrinker(
                self.book.found[key].simplest.case, self._still_fails(key, thorough), budget, self.clock, first
            )
            s.run()
        failure = replace(self._failure(key, s, thorough), reason=_reason(s, seconds * TO_SHRINK))
        self.campaign.failures.append(failure)
        self.emit("shrunk", failure=failure)
        studied = self._studied(failure, thorough)
        self.campaign.failures[-1] = replace(
            studied, seconds=self.clock() - began, left_out=tuple(dict.fromkeys(self.left_out))
        )
        self.emit("studied", failure=self.campaign.failures[-1])

    def _may(self, what: str) -> bool:
        """Whether the failure's share of the time allows this step; what it does not allow is said."""
        if not self.time.in_time:
            self.left_out.append(what)
        return self.time.in_time

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
        alone = not self.book.found[key].beside & {f.key for f in self.campaign.failures}
        return self.policy.probes if alone else min(self.policy.probes, self.policy.behind_probes)

    def _hint(self, key: str) -> None:
        """Ask first whether the smallest cases of earlier failures, with a backward pass, show this one too."""
        for failure in self.campaign.failures:
            for letters in {"qkv", self.book.found[key].simplest.case.requires_grad} if self.time.in_time else ():
                asked = letters if failure.case.bias else letters.replace("b", "")
                asked = asked if failure.case.sinks else asked.replace("s", "")
                self.book.check(failure.case.but(requires_grad=asked))

    def _still_fails(self, key: str, thorough: bool) -> Callable[[Case], bool]:
        declared = self.campaign.declared
        if declared is not None and declared.refuses(self.book.found[key].simplest.case):
            declared = None  # found outside: a refusal was due

        hung, lost = 0, 0  # runs; those in a row that the worker lost

        def fails(case: Case) -> bool:
            nonlocal hung, lost
            self.emit("shrinking", text=key)
            if declared is not None and declared.refuses(case):
                return False  # what is wrong inside is shown inside
            if hung >= self.policy.slow_probes:
                raise BudgetSpentError(f"{hung} runs hung")
            verdict = self.book.check(case, thorough)
            hung += "hang:call" in verdict.keys
            lost = lost + 1 if verdict.status == "infrastructure" else 0
            dead = getattr(self.book.judge.runner, "unusable", "")
            if dead or lost >= LOST_IN_A_ROW:
                raise BudgetSpentError(f"{DIED}: {dead or (verdict.execution and verdict.execution.message)}")
            return key in verdict.keys

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
        if failure.behind or failure.reason.startswith(DIED):
            return failure
        failure = self._reproduced(failure) if self._may("whether it comes again") else failure
        first = self.book.found[failure.key].first
        failure = replace(failure, pattern=described(failure.verdict))
        if first.case != failure.case:
            failure = replace(failure, original_pattern=described(first, failure.key.partition(":")[2]))
        if not failure.key.startswith("hang:") and not failure.preceding:
            failure = replace(failure, nearest=neighbours(failure.case, self._passes))
            if self._may("what would explain it"):
                explained = self.book.judge.check(failure.case, thorough)
                failure = replace(failure, verdict=explained) if failure.key in explained.keys else failure
                failure = self._told_apart(failure)
        return failure

    def _passes(self, case: Case) -> bool:
        return self._may("all that passes beside it") and self.book.check(case).status == "pass"

    def _told_apart(self, failure: Failure) -> Failure:
        """The failure without explanations that only hold because its case has next to no elements."""
        if not failure.verdict.deviations:
            return failure
        try:
            large = wider(failure.case)
        except ValueError:  # a structure that does not stretch
            return failure
        if oracle_bytes(large) > MAX_ORACLE_BYTES or not self._may("what would explain a larger case too"):
            return failure
        told = _on_both(failure.verdict, failure.key, self.book.judge.check(large))
        return replace(failure, verdict=told)

    def _reproduced(self, failure: Failure) -> Failure:
        """Run it again here, then once in a new process; where that passes, look for the cases that must come before."""
        key, case = failure.key, failure.case
        if key.startswith("hang:"):
            return self._confirmed_hang(failure)
        times = self.policy.again
        seen = sum(key in self.book.judge.again(case).keys for _ in range(times))
        if not callable(getattr(self.book.judge.runner, "restart", None)):
            return _sometimes(replace(failure, reproduced=(seen, times)))
        self.emit("shrinking", text=f"{key} in a new process")
        verdict = self._run([case])
        fresh = key in verdict.keys
        failure = replace(failure, reproduced=(seen + fresh, times + 1), fresh=fresh)
        failure = replace(failure, verdict=verdict) if fresh and not times else failure  # with the full deadline
        failure = failure if fresh else replace(failure, varies=_differ(verdict, self._run([case])))
        if fresh or failure.varies:
            return _sometimes(failure)
        led = self._with_calls_before(failure)
        if led is failure and seen < times:
            return _sometimes(failure)
        self.leak = led
        return led

    def _confirmed_hang(self, failure: Failure) -> Failure:
        """The failure after another, longer wait in a new process; with the first case where the smaller one is only slow."""
        if not callable(getattr(self.book.judge.runner, "restart", None)):
            return failure
        self.emit("shrinking", text=f"{failure.key} in a new process")
        with hurried(self.book.judge.runner, CONFIRMED * patience(self.campaign.slowest_right)):
            verdict = self._run([failure.case])
        if failure.key in verdict.keys:
            return replace(failure, verdict=verdict, reproduced=(1, 1), fresh=True)
        first = self.book.found[failure.key].first
        if failure.case == first.case:
            return replace(failure, reproduced=(0, 1), fresh=False)
        slow = "smaller cases were slow, but gave an answer in the end"
        return replace(failure, case=first.case, verdict=first, shrunk=False, reason=slow)

    def _with_calls_before(self, failure: Failure) -> Failure:
        """The failure as a call sequence that a new process shows too, else with the cases that must come before it."""
        key, case = failure.key, failure.case

        self.time.extend(FOR_CALLS)

        def fails(run: Sequence[Case]) -> bool:
            return self._may("all of the calls that must come before it") and self._fresh(run, key)

        sequence = as_sequence(case, fails)
        if sequence is not None:
            return self._again_as(failure, sequence, ())
        before = after_another(case, fails)
        before = before or preceding(case, self.book.before(case), fails, clock=self.clock)
        if not before:
            return failure
        smaller, before = together(case, before, fails)
        return self._again_as(failure, smaller, preceding(smaller, before, fails, clock=self.clock) or before)

    def with_calls(self, failure: Failure) -> None:
        """Add a failure that is known with the cases before it, made simpler together with them."""
        self.time = Allowance(self.policy.shrink_seconds, self.clock)
        key = failure.key
        self.campaign.failures.append(failure)

        def fails(run: Sequence[Case]) -> bool:
            return self._may("all of the calls that must come before it") and self._fresh(run, key)

        budget = Budget(self.policy.probes, self.time.left)
        smaller, before = together(failure.case, failure.preceding, fails, budget)
        before = preceding(smaller, before, fails, budget, self.clock) or before
        self.campaign.failures[-1] = replace(
            self._again_as(failure, smaller, before), shrunk=not self.left_out, left_out=tuple({*self.left_out})
        )

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
                told = described(best)
                c.failures.append(
                    Failure(key, best.case, first.case, best, entry.count, pattern=told, reason="interrupted")
                )
            else:
                c.unshrunk[key] = best.case
                c.caused |= {key: cause} if (cause := self._cause(key)) else {}
        c.failures[:] = arranged(c.failures)


def wider(case: Case) -> Case:
    """The same structure with more elements and plain data, on which a rounding shows everywhere and a lost key does not."""
    width = {"D": max(case.D, 32), "Dv": max(case.Dv, 32)} if case.D == case.Dv else {}
    return case.but(Lq=max(case.Lq, 33), Lk=max(case.Lk, 70), data="normal", **width)


def _sometimes(failure: Failure) -> Failure:
    """The failure, called shrunk only if it came every time in this process."""
    seen, times = failure.reproduced
    if seen == times:
        return failure
    chance = f"it fails {seen} of {times} times, so that a smaller case may have passed by chance"
    return replace(failure, shrunk=False, reason=chance)


def _reason(s: Shrinker, seconds: float) -> str:
    """Why a shrink did not come to its end; empty where it did."""
    runs = f"{s.probes} run{'s' if s.probes != 1 else ''}"
    known = {"time": f"its share of the time, {seconds:.1f} s, was over after {runs}", "runs": f"stopped after {runs}"}
    return known.get(s.stopped, s.stopped)


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
