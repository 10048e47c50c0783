"""A hunt records every failure, shrinks each distinct one, and returns what it has at any interruption."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from flashproof.fuzz.case import Case
from flashproof.fuzz.engine import hunt
from flashproof.fuzz.execute import Execution
from flashproof.fuzz.found import Campaign, Event, Failure, Policy, blind_because, verdict_and_exit_code
from flashproof.fuzz.generate import drawn
from flashproof.fuzz.judge import Verdict
from flashproof.fuzz.learn import Count
from flashproof.fuzz.masks import Causal
from flashproof.fuzz.region import Region
from flashproof.fuzz.strategies import cases
from flashproof.oracles.finding import Finding

Keys = Callable[[Case], Iterable[str]]


class Runner:
    """A runner that has processes to restart."""

    def __init__(self) -> None:
        self.info: dict[str, Any] = {"target": "fake"}
        self.restarts = 0

    def restart(self) -> None:
        self.restarts += 1


class FakeJudge:
    """Fails with the keys that a function of the case names, refuses what another says, and remembers what ran."""

    def __init__(
        self, keys: Keys = lambda _: (), refuses: Callable[[Case], str] = lambda _: "", region: Region | None = None
    ) -> None:
        self.keys, self.refuses, self.region = keys, refuses, region
        self.runner: Any = Runner()
        self.ran: list[Case] = []
        self.known: dict[tuple[str, bool], Verdict] = {}

    def check(self, case: Case, thorough: bool = False, *, explain: bool = True) -> Verdict:
        at = (case.key, thorough)
        if at not in self.known:
            self.known[at] = self.again(case, thorough)
        return self.known[at]

    def again(self, case: Case, thorough: bool = True) -> Verdict:
        self.ran.append(case)
        if self.refuses(case):
            return Verdict(case, "refused", execution=Execution("refused", message=self.refuses(case)))
        found = tuple(Finding(*key.split(":"), message="wrong") for key in self.keys(case))
        return Verdict(case, "fail" if found else "pass", found, execution=Execution("ok"))

    def restart(self) -> None:
        self.runner.restart()


def when(condition: Callable[[Case], bool], key: str = "value:o") -> Keys:
    return lambda case: [key] if condition(case) else []


def tail(case: Case) -> bool:
    return case.Lk > 16 and case.Lk % 16 != 0


def test_the_same_seed_judges_the_same_cases() -> None:
    first, second = FakeJudge(), FakeJudge()
    hunt(first, examples=80, seed=5)
    hunt(second, examples=80, seed=5)
    assert [c.key for c in first.ran] == [c.key for c in second.ran]


def test_another_seed_judges_other_cases() -> None:
    assert drawn(cases(), 20, 1) != drawn(cases(), 20, 2)


@pytest.mark.parametrize("examples", [1, 7, 50])
def test_examples_are_counted_exactly_and_never_repeated(examples: int) -> None:
    judge = FakeJudge()
    campaign = hunt(judge, examples=examples)
    assert campaign.cases == len(judge.ran) == len({c.key for c in judge.ran}) == examples
    assert campaign.stopped == "examples"


def test_the_first_case_is_the_simplest() -> None:
    judge = FakeJudge()
    hunt(judge, examples=1)
    assert judge.ran[0] == Case()


def test_seconds_end_a_hunt() -> None:
    ticks = itertools.count(0.0, 0.01)
    campaign = hunt(FakeJudge(), seconds=2.0, clock=lambda: next(ticks))
    assert campaign.stopped == "seconds"
    assert 10 < campaign.cases < 200


def test_a_strategy_with_few_cases_is_exhausted() -> None:
    campaign = hunt(FakeJudge(), examples=50, strategy=lambda _: st.sampled_from([Case(), Case(Lk=2), Case(Lk=3)]))
    assert (campaign.stopped, campaign.cases) == ("exhausted", 3)


def test_a_loaded_profile_changes_nothing() -> None:
    before = drawn(cases(), 30, 9)
    settings.register_profile("other", derandomize=True, max_examples=3, database=None)
    loaded = settings.get_current_profile_name()
    try:
        settings.load_profile("other")
        assert drawn(cases(), 30, 9) == before
    finally:
        settings.load_profile(loaded)


def test_constants_in_a_users_modules_do_not_change_the_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    floats = st.floats(0.5, 8.0).map(lambda x: Case(softcap=x))
    before = drawn(cases(), 30, 9), drawn(floats, 30, 9)
    providers = hypothesis.internal.conjecture.providers
    monkeypatch.setattr(
        providers, "_get_local_constants", lambda: pytest.fail("looked at the modules that are imported"), raising=False
    )
    assert (drawn(cases(), 30, 9), drawn(floats, 30, 9)) == before


def test_a_failure_is_recorded_and_shrunk() -> None:
    campaign = hunt(FakeJudge(when(tail)), examples=300)
    assert [(f.key, f.case) for f in campaign.failures] == [("value:o", Case(Lk=17, requires_grad=""))]
    assert campaign.failures[0].shrunk


def test_a_hunt_goes_on_for_a_while_after_the_first_failure() -> None:
    judge = FakeJudge(when(lambda _: True))
    campaign = hunt(judge, examples=1000)
    assert campaign.cases_to_first_failure == 1
    assert (campaign.cases, campaign.stopped) == (26, "failure")


def test_a_second_failure_prolongs_the_search() -> None:
    judge = FakeJudge(lambda c: ["value:o", *(["value:dq"] if len(judge.ran) == 20 else [])])
    campaign = hunt(judge, examples=1000, policy=Policy(probes=0, again=0))
    assert campaign.cases == 20 + 25


def test_distinct_failures_are_kept_apart_and_each_is_shrunk() -> None:
    def keys(case: Case) -> list[str]:
        return [
            *(["value:o"] if tail(case) else []),
            *(["value:dk"] if case.G > 1 and "k" in case.requires_grad else []),
        ]

    campaign = hunt(FakeJudge(keys), examples=400)
    assert {f.key: f.case for f in campaign.failures} == {
        "value:o": Case(Lk=17, requires_grad=""),
        "value:dk": Case(Hq=2, requires_grad="k"),
    }


def test_a_failure_that_comes_up_while_shrinking_is_reported_too() -> None:
    def keys(case: Case) -> list[str]:
        return (
            ["crash:call"]
            if case.Lk == 17 and case.B == case.Lq == case.Hq == case.D == 1
            else ["value:o"]
            if tail(case)
            else []
        )

    assert {f.key for f in hunt(FakeJudge(keys), examples=300).failures} == {"value:o", "crash:call"}


def test_failures_beyond_the_cap_are_counted() -> None:
    judge = FakeJudge(lambda _: [f"value:t{n}" for n in range(11)])
    campaign = hunt(judge, examples=30)
    assert (len(campaign.failures), len(campaign.unshrunk)) == (8, 3)


def test_a_gradient_that_is_wrong_behind_a_wrong_forward_says_so() -> None:
    campaign = hunt(FakeJudge(lambda c: ["value:o", *(["value:dq"] if "q" in c.requires_grad else [])]), examples=30)
    assert [(f.key, f.behind) for f in campaign.failures] == [("value:o", ""), ("value:dq", "value:o")]


def test_warnings_are_no_failures() -> None:
    class Warns(FakeJudge):
        def again(self, case: Case, thorough: bool = True) -> Verdict:
            return Verdict(
                case, "pass", (Finding("statistical", "o", "large", severity="warning"),), execution=Execution("ok")
            )

    campaign = hunt(Warns(), examples=20)
    assert (campaign.failures, campaign.warnings["statistical o"]) == ([], 20)


def interrupting(after: int, keys: Keys) -> FakeJudge:
    """A judge whose user presses Ctrl-C when `after` cases ran."""

    class Interrupted(FakeJudge):
        def again(self, case: Case, thorough: bool = True) -> Verdict:
            if len(self.ran) == after:
                raise KeyboardInterrupt
            return super().again(case, thorough)

    return Interrupted(keys)


def test_ctrl_c_while_searching_returns_what_was_counted() -> None:
    campaign = hunt(interrupting(40, when(lambda _: False)), examples=1000)
    assert (campaign.stopped, campaign.cases) == ("interrupted", 40)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.8, 0.99])
def test_ctrl_c_at_any_moment_keeps_a_failure_that_was_found(share: float) -> None:
    whole = FakeJudge(when(lambda c: c.Lk > 5))
    hunt(whole, examples=1000)
    campaign = hunt(interrupting(int(share * len(whole.ran)), whole.keys), examples=1000)
    assert campaign.stopped == "interrupted"
    assert [f.key for f in campaign.failures] == ["value:o"]
    assert campaign.failures[0].case.Lk > 5


def test_ctrl_c_while_shrinking_keeps_the_smallest_case_so_far() -> None:
    whole = hunt(FakeJudge(when(tail)), examples=300)
    search = FakeJudge(when(tail))
    hunt(search, examples=300, policy=Policy(probes=0, again=0))
    half = hunt(interrupting(len(search.ran) + 3, when(tail)), examples=300)
    assert tail(half.failures[0].case)
    assert not half.failures[0].shrunk
    assert half.failures[0].case != whole.failures[0].case


def test_a_failure_that_comes_again_is_counted() -> None:
    failure = hunt(FakeJudge(when(tail)), examples=300).failures[0]
    assert (failure.reproduced, failure.fresh, failure.preceding) == ((3, 3), True, ())


def test_a_failure_that_never_comes_again_is_reported_with_that() -> None:
    class Once(FakeJudge):
        def again(self, case: Case, thorough: bool = True) -> Verdict:
            first = self.ran.count(case) == 0 and self.runner.restarts == 0
            return super().again(case, thorough) if first else Verdict(case, "pass", execution=Execution("ok"))

    failure = hunt(Once(when(lambda c: c.Lk > 3)), examples=60).failures[0]
    assert failure.reproduced == (0, 3)
    assert failure.fresh is False


class Stateful(FakeJudge):
    """Fails on more than three queries once a case with bfloat16 ran in the same process."""

    def __init__(self) -> None:
        super().__init__()
        self.poisoned = False

    def again(self, case: Case, thorough: bool = True) -> Verdict:
        self.poisoned |= case.dtype == "bfloat16"
        self.keys = when(lambda c: self.poisoned and c.Lq > 3)
        return super().again(case, thorough)

    def restart(self) -> None:
        super().restart()
        self.poisoned = False


def test_a_failure_that_depends_on_earlier_calls_carries_the_fewest_of_them() -> None:
    failure = hunt(Stateful(), examples=200).failures[0]
    assert failure.case.but(dtype="float32", seed=0) == Case(Lq=4, requires_grad="")
    assert [c.but(seed=0) for c in failure.preceding] == [Case(dtype="bfloat16", requires_grad="")]


def test_a_judge_without_processes_is_asked_again_in_this_one() -> None:
    judge = FakeJudge(when(tail))
    judge.runner = type("InProcess", (), {"info": {}})()
    failure = hunt(judge, examples=300).failures[0]
    assert (failure.reproduced, failure.fresh) == ((2, 2), None)


def test_passing_neighbours_are_told() -> None:
    failure = hunt(FakeJudge(when(tail)), examples=300).failures[0]
    assert [n.words for n in failure.nearest] == ["Lk = 16 passes, 17 fails, 32 passes"]


def test_a_hang_is_shrunk_with_few_runs_that_hang() -> None:
    judge = FakeJudge(when(tail, "hang:call"))
    failure = hunt(judge, examples=300, policy=Policy(slow_probes=5)).failures[0]
    assert failure.reason == "5 runs hung" and not failure.shrunk


def test_an_exact_finding_is_shrunk_with_thorough_runs() -> None:
    class OnlyThorough(FakeJudge):
        def again(self, case: Case, thorough: bool = True) -> Verdict:
            self.keys = when(lambda c: c.Lk > 4 and (thorough or c.seed % 4 == 3), "exact:o")
            return super().again(case, thorough)

    assert hunt(OnlyThorough(), examples=300).failures[0].case == Case(Lk=5, requires_grad="")


def test_what_is_refused_is_drawn_no_more_but_for_a_few_probes() -> None:
    judge = FakeJudge(refuses=lambda c: "no bfloat16" if c.dtype == "bfloat16" else "")
    campaign = hunt(judge, examples=400)
    late = [c for c in judge.ran[200:] if c.dtype == "bfloat16"]
    assert campaign.learnt.dtypes == ("float32", "float16")
    assert 0 < len(late) < 30


def test_a_declared_region_is_not_narrowed_and_few_cases_lie_outside() -> None:
    region = Region(dtypes=("float32",), masks=("none",), gqa=False, bias=False, dropout=False)
    judge = FakeJudge(region=region, refuses=lambda c: "outside" if region.refuses(c) else "")
    campaign = hunt(judge, region, examples=200)
    assert 0 < campaign.outside == campaign.refused < 30
    assert campaign.declared == region


def test_a_lost_worker_ends_the_hunt() -> None:
    class Lost(FakeJudge):
        def again(self, case: Case, thorough: bool = True) -> Verdict:
            return Verdict(case, "infrastructure", execution=Execution("infrastructure", message="no memory"))

    campaign = hunt(Lost(), examples=100)
    assert (campaign.stopped, campaign.infrastructure, campaign.trouble) == ("infrastructure", 3, "no memory")
    assert verdict_and_exit_code(campaign) == ("error", 5)


def test_events_tell_a_new_failure_once_and_its_end() -> None:
    events: list[Event] = []
    hunt(FakeJudge(when(tail)), examples=300, on_event=events.append)
    kinds = [e.kind for e in events]
    assert [kinds.count(k) for k in ("found", "shrunk", "studied", "done")] == [1, 1, 1, 1]
    assert next(e for e in events if e.kind == "found").text == "value:o"


WIDE = Campaign(cases=400, accepted=390, refused=10, stopped="examples", examples=400)
FAILURE = Failure("value:o", Case(), Case(), Verdict(Case(), "fail"))


@pytest.mark.parametrize(
    ("campaign", "command", "want"),
    [
        (WIDE, "gate", ("pass", 0)),
        (WIDE, "fuzz", ("pass", 0)),
        (replace(WIDE, failures=[FAILURE]), "gate", ("fail", 1)),
        (replace(WIDE, unshrunk={"value:o": Case()}), "fuzz", ("fail", 1)),
        (replace(WIDE, accepted=199), "gate", ("blind", 4)),
        (replace(WIDE, accepted=199), "fuzz", ("pass", 0)),
        (replace(WIDE, accepted=0), "fuzz", ("blind", 4)),
        (replace(WIDE, accepted=201, refused=202), "gate", ("blind", 4)),
        (replace(WIDE, accepted=201, refused=202, outside=10), "gate", ("pass", 0)),
        (replace(WIDE, accepted=201, refused=0, inexpressible=600), "gate", ("pass", 0)),
        (replace(WIDE, examples=1000, stopped="seconds"), "gate", ("blind", 4)),
        (replace(WIDE, examples=1000, stopped="seconds"), "fuzz", ("pass", 0)),
        (replace(WIDE, stopped="infrastructure"), "gate", ("error", 5)),
        (replace(WIDE, stopped="infrastructure", accepted=0), "gate", ("error", 5)),
        (replace(WIDE, stopped="infrastructure", failures=[FAILURE], accepted=0), "gate", ("fail", 1)),
    ],
)
def test_the_exit_code_is_the_gravest_that_holds(campaign: Campaign, command: str, want: tuple[str, int]) -> None:
    assert verdict_and_exit_code(campaign, command) == want


def test_a_declared_kind_that_no_accepted_case_had_makes_a_gate_blind() -> None:
    region = Region(dtypes=("float32",), masks=("none", "window"))
    names = ["float32", "mask none", "mask window", "several query heads per key head", "Lq other than Lk", "Dv other than D", "backward",
             "bias", "gradient of the bias", "scale", "scale of 0 or below", "softcap",
             "dropout", "gradient through lse", "layouts", "length 0", "ALiBi", "sinks", "gradient of the sinks"]  # fmt: skip
    by_kind = {name: Count(accepted=5) for name in names}
    assert blind_because(replace(WIDE, declared=region, by_kind=by_kind), "gate") == []
    by_kind["mask window"] = Count(refused=3)
    assert blind_because(replace(WIDE, declared=region, by_kind=by_kind), "gate") == [
        "no case with mask window was accepted, though the region declares it"
    ]


def test_a_mask_that_is_needed_stays_in_the_shrunk_case() -> None:
    campaign = hunt(FakeJudge(when(lambda c: c.mask == Causal() and c.Lq > 1)), examples=300)
    assert campaign.failures[0].case == Case(mask=Causal(), Lq=2, requires_grad="")
