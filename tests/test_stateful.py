"""A failure that needs earlier calls is stored with the fewest and simplest of them."""

from __future__ import annotations

from collections.abc import Sequence

from flashproof.fuzz.case import Case
from flashproof.fuzz.shrink import Budget
from flashproof.fuzz.stateful import after_another, as_sequence, preceding, together

CASE = Case(Lq=4, requires_grad="")
BEFORE = [Case(Lq=2, Lk=n, D=3, dtype="bfloat16" if n == 9 else "float32", seed=n) for n in range(1, 21)]


def after_bfloat16(run: Sequence[Case]) -> bool:
    return any(c.dtype == "bfloat16" for c in run[:-1]) and run[-1] == CASE


def test_the_one_case_that_matters_is_found_and_shrunk() -> None:
    assert preceding(CASE, BEFORE, after_bfloat16) == (Case(dtype="bfloat16", requires_grad=""),)


def test_two_cases_that_matter_together_are_both_kept() -> None:
    def fails(run: Sequence[Case]) -> bool:
        return {c.Lk for c in run[:-1]} >= {5, 12}

    found = preceding(CASE, BEFORE, fails, Budget(probes=500, seconds=60))
    assert [c.Lk for c in found] == [5, 12]


def test_a_second_call_of_the_same_case_is_tried_first() -> None:
    asked: list[Sequence[Case]] = []

    def fails(run: Sequence[Case]) -> bool:
        asked.append(run)
        return len(run) > 1

    preceding(CASE, BEFORE, fails)
    assert list(asked[0]) == [CASE, CASE]


def test_a_failure_that_no_history_explains_has_no_preceding_cases() -> None:
    assert preceding(CASE, BEFORE, lambda _: False) == ()


def test_processes_are_started_sparingly() -> None:
    asked: list[Sequence[Case]] = []

    def fails(run: Sequence[Case]) -> bool:
        asked.append(run)
        return after_bfloat16(run)

    found = preceding(CASE, BEFORE, fails, Budget(probes=13, seconds=60))
    assert len(asked) <= 13
    assert after_bfloat16([*found, CASE])


def test_a_call_sequence_is_preferred_where_one_shows_the_failure() -> None:
    case = Case(Lk=4, D=3, requires_grad="")
    found = as_sequence(case, lambda run: run[-1].sequence == "mask" and run[-1].Lk > 1)
    assert found == Case(Lk=2, requires_grad="", sequence="mask")


def test_a_failure_that_no_call_sequence_shows_has_none() -> None:
    assert as_sequence(CASE, lambda run: len(run) > 1) is None


def test_cases_before_shrink_together_with_the_case() -> None:
    def fails(run: Sequence[Case]) -> bool:
        return len(run) > 1 and run[0].Lk == run[-1].Lk >= 2 and run[0].dtype == "bfloat16"

    case, before = together(Case(Lk=9, D=3), [Case(Lk=9, D=3, dtype="bfloat16")], fails)
    assert (case, before) == (Case(Lk=2, requires_grad=""), (Case(Lk=2, dtype="bfloat16"),))


def test_a_cache_that_the_first_call_fills_is_shown_by_one_call_before() -> None:
    def fails(run: Sequence[Case]) -> bool:
        first, last = run[0], run[-1]
        return first.resolved_scale != last.resolved_scale and (first.Lq, first.D) == (last.Lq, last.D)

    assert after_another(CASE, fails) == (CASE.but(scale=0.5),)
    assert after_another(CASE, lambda _: False) == ()


def test_what_counts_calls_is_shown_by_calls_of_the_case_itself() -> None:
    found = preceding(CASE, BEFORE, lambda run: len(run) > 3 and set(run) == {CASE})
    assert found == (CASE, CASE, CASE)
