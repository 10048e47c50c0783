"""Search: draw cases, judge them, keep every distinct failure, then have each shrunk and studied.

A failure never raises: it is recorded, so that Ctrl-C at any moment returns all that was found. After the first failure
the search goes on for a bounded while, because a second bug often hides behind the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from .allowance import hurried, patience
from .book import Book, Judging
from .buckets import Buckets
from .case import Case
from .execute import region_from_json
from .found import Campaign, Event, Policy
from .generate import drawn
from .judge import Verdict
from .learn import Learner
from .region import Region
from .strategies import cases as all_cases
from .study import Study
from .warmed import Warmed, WarmedDraw

ROUNDS = (8, 16, 32, 64)
"""Cases drawn at a time: few at first, to start soon; the last size goes on for ever. The region may narrow between."""
OUTSIDE = 16
"""One case in so many is drawn outside the region: it must be refused cleanly, or be right."""
LOST_IN_A_ROW = 3
HANGS_AGAIN = 10.0
"""Seconds to wait for an answer, at least, once a hang is known."""
COMPILES_BY = 16
"""Cases after which a target that compiled nothing is taken to compile nothing: its cases are then drawn one by one."""


def hunt(
    judge: Judging,
    region: Region | None = None,
    *,
    examples: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    on_event: Callable[[Event], None] = lambda _: None,
    policy: Policy = Policy(),  # noqa: B008 (frozen)
    strategy: Callable[[Region], st.SearchStrategy[Case]] = all_cases,
    clock: Callable[[], float] = time.monotonic,
    warmed: Warmed | None = None,
) -> Campaign:
    """The campaign of cases drawn from `region` (default: what the judge's runner can be told) until one limit is reached.

    `examples` counts distinct cases and is exact and reproducible; `seconds` is neither. KeyboardInterrupt ends the hunt.
    `warmed` is a list of cases whose kernels are compiled: nothing beyond it is drawn.
    """
    info = getattr(judge.runner, "info", {})
    drawn_from = region or region_from_json(info.get("expressible")) or judge.region or Region()
    return _Hunt(judge, drawn_from, examples, seconds, seed, on_event, policy, strategy, clock, warmed).run(info)


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
    warmed: Warmed | None = None
    campaign: Campaign = field(default_factory=Campaign)
    started: float = 0.0
    newest: tuple[int, float] = (0, 0.0)  # cases and seconds at the newest failure
    lost: int = 0
    buckets: Buckets | WarmedDraw | None = None

    def run(self, info: Any) -> Campaign:
        """Search, then study what was found; either may be interrupted, and what was found until then stays."""
        self.started = self.clock()
        declared = self.region if self.judge.region is not None else None
        self.learner = Learner(self.region)
        self.campaign = Campaign(
            info=info, seed=self.seed, examples=self.examples, declared=declared, drawn=self.region
        )
        self.book = Book(self.judge, self._new)
        self.campaign.compiled = getattr(self.judge.runner, "compiled", self.campaign.compiled)
        if self.warmed is not None:
            self.buckets = WarmedDraw(self.seed, self.warmed)
        elif self.policy.variants:
            compiled = self.campaign.compiled
            workers = len(getattr(getattr(self.judge, "ahead", None), "jurors", ())) or 1
            half = workers * (self.seconds or float("inf")) / 2
            self.buckets = Buckets(
                self.seed, self.policy.variants, lambda: len(compiled.variants), lambda: compiled.seconds > half
            )
        study = Study(self.book, self.campaign, self.policy, self._emit, self.clock)
        try:
            self._search()
            self.campaign.searched = (len(self.campaign.compiled.variants), self.campaign.compiled.built)
            if not self._unusable():
                study.run()
        except KeyboardInterrupt:
            self.campaign.stopped = "interrupted"
        study.rest()
        self._close()
        return self.campaign

    def _emit(self, kind: str, **details: Any) -> None:
        self.campaign.seconds = self.clock() - self.started
        self.on_event(Event(kind, self.campaign, **details))

    def _new(self, key: str, verdict: Verdict) -> None:
        self.newest = (self.campaign.cases + 1, self.clock() - self.started)
        self._emit("found", text=key, case=verdict.case, verdict=verdict)

    def _search(self) -> None:
        seen: set[str] = set()
        for number in range(1 << 30):
            fresh = [c for c in self._round(number) if c.key not in seen]
            fresh = list({c.key: c for c in fresh}.values())
            self._begin(fresh)
            for case in fresh:
                if self._over():
                    return
                seen.add(case.key)
                self._try(case)
            if self._over():
                return
            if not fresh and number > len(ROUNDS):
                self.campaign.stopped = "exhausted"
                self.campaign.because = "no further distinct case can be drawn"
                return

    def _begin(self, cases: list[Case]) -> None:
        """Have the cases of a round judged by several workers, where there are several; no more than will be asked for."""
        left = len(cases) if self.examples is None else max(self.examples - self.campaign.cases, 0)
        if getattr(self.judge, "ahead", None) is not None and not self._over():
            self.judge.begin(cases[:left])  # type: ignore[attr-defined] # a Judge has it, and no other has workers

    def _round(self, number: int) -> list[Case]:
        """The next cases: of the region, narrowed to what was not refused so far, and a few from outside it."""
        count = ROUNDS[min(number, len(ROUNDS) - 1)]
        if self.examples is not None:
            count = min(count, max(self.examples, 1))
        inside = self.region if self.campaign.declared is not None else self.learner.region
        if self.buckets is not None:
            return self.buckets.round(inside, count, number)
        everything = Region(dtypes=self.region.dtypes, max_len=self.region.max_len)
        outside = everything if self.campaign.declared is not None else self.region
        strategy = inner = self.strategy(inside)
        if outside != inside:
            wide = self.strategy(outside)
            strategy = st.integers(0, OUTSIDE - 1).flatmap(lambda n: wide if n == OUTSIDE - 1 else inner)
        return drawn(strategy, count, self.seed * 1_000_003 + number)

    def _over(self) -> bool:
        c, now = self.campaign, self.clock() - self.started
        if self.lost >= LOST_IN_A_ROW or self._unusable():
            c.stopped = "infrastructure"
        elif self.examples is not None and c.cases >= self.examples:
            c.stopped = "examples"
        elif self.seconds is not None and now >= self.seconds:
            c.stopped = "seconds"
        elif c.cases_to_first_failure is not None and (why := self._enough_after_failure(now)):
            c.stopped, c.because = "failure", why
        return c.stopped != ""

    def _unusable(self) -> bool:
        """Whether the runner can run no further case, through no fault of the target."""
        return bool(getattr(self.judge.runner, "unusable", None))

    def _enough_after_failure(self, now: float) -> str:
        """Why it is enough: as many cases again as led to the newest failure, or the policy's seconds, brought no other."""
        cases, seconds = self.newest
        low, high = self.policy.more
        found, since = len(self.book.found), self.campaign.cases - cases
        after = f"after {found} distinct failures" if found > 1 else "after the failure"
        enough = min(max(cases, low), high)
        if since >= enough:
            return f"{after}, {since} more cases brought no other"
        if self.seconds is not None and now - seconds > self.policy.more_seconds:
            return f"{after}, {now - seconds:.0f} s brought no other"
        return ""

    def _try(self, case: Case) -> None:
        """Judge one drawn case and count it."""
        began = self.clock()
        with self._waiting():
            verdict = self.book.check(case)
        told = verdict.execution.compiled if verdict.execution else {}
        took: float | None = getattr(self.judge, "seconds", {}).get(case.key)
        self._count(verdict, (self.clock() - began if took is None else took) - told.get("seconds", 0.0))
        if verdict.keys and self.campaign.cases_to_first_failure is None:
            self.campaign.cases_to_first_failure = self.campaign.cases
            self.campaign.seconds_to_first_failure = self.clock() - self.started
        self._emit("case", case=case, verdict=verdict)

    def _waiting(self) -> AbstractContextManager[None]:
        """The wait for one answer: shorter once a hang is known, so that those of its kind do not use up the time."""
        if not any(key.startswith("hang:") for key in self.book.found):
            return nullcontext()
        return hurried(self.judge.runner, max(HANGS_AGAIN, patience(self.campaign.slowest_right)))

    def _count(self, verdict: Verdict, seconds: float) -> None:
        c = self.campaign
        c.cases += 1
        apart = ("refused", "inexpressible", "infrastructure", "skipped")
        kind = verdict.status if verdict.status in apart else "accepted"
        setattr(c, kind, getattr(c, kind) + 1)
        self.lost = self.lost + 1 if kind == "infrastructure" else 0
        if kind == "infrastructure":
            c.trouble = verdict.execution.message if verdict.execution else ""
        elif kind != "skipped":
            self.learner.add(verdict.case, kind)
        if self.buckets is not None:
            self.buckets.add(verdict.case, kind)
            idle = self.warmed is None and c.cases >= COMPILES_BY and not c.compiled.variants
            self.buckets = None if idle else self.buckets
        if kind == "refused" and verdict.execution:
            c.refusals[verdict.execution.message.partition("\n")[0]] += 1
            c.outside += self.region.refuses(verdict.case) != ""
        if verdict.status == "pass":
            c.slowest_right = max(c.slowest_right, seconds)
        if c.slowest is None or seconds > c.slowest[0]:
            c.slowest = (seconds, verdict.case)
        self._note(verdict)

    def _note(self, verdict: Verdict) -> None:
        """Keep warnings, and how close right answers came to their limits."""
        c = self.campaign
        wrong = {f.tensor for f in verdict.failures}
        c.warnings.update(
            f"{f.oracle} {f.tensor}" for f in verdict.findings if f.severity == "warning" and f.tensor not in wrong
        )
        if verdict.report is not None and verdict.status == "pass":
            for tensor, used in verdict.report.budget.items():
                if used > c.budget.get(tensor, (0.0, verdict.case))[0]:
                    c.budget[tensor] = (used, verdict.case)

    def _close(self) -> None:
        c = self.campaign
        c.by_kind, c.learnt = self.learner.by_kind, self.learner.region
        c.table = self.learner.table(c.declared)
        self._emit("done")
