"""Failures are shown in the order that tells most, each under its cause; one that needs earlier calls is shrunk with them."""

from __future__ import annotations

from flashproof.fuzz.book import Book, Entry
from flashproof.fuzz.case import Case
from flashproof.fuzz.engine import hunt
from flashproof.fuzz.execute import Execution
from flashproof.fuzz.found import Campaign, Failure, Policy
from flashproof.fuzz.judge import Verdict
from flashproof.fuzz.order import arranged
from flashproof.fuzz.study import Study
from flashproof.oracles.finding import Finding


def failure(case: Case, *keys: str, **more: object) -> Failure:
    findings = tuple(Finding(*key.split(":"), message="wrong") for key in keys)
    return Failure(keys[0], case, case, Verdict(case, "fail", findings), **more)  # type: ignore[arg-type]


def order(*failures: Failure) -> list[tuple[str, str]]:
    return [(f.key, f.behind) for f in arranged(failures)]


def test_wrong_values_of_outputs_come_before_those_of_gradients() -> None:
    assert [k for k, _ in order(failure(Case(), "value:dq"), failure(Case(Lk=2), "value:o"))] == ["value:o", "value:dq"]


def test_what_a_second_run_shows_comes_last() -> None:
    found = order(failure(Case(), "repeat:o"), failure(Case(Lk=2), "value:dk"))
    assert found[0] == ("value:dk", "")


def test_a_consequence_follows_its_cause_whichever_was_studied_first() -> None:
    found = order(
        failure(Case(), "value:dq", "value:o"), failure(Case(Lk=2), "nonfinite:dv"), failure(Case(), "value:o")
    )
    assert found == [("value:o", ""), ("value:dq", "value:o"), ("nonfinite:dv", "")]


def test_what_fails_only_in_a_used_process_stays_behind_the_leak() -> None:
    leaked = failure(Case(D=2), "value:dk", behind="value:o", fresh=False)
    assert order(leaked, failure(Case(), "value:o")) == [("value:o", ""), ("value:dk", "value:o")]


class Process:
    """A runner that forgets at every restart the sizes that it was called with in bfloat16."""

    def __init__(self) -> None:
        self.info: dict[str, str] = {}
        self.tainted: set[int] = set()

    def restart(self) -> None:
        self.tainted.clear()


class LeakyJudge:
    """A case with several keys fails where a bfloat16 case with as many ran before in the same process."""

    region = None

    def __init__(self) -> None:
        self.runner = Process()
        self.known: dict[str, Verdict] = {}

    def check(self, case: Case, thorough: bool = False, *, explain: bool = True) -> Verdict:
        if case.key not in self.known:
            self.known[case.key] = self.again(case)
        return self.known[case.key]

    def again(self, case: Case, thorough: bool = True) -> Verdict:
        fails = case.dtype == "float32" and case.Lk > 1 and case.Lk in self.runner.tainted
        self.runner.tainted |= {case.Lk} if case.dtype == "bfloat16" else set()
        tensors = ["o", *(f"d{g}" for g in case.requires_grad if g in "qkv")] if fails else []
        found = tuple(Finding("value", t, "wrong") for t in tensors)
        return Verdict(case, "fail" if found else "pass", found, execution=Execution("ok"))

    def restart(self) -> None:
        self.runner.restart()


def leak() -> Campaign:
    return hunt(LeakyJudge(), examples=300, seed=1)


def test_a_leak_between_calls_ends_at_two_small_cases() -> None:
    first = leak().failures[0]
    assert (first.key, first.case, first.fresh) == ("value:o", Case(Lk=2, requires_grad=""), False)
    assert [(c.Lk, c.dtype) for c in first.preceding] == [(2, "bfloat16")]


def test_what_else_a_leak_breaks_is_told_with_the_same_calls() -> None:
    first, *others = leak().failures
    assert others
    assert all((f.behind, f.preceding) == ("value:o", first.preceding) for f in others)


def test_memory_that_was_written_to_comes_before_wrong_values() -> None:
    for first in ("purity:k", "guard:workspace"):
        assert order(failure(Case(), "value:o"), failure(Case(Lk=2), first))[0] == (first, "")


def test_what_fails_only_where_an_input_is_changed_is_entered_under_its_cause() -> None:
    found = [Finding(*k.split(":"), "wrong") for k in ("value:o", "purity:k")]
    book = Book(None)  # type: ignore[arg-type] # asked nothing here
    for finding in found:
        entry = Verdict(Case(), "fail", tuple(found))
        book.found[finding.key] = Entry(entry, entry, 1, frozenset(entry.keys))
    campaign = Campaign(failures=[failure(Case(), "purity:k")])
    Study(book, campaign, Policy(), lambda *_, **__: None, lambda: 0.0).rest()
    assert campaign.caused == {"value:o": "purity:k"}
