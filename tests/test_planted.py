"""Planted bugs: each is caught at its stated case by its stated oracle, and the correct implementation passes there."""

import pytest

from flashproof.fuzz.execute import Runner
from flashproof.fuzz.judge import Judge
from flashproof.fuzz.shrink import Budget, shrink
from flashproof.impls import REGISTRY
from flashproof.impls.planted import PLANTED
from flashproof.impls.planted_edits import edited, whole

BUGS = pytest.mark.parametrize("bug", PLANTED.values(), ids=PLANTED)
STATELESS = pytest.mark.parametrize("bug", [p for n, p in PLANTED.items() if n != "stale_scale"], ids=lambda p: p.name)


def judge(target):
    declared = REGISTRY[target]
    return Judge(Runner(target), declared.contract, declared.supports)


@BUGS
def test_the_stated_oracle_catches_the_bug_at_the_stated_case(bug):
    verdict = judge(bug.target).check(bug.minimal)
    assert f"{bug.oracle}:{bug.tensor}" in verdict.keys, (verdict.status, [str(f) for f in verdict.findings])


@BUGS
def test_the_correct_implementation_passes_the_stated_case(bug):
    verdict = judge(whole(bug.part)).check(bug.minimal)
    assert verdict.status == "pass", [str(f) for f in verdict.failures]


@pytest.mark.slow
@STATELESS
def test_a_larger_failing_case_shrinks_to_the_stated_one(bug):
    one, key = judge(bug.target), f"{bug.oracle}:{bug.tensor}"
    wanted = bug.minimal
    grown = (wanted.but(B=wanted.B + 1, D=wanted.D + 2, layout_v="blhd", seed=seed) for seed in range(1, 20))
    start = next(case for case in grown if key in one.check(case).keys)
    found = shrink(start, lambda case: key in one.check(case).keys, Budget(probes=2000, seconds=60))
    assert found.but(seed=0) == wanted


@BUGS
def test_the_names_of_a_bug_agree(bug):
    assert REGISTRY[bug.target].summary == f"planted bug: {bug.story}" and bug.source


def test_an_edit_of_text_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="replace a text that occurs once, got 0 of 'no such text'"):
        edited("blockwise", (("no such text", ""),), "none")


def test_an_edited_copy_leaves_the_registered_implementation_alone():
    clean = REGISTRY["blockwise"].call
    edited("blockwise", (("BR, BC = 64, 16", "BR, BC = 8, 8"),), "tiles_of_8")
    assert REGISTRY["blockwise"].call is clean
