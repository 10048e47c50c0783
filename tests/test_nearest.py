"""The cases next to a failing one that pass are told in words."""

from __future__ import annotations

from flashproof.fuzz.case import Case
from flashproof.fuzz.masks import Causal, Packed
from flashproof.fuzz.nearest import MOST, neighbours

FORWARD = Case(requires_grad="")


def words(case: Case, fails: object) -> list[str]:
    assert callable(fails)
    assert fails(case)
    return [n.words for n in neighbours(case, lambda c: not fails(c))]


def test_the_size_below_that_passes_is_told() -> None:
    assert words(FORWARD.but(Lk=101), lambda c: c.Lk > 100) == ["Lk = 100 passes, 101 fails"]


def test_a_whole_number_of_tiles_above_that_fails_is_not_told() -> None:
    assert words(FORWARD.but(Lk=65), lambda c: c.Lk > 64) == ["Lk = 64 passes, 65 fails"]


def test_a_whole_number_of_tiles_above_that_passes_is_told() -> None:
    assert words(FORWARD.but(Lk=65), lambda c: c.Lk > 64 and c.Lk % 64 > 0) == ["Lk = 64 passes, 65 fails, 128 passes"]


def test_packed_sequences_one_key_above_a_tile_have_no_size_twice_as_large() -> None:
    packed = FORWARD.but(Lq=4, Lk=33, mask=Packed((4,), (33,)))
    assert words(packed, lambda c: c.Lk > 32) == ["lengths_k = (32,) passes, (33,) fails"]


def test_a_feature_that_is_needed_is_told() -> None:
    assert words(FORWARD.but(softcap=1.0, dtype="float16"), lambda c: c.softcap > 0 and c.dtype == "float16") == [
        "float32 passes, float16 fails",
        "without softcap it passes",
    ]


def test_the_other_alignment_is_told() -> None:
    case = FORWARD.but(mask=Causal("bottom_right"), Lk=2)
    told = words(case, lambda c: c.mask == Causal("bottom_right") and c.Lq != c.Lk)
    assert told == ["Lk = 1 passes, 2 fails", "causal top-left passes", "without the mask it passes"]


def test_heads_are_told_with_their_ratio() -> None:
    told = words(FORWARD.but(Hq=4, Hkv=2), lambda c: c.Hkv > 1 and c.G > 1)
    assert told == ["Hkv = 1, Hq = 2 passes, Hkv = 2, Hq = 4 fails", "Hq = Hkv = 2 passes, Hq = 4 fails"]


def test_a_case_that_every_neighbour_fails_has_none() -> None:
    assert words(FORWARD.but(Lk=3, softcap=2.0), lambda _: True) == []


def test_an_empty_length_is_compared_with_one() -> None:
    assert words(FORWARD.but(Lk=0), lambda c: c.Lk == 0) == ["Lk = 1 passes, 0 fails"]


def test_few_neighbours_are_asked_about() -> None:
    asked: list[Case] = []
    busy = Case(B=2, Hq=6, Hkv=2, Lq=9, Lk=17, D=3, Dv=5, softcap=1.0, bias="large", data="heavy", mask=Causal())
    neighbours(busy, lambda c: bool(asked.append(c)))
    assert 8 <= len(asked) <= MOST
