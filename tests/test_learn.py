"""The region a target serves is learnt from what it refuses, and only from refusals that nothing simpler explains."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flashproof.fuzz.case import Case
from flashproof.fuzz.generate import drawn
from flashproof.fuzz.learn import Learner, differences, kinds, unmeasured
from flashproof.fuzz.masks import Causal
from flashproof.fuzz.region import Region
from flashproof.fuzz.strategies import cases

CASES = drawn(cases(), 400, 1)


def learnt(refuses: Callable[[Case], bool]) -> Learner:
    learner = Learner(Region())
    for case in CASES:
        learner.add(case, "refused" if refuses(case) else "accepted")
    return learner


@pytest.mark.parametrize(
    ("refuses", "words"),
    [
        (lambda c: c.dtype == "bfloat16", ["no bfloat16"]),
        (lambda c: c.Hq != c.Hkv, ["no several query heads per key head"]),
        (lambda c: c.dtype == "bfloat16" or c.dropout > 0, ["no bfloat16", "no dropout"]),
        (lambda c: max(c.D, c.Dv) > 64, ["head dim up to 64"]),
        (lambda c: min(c.B, c.Lq, c.Lk) == 0, ["no length 0"]),
        (lambda c: bool(c.requires_grad), ["no backward"]),
        (lambda c: c.D % 8 != 0 or c.Dv % 8 != 0, ["head dims 8, 16, 24, ..., 256"]),
        (lambda _: False, []),
    ],
)
def test_the_region_is_what_explains_the_refusals(refuses: Callable[[Case], bool], words: list[str]) -> None:
    assert differences(learnt(refuses).region) == words


def test_a_refusal_by_luck_teaches_nothing() -> None:
    assert differences(learnt(lambda c: c.seed % 3 == 0).region) == []


def test_eleven_refusals_are_too_few() -> None:
    learner = Learner(Region())
    for n in range(11):
        learner.add(Case(mask=Causal(), seed=n), "refused")
    learner.add(Case(), "accepted")
    assert learner.region == Region()
    learner.add(Case(mask=Causal(), seed=11), "refused")
    assert "causal_top_left" not in learner.region.masks


def test_a_target_that_refuses_everything_leaves_something_to_draw() -> None:
    region = learnt(lambda _: True).region
    assert region.dtypes
    assert region.masks


def test_every_kind_is_served_by_the_widest_region_and_can_be_taken_out() -> None:
    whole = Region(dtypes=("float32", "float16", "bfloat16", "float64"))
    for kind in kinds():
        assert kind.served(whole), kind.name
        assert not kind.served(kind.without(whole)), kind.name


def test_the_table_counts_what_was_drawn() -> None:
    rows = {name: row for name, *row in learnt(lambda c: c.dropout > 0).table()}
    drawn_with = sum(c.dropout > 0 for c in CASES)
    assert rows["dropout"] == [0, drawn_with, 0]


def test_a_kind_that_the_dialect_cannot_say_is_not_unmeasured() -> None:
    learner = Learner(Region())
    for n in range(20):
        learner.add(Case(softcap=1.0, seed=n), "inexpressible")
        learner.add(Case(dropout=0.5, seed=n), "refused")
    names = unmeasured(learner.by_kind, Region())
    assert "dropout" in names
    assert "softcap" not in names
