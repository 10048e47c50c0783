"""What was found is studied within one bound that all failures share; what was left undone says why and how to go on."""

from __future__ import annotations

from typing import Any

import pytest

from flashproof.fuzz.allowance import LONGEST, SHORTEST, Allowance, default_seconds, hurried, patience
from flashproof.fuzz.case import Case
from flashproof.fuzz.engine import hunt
from flashproof.fuzz.execute import Execution
from flashproof.fuzz.found import Campaign, Policy
from flashproof.fuzz.judge import Verdict
from flashproof.fuzz.report import failures_text, summary
from flashproof.oracles.finding import Finding

REPLAY = "flashproof replay failures/3f2a91bc.json"


class Clock:
    """Time that passes only when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowJudge:
    """Every run takes a second of a clock; a case fails with the keys that a function names. Has no processes."""

    region = None
    runner: Any = type("InProcess", (), {"info": {}})()

    def __init__(self, keys: Any, clock: Clock, hangs: float = 1.0) -> None:
        self.keys, self.clock, self.hangs = keys, clock, hangs
        self.known: dict[tuple[str, bool], Verdict] = {}

    def check(self, case: Case, thorough: bool = False, *, explain: bool = True) -> Verdict:
        at = (case.key, thorough)
        if at not in self.known:
            self.known[at] = self.again(case, thorough)
        return self.known[at]

    def again(self, case: Case, thorough: bool = True) -> Verdict:
        self.clock.now += 1.0
        found = tuple(Finding(*key.split(":"), message="wrong") for key in self.keys(case))
        return Verdict(case, "fail" if found else "pass", found, execution=Execution("ok"))

    def restart(self) -> None:
        pass


def slow_hunt(keys: Any, seconds: float, **policy: Any) -> Campaign:
    clock = Clock()
    return hunt(
        SlowJudge(keys, clock), examples=40, seed=2, clock=clock, policy=Policy(shrink_seconds=seconds, **policy)
    )


def three(case: Case) -> list[str]:
    return [f"value:{t}" for t, holds in (("o", case.Lk > 4), ("dq", case.D > 3), ("dk", case.Lq > 3)) if holds]


@pytest.mark.parametrize("seconds", [6.0, 20.0, 45.0])
def test_all_that_is_done_about_failures_stays_within_the_bound(seconds: float) -> None:
    campaign = slow_hunt(three, seconds)
    assert campaign.studied <= seconds + 2 * campaign.slowest_right + 1


def test_every_distinct_failure_is_shrunk_somewhat() -> None:
    campaign = slow_hunt(three, 45.0)
    assert len(campaign.failures) == 3 and all(f.probes > 3 for f in campaign.failures)
    assert all(f.case != f.original for f in campaign.failures)


def test_a_shrink_that_runs_out_of_time_says_so_and_how_to_go_on() -> None:
    campaign = slow_hunt(three, 20.0)
    told = " ".join(failures_text(campaign, lambda _: REPLAY).split())
    assert "not to the end (its share of the time, 4.4 s, was over after" in told
    assert "continue flashproof shrink failures/3f2a91bc.json" in told
    assert "of at most 20 (--shrink-seconds); 0 of 3 failures to the end" in summary(campaign)


def test_what_is_left_out_for_want_of_time_is_said() -> None:
    failure = slow_hunt(lambda c: ["value:o"] if c.Lk > 4 else [], 12.0).failures[0]
    assert "all that passes beside it" in failure.left_out
    assert "not seen all that passes beside it" in " ".join(failures_text(Campaign(failures=[failure])).split())


def test_failures_that_got_no_time_say_so() -> None:
    campaign = slow_hunt(three, 1.0)
    assert len(campaign.failures) == 1 and len(campaign.unshrunk) == 2
    assert "2 more, not shrunk (the 1 s were over)" in failures_text(campaign)


def test_a_spent_number_of_runs_is_the_reason() -> None:
    failure = slow_hunt(three, 1e6, probes=2, distinct=1).failures[0]
    assert (failure.shrunk, failure.reason) == (False, "stopped after 2 runs")


def test_a_failure_that_comes_only_sometimes_is_not_called_shrunk() -> None:
    class Sometimes(SlowJudge):
        def again(self, case: Case, thorough: bool = True) -> Verdict:
            seen, self.seen = getattr(self, "seen", set()), getattr(self, "seen", set()) | {case.key}
            return Verdict(case, "pass", execution=Execution("ok")) if case.key in seen else super().again(case)

    clock = Clock()
    judge = Sometimes(lambda c: ["value:o"] if c.Lk > 4 else [], clock)
    failure = hunt(judge, examples=30, clock=clock, policy=Policy(shrink_seconds=1e6)).failures[0]
    assert not failure.shrunk and failure.reason.startswith("it fails 0 of 2 times")


def test_a_worker_that_dies_ends_the_shrink_with_that_reason() -> None:
    class Dying(SlowJudge):
        def again(self, case: Case, thorough: bool = True) -> Verdict:
            if self.clock.now > 45:
                return Verdict(case, "infrastructure", execution=Execution("infrastructure", message="no memory"))
            return super().again(case)

    clock = Clock()
    failure = hunt(Dying(three, clock), examples=40, clock=clock, policy=Policy(shrink_seconds=1e6)).failures[0]
    assert (failure.shrunk, failure.reason) == (False, "the worker died: no memory")


def test_a_hunt_that_stops_early_says_why() -> None:
    clock = Clock()
    campaign = hunt(SlowJudge(three, clock), seconds=500.0, clock=clock, policy=Policy(distinct=1, probes=0))
    assert campaign.stopped == "failure"
    assert "stopped after 3 distinct failures, 11 s brought no other; --seed 1" in " ".join(summary(campaign).split())


def test_a_spared_share_goes_to_the_others() -> None:
    clock = Clock()
    time = Allowance(30.0, clock)
    assert time.share(3) == 10.0
    clock.now = 2.0
    assert time.share(2) == 14.0
    clock.now = 29.0
    time.extend(0.5)
    assert time.until == 29.5 and not Allowance(0.0, clock).in_time


@pytest.mark.parametrize(("drawn", "want"), [(None, 20.0), (6.0, 10.0), (60.0, 30.0), (900.0, 60.0)])
def test_studying_takes_half_of_drawing_by_default(drawn: float | None, want: float) -> None:
    assert default_seconds(drawn) == want


@pytest.mark.parametrize(("slowest", "want"), [(0.01, SHORTEST), (0.5, 2.0), (4.0, LONGEST), (9.0, 9.0)])
def test_a_hang_is_awaited_as_long_as_right_answers_need(slowest: float, want: float) -> None:
    assert patience(slowest) == want


def test_a_deadline_is_never_lengthened() -> None:
    runner = type("Runner", (), {"deadline": 0.5})()
    with hurried(runner, 9.0):
        assert runner.deadline == 0.5
    with hurried(runner, 0.1):
        assert runner.deadline == 0.1
    assert runner.deadline == 0.5
