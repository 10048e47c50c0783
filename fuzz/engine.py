"""Search: draw cases, judge them, keep every distinct failure, shrink each, and learn what else there is to say about it.

A failure never raises: it is recorded, so that Ctrl-C at any moment returns all that was found. After the first failure
the search goes on for a bounded while, because a second bug often hides behind the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hypothesis import strategies as st

from ..oracles.exact import Problem, Reference
from .case import Case
from .execute import region_from_json
from .found import Campaign, Failure
from .generate import drawn
from .judge import Verdict
from .learn import Learner
from .nearest import Neighbour, neighbours
from .pattern import explain
from .region import Region
from .shrink import Budget, Shrinker
from .simpler import size
from .stateful import preceding
from .strategies import cases as all_cases
from .tensors import build

ROUNDS = (8, 16, 32, 64)
"""Cases drawn at a time: few at first, to start soon; the last size goes on for ever. The region may narrow between."""
OUTSIDE = 16
"""One case in so many is drawn outside the region: it must be refused cleanly, or be right."""
HISTORY = 512
LOST_IN_A_ROW = 3
VALUE_ORACLES = frozenset(
    {"value", "nonfinite", "dead-row", "crash", "hang", "exception", "shape", "dtype", "refusal", "statistical"}
)
"""Oracles that a single plain run decides; the others need the repeated call or the exact run."""
FORWARD_FIRST = ("o", "lse", "dq", "dk", "dv", "dbias")


class Judging(Protocol):
    """What a hunt needs of a Judge."""

    region: Region | None
    runner: Any

    def check(self, case: Case, thorough: bool = False) -> Verdict:
        """The verdict on a case, remembered."""

    def again(self, case: Case, thorough: bool = True) -> Verdict:
        """The verdict of another run, in the same process."""

    def restart(self) -> None:
        """Begin a new process."""


@dataclass(frozen=True)
class Policy:
    """How much to spend on what was found.

    After the first failure the search goes on for as many cases again, within the bounds of `more` and `more_seconds`
    (the seconds only where the hunt itself is limited by time, so that `examples` stays reproducible).
    """

    more: tuple[int, int] = (25, 200)
    more_seconds: float = 10.0
    distinct: int = 8
    shrink_seconds: float = 16.0
    probes: int = 600
    slow_probes: int = 12  # of a hang, whose every probe lasts as long as the deadline
    again: int = 2


@dataclass(frozen=True)
class Event:
    """Something that happened: kind is case, failure, shrinking, shrunk, failure-done or done; `campaign` is as of now."""

    kind: str
    campaign: Campaign
    text: str = ""
    case: Case | None = None
    verdict: Verdict | None = None
    failure: Failure | None = None


@dataclass
class _Found:
    """What is known of one failure before it is shrunk."""

    first: Verdict
    simplest: Verdict
    count: int = 1


def hunt(
    judge: Judging,
    region: Region | None = None,
    *,
    examples: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    on_event: Callable[[Event], None] = lambda _: None,
    policy: Policy = Policy(),
    strategy: Callable[[Region], st.SearchStrategy[Case]] = all_cases,
    clock: Callable[[], float] = time.monotonic,
) -> Campaign:
    """The campaign of cases drawn from `region` (default: what the judge's runner can be told) until one limit is reached.

    `examples` counts distinct cases and is exact and reproducible; `seconds` is neither. KeyboardInterrupt ends the hunt.
    """
    info = getattr(judge.runner, "info", {})
    drawn_from = region or region_from_json(info.get("expressible")) or judge.region or Region()
    return _Hunt(judge, drawn_from, examples, seconds, seed, on_event, policy, strategy, clock).run(info)


@dataclass
class _Hunt:
    judge: Judging
    region: Region
    examples: int | None
    seconds: float | None
    seed: int
    on_event: Callable[[Event], None]
    policy: Policy
    strategy: Callable[[Region], st.SearchStrategy[Case]]
    clock: Callable[[], float]
    campaign: Campaign = field(default_factory=Campaign)
    found: dict[str, _Found] = field(default_factory=dict)
    history: list[Case] = field(default_factory=list)
    ran_at: dict[tuple[str, bool], int] = field(default_factory=dict)
    started: float = 0.0
    lost: int = 0

    def run(self, info: Any) -> Campaign:
        """Search, then shrink; either may be interrupted, and what was found until then stays."""
        self.started = self.clock()
        declared = self.region if self.judge.region is not None else None
        self.learner = Learner(self.region)
        self.campaign = Campaign(
            info=info, seed=self.seed, examples=self.examples, declared=declared, drawn=self.region
        )
        try:
            self._search()
            self._shrink_all()
        except KeyboardInterrupt:
            self.campaign.stopped = "interrupted"
        self._close()
        return self.campaign

    def _emit(self, kind: str, **details: Any) -> None:
        self.campaign.seconds = self.clock() - self.started
        self.on_event(Event(kind, self.campaign, **details))

    # ---- search

    def _search(self) -> None:
        seen: set[str] = set()
        for number in range(1 << 30):
            fresh = [c for c in self._round(number) if c.key not in seen]
            for case in fresh:
                if self._over():
                    return
                if case.key not in seen:
                    seen.add(case.key)
                    self._try(case)
            if not fresh and number > len(ROUNDS):
                self.campaign.stopped = "exhausted"
                return

    def _round(self, number: int) -> list[Case]:
        """The next cases: of the region, narrowed to what was not refused so far, and a few from outside it."""
        count = ROUNDS[min(number, len(ROUNDS) - 1)]
        if self.examples is not None:
            count = min(count, max(self.examples, 1))
        inside = self.region if self.campaign.declared is not None else self.learner.region
        everything = Region(dtypes=self.region.dtypes, max_len=self.region.max_len)
        outside = everything if self.campaign.declared is not None else self.region
        strategy = inner = self.strategy(inside)
        if outside != inside:
            wide = self.strategy(outside)
            strategy = st.integers(0, OUTSIDE - 1).flatmap(lambda n: wide if n == OUTSIDE - 1 else inner)
        return drawn(strategy, count, self.seed * 1_000_003 + number)

    def _over(self) -> bool:
        c, now = self.campaign, self.clock() - self.started
        if self.lost >= LOST_IN_A_ROW:
            c.stopped = "infrastructure"
        elif self.examples is not None and c.cases >= self.examples:
            c.stopped = "examples"
        elif self.seconds is not None and now >= self.seconds:
            c.stopped = "seconds"
        elif c.cases_to_first_failure is not None and self._enough_after_failure(now):
            c.stopped = "failure"
        return c.stopped != ""

    def _enough_after_failure(self, now: float) -> bool:
        c = self.campaign
        first, since = c.cases_to_first_failure or 0, c.seconds_to_first_failure or 0.0
        low, high = self.policy.more
        late = self.seconds is not None and now - since > self.policy.more_seconds
        return late or c.cases - first >= min(max(first, low), high)

    def _try(self, case: Case) -> None:
        """Judge one drawn case and count it."""
        began = self.clock()
        verdict = self._check(case)
        self._count(verdict, self.clock() - began)
        if verdict.keys and self.campaign.cases_to_first_failure is None:
            self.campaign.cases_to_first_failure = self.campaign.cases
            self.campaign.seconds_to_first_failure = self.clock() - self.started
        self._emit("failure" if verdict.keys else "case", case=case, verdict=verdict)

    def _count(self, verdict: Verdict, seconds: float) -> None:
        c = self.campaign
        c.cases += 1
        kind = {"refused": "refused", "inexpressible": "inexpressible", "infrastructure": "infrastructure"}.get(
            verdict.status, "accepted"
        )
        setattr(c, kind, getattr(c, kind) + 1)
        self.lost = self.lost + 1 if kind == "infrastructure" else 0
        if kind == "infrastructure":
            c.trouble = verdict.execution.message if verdict.execution else ""
        else:
            self.learner.add(verdict.case, kind)
        if kind == "refused" and verdict.execution:
            c.refusals[verdict.execution.message.partition("\n")[0]] += 1
            c.outside += self.region.refuses(verdict.case) != ""
        if c.slowest is None or seconds > c.slowest[0]:
            c.slowest = (seconds, verdict.case)
        self._note(verdict)

    def _note(self, verdict: Verdict) -> None:
        """Keep warnings, and how close right answers came to their limits."""
        c = self.campaign
        c.warnings.update(f"{f.oracle} {f.tensor}" for f in verdict.findings if f.severity == "warning")
        if verdict.report is not None and verdict.status == "pass":
            for tensor, used in verdict.report.budget.items():
                if used > c.budget.get(tensor, (0.0, verdict.case))[0]:
                    c.budget[tensor] = (used, verdict.case)

    def _check(self, case: Case, thorough: bool = False) -> Verdict:
        """The verdict on a case; what fails is recorded, whichever step asked."""
        at = (case.key, thorough)
        if at not in self.ran_at:
            self.ran_at[at] = len(self.history)
            self.history.append(case)
        verdict = self.judge.check(case, thorough)
        for key in verdict.keys:
            known = self.found.get(key)
            if known is None:
                self.found[key] = _Found(verdict, verdict)
            else:
                known.count += 1
                if size(case) < size(known.simplest.case):
                    known.simplest = verdict
        return verdict

    # ---- every distinct failure

    def _shrink_all(self) -> None:
        end = self.clock() + self.policy.shrink_seconds
        done: list[str] = []
        while len(done) < self.policy.distinct:
            left = [k for k in self.found if k not in done]
            if not left:
                return
            key = min(left, key=_forward_first)
            ahead = min(len(left), self.policy.distinct - len(done))
            share = max((end - self.clock()) / (1 if ahead == 1 else 1 + ahead / 2), 1.0)
            done.append(key)
            self._shrink(key, share)

    def _shrink(self, key: str, seconds: float) -> None:
        """Shrink one failure and add it; interrupted, it is added as far as it got."""
        began = self.clock()
        self._emit("shrinking", text=key)
        self._hint(key)
        probes = self.policy.slow_probes if key.startswith("hang:") else self.policy.probes
        thorough = key.partition(":")[0] not in VALUE_ORACLES
        s = Shrinker(
            self.found[key].simplest.case, self._still_fails(key, thorough), Budget(probes, seconds), self.clock
        )
        try:
            s.run()
        finally:
            failure = self._failure(key, s, thorough)
            self.campaign.failures.append(failure)
            self._emit("shrunk", failure=failure)
        self.campaign.failures[-1] = replace(self._studied(failure), seconds=self.clock() - began)
        self._emit("failure-done", failure=self.campaign.failures[-1])

    def _hint(self, key: str) -> None:
        """Ask first whether the smallest cases of earlier failures show this one too."""
        for failure in self.campaign.failures:
            self._check(failure.case.but(requires_grad="qkv"))
            if len(self.found[key].simplest.case.requires_grad) == 1:
                self._check(failure.case.but(requires_grad=self.found[key].simplest.case.requires_grad))

    def _still_fails(self, key: str, thorough: bool) -> Callable[[Case], bool]:
        def fails(case: Case) -> bool:
            self._emit("shrinking", text=key)
            return key in self._check(case, thorough).keys

        return fails

    def _failure(self, key: str, s: Shrinker, thorough: bool) -> Failure:
        known = self.found[key]
        verdict = known.simplest if known.simplest.case == s.best else self.judge.check(s.best, thorough)
        earlier = {f.key for f in self.campaign.failures}
        behind = next((k for k in verdict.keys if k != key and k in earlier), "")
        return Failure(
            key, s.best, known.first.case, verdict, known.count, behind=behind, shrunk=s.complete, probes=s.probes
        )

    def _studied(self, failure: Failure) -> Failure:
        """The failure with its pattern, its passing neighbours, and how often it comes again."""
        failure = replace(failure, pattern=described(failure.verdict), original_pattern=self._original_pattern(failure))
        if not failure.key.startswith("hang:"):
            failure = replace(failure, nearest=self._nearest(failure.case))
        return self._reproduced(failure)

    def _original_pattern(self, failure: Failure) -> str:
        first = self.found[failure.key].first
        return described(first) if first.case != failure.case else ""

    def _nearest(self, case: Case) -> tuple[Neighbour, ...]:
        return neighbours(case, lambda c: self._check(c).status == "pass")

    def _reproduced(self, failure: Failure) -> Failure:
        """Run it again here, then once in a new process; where that passes, look for the cases that must come before."""
        key, case = failure.key, failure.case
        times = 0 if key.startswith("hang:") else self.policy.again
        seen = sum(key in self.judge.again(case).keys for _ in range(times))
        if not _restarts(self.judge):
            return replace(failure, reproduced=(seen, times))
        fresh = self._fresh([case], key)
        failure = replace(failure, reproduced=(seen + fresh, times + 1), fresh=fresh)
        if fresh or seen < times:
            return failure
        at = next(
            (self.ran_at[k] for k in ((case.key, True), (case.key, False)) if k in self.ran_at), len(self.history)
        )
        before = self.history[max(0, at - HISTORY) : at]
        return replace(failure, preceding=preceding(case, before, lambda run: self._fresh(run, key), clock=self.clock))

    def _fresh(self, run: Sequence[Case], key: str) -> bool:
        """Whether the last case fails with this key in a new process, after the others."""
        self.judge.restart()
        self._emit("shrinking", text=f"{key} in a new process")
        for case in run[:-1]:
            self.judge.again(case, thorough=False)
        return key in self.judge.again(run[-1]).keys

    def _close(self) -> None:
        """Failures that were not shrunk, what was learnt, the time."""
        c = self.campaign
        shown = {f.key for f in c.failures}
        for key, known in self.found.items():
            if key in shown:
                continue
            if c.stopped == "interrupted" and len(c.failures) < self.policy.distinct:
                first, best = known.first, known.simplest
                c.failures.append(Failure(key, best.case, first.case, best, known.count, pattern=described(best)))
            else:
                c.unshrunk[key] = known.simplest.case
        c.by_kind, c.learnt = self.learner.by_kind, self.learner.region
        c.table = self.learner.table(c.declared)
        self._emit("done")


def _restarts(judge: Judging) -> bool:
    return callable(getattr(judge.runner, "restart", None))


def _forward_first(key: str) -> int:
    tensor = key.partition(":")[2]
    return FORWARD_FIRST.index(tensor) if tensor in FORWARD_FIRST else -1


def described(verdict: Verdict) -> str:
    """Where the outputs of a verdict are wrong and by what factor; empty where there are no values to compare."""
    report, execution = verdict.report, verdict.execution
    if report is None or execution is None or not report.wrong or not execution.outputs:
        return ""
    case = verdict.case
    want = {} if case.dropout else Reference(Problem.of(build(case))).outputs()
    got = {t: x for t, x in execution.outputs.items() if t in report.budget or t in report.wrong}
    return explain(case, report.wrong, got, want)
