"""Planted bugs: each is caught at its stated case by its stated oracle, and the correct implementation passes there."""

import json
import tomllib
from pathlib import Path

import pytest

from flashproof.fuzz.execute import Runner
from flashproof.fuzz.judge import Judge
from flashproof.impls import REGISTRY, planted
from flashproof.impls.planted import KINDS, PLANTED
from flashproof.impls.planted.edits import edited, whole

BUGS = pytest.mark.parametrize("bug", PLANTED.values(), ids=PLANTED)
BUNDLED = Path(planted.__file__).with_name("reports.toml")
COLLECTION = Path(__file__).parents[2] / "shared" / "bugs" / "bugs.jsonl"


def judge(target):
    declared = REGISTRY[target]
    return Judge(Runner(target), declared.contract, declared.supports)


@BUGS
def test_the_stated_oracle_catches_the_bug_at_the_stated_case(bug):
    one = judge(bug.target)
    for case in bug.before:
        one.again(case, thorough=False)
    verdict = one.again(bug.minimal)
    assert bug.key in verdict.keys, (verdict.status, [str(f) for f in verdict.findings])


@BUGS
def test_the_correct_implementation_passes_the_stated_case(bug):
    verdict = judge(whole(bug.part)).check(bug.minimal)
    assert verdict.status == "pass", [str(f) for f in verdict.failures]


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


def test_the_table_is_as_large_and_as_wide_as_it_claims():
    triton = [b for b in PLANTED.values() if whole(b.part) == "triton_flash"]
    backward = KINDS["backward"]
    sizes = [len(PLANTED), len(triton), len(backward), len(KINDS["stateful"]), len(KINDS["wrappers"])]
    assert all(n >= least for n, least in zip(sizes, (80, 25, 15, 10, 5), strict=True)), sizes
    assert len(PLANTED) == sum(map(len, KINDS.values())), "two bugs of one name"
    assert all(b.story and b.source and b.trigger for b in PLANTED.values())


def test_every_public_report_is_planted_or_says_why_not():
    told = tomllib.loads(BUNDLED.read_text())
    ids = told.pop("ids")
    reasons = {name: why for part in told.values() for name, why in part.items()}
    covered = {name for b in PLANTED.values() for name in b.covers}
    assert not covered & set(reasons) and all(reasons.values())
    assert covered | set(reasons) == set(ids) and len(ids) == len(set(ids))


@pytest.mark.skipif(not COLLECTION.exists(), reason="the collection lies beside the checkout only where it is grown")
def test_the_ids_of_public_reports_are_those_of_the_collection():
    known = {json.loads(line)["id"] for line in COLLECTION.read_text().splitlines()}
    assert set(tomllib.loads(BUNDLED.read_text())["ids"]) == known
