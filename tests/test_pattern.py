"""Patterns and factors are told in words, and only when every wrong element fits them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flashproof.fuzz.case import Case
from flashproof.fuzz.masks import Causal, Full, Padding
from flashproof.fuzz.pattern import explain, factor, pattern, span, where

CASE = Case(B=2, Hq=4, Hkv=2, Lq=40, Lk=70, D=16, Dv=16)
SHAPES = {"o": (2, 4, 40, 16), "lse": (2, 4, 40), "dq": (2, 4, 40, 16), "dk": (2, 2, 70, 16), "dv": (2, 2, 70, 16)}


def wrong_at(tensor: str, *index: object) -> Tensor:
    mask = torch.zeros(SHAPES[tensor], dtype=torch.bool)
    mask[index] = True
    return mask


def told(**wrong: Tensor) -> str:
    return pattern(CASE, wrong, SHAPES)


def values(tensor: str) -> Tensor:
    n = math.prod(SHAPES[tensor])
    return torch.cos(torch.arange(n, dtype=torch.float64) * 0.7 + 0.1).view(SHAPES[tensor])


def test_a_wrong_last_key_tile_of_some_heads_is_told_with_the_forward_right() -> None:
    text = told(dk=wrong_at("dk", slice(None), slice(1, None), slice(64, None)))
    assert (
        text
        == "forward right; dk wrong in the last key tile (keys 64..69, tile 64 or a divisor) of kv head 1; dq and dv right"
    )


def test_several_kv_heads_are_told_as_a_bound() -> None:
    mask = torch.zeros(1, 4, 8, 2, dtype=torch.bool)
    mask[:, 1:] = True
    assert where(CASE, "dk", mask) == "in kv heads >= 1"


def test_all_elements_are_told_as_everywhere() -> None:
    assert told(o=wrong_at("o", slice(None)), lse=wrong_at("lse", slice(None))).startswith("o and lse wrong everywhere")


def test_one_batch_is_told() -> None:
    assert "o wrong in batch 1;" in told(o=wrong_at("o", 1))


def test_the_last_column_is_told() -> None:
    assert "dv wrong in the last column (15);" in told(dv=wrong_at("dv", ..., -1))


def test_rows_from_a_tile_on_are_told() -> None:
    assert "o wrong in rows >= 16;" in told(o=wrong_at("o", slice(None), slice(None), slice(16, None)))


def test_a_tile_in_the_middle_is_told_with_its_size() -> None:
    assert "dk wrong in keys 16..31, tile 16 or a divisor;" in told(
        dk=wrong_at("dk", slice(None), slice(None), slice(16, 32))
    )


def test_every_other_column_is_told() -> None:
    assert "every 2nd column from 1 on" in told(o=wrong_at("o", ..., slice(1, None, 2)))


def test_scattered_elements_are_told_with_their_count() -> None:
    mask = wrong_at("o", 0, 0, 3, 5) | wrong_at("o", 1, 3, 9, 0) | wrong_at("o", 0, 2, 30, 11)
    assert "o wrong at 3 of 54 elements in" in told(o=mask)


def test_nothing_wrong_is_told_as_nothing() -> None:
    assert pattern(CASE, {"o": torch.zeros(SHAPES["o"], dtype=torch.bool)}, SHAPES) == ""


def test_only_rows_without_an_allowed_key_are_told() -> None:
    case = CASE.but(mask=Causal("bottom_right"), Lq=70, Lk=40)
    mask = torch.zeros(2, 4, 70, 16, dtype=torch.bool)
    mask[:, :, :30] = True
    assert where(case, "o", mask) == "only in rows without an allowed key"


def test_only_keys_that_no_row_may_see_are_told() -> None:
    case = CASE.but(mask=Padding((50,)))
    assert (
        where(case, "dv", wrong_at("dv", slice(None), slice(None), slice(50, None)))
        == "only in keys that no row may see"
    )


def test_a_live_row_that_is_wrong_too_forbids_speaking_of_dead_rows() -> None:
    case = CASE.but(mask=Causal("bottom_right"), Lq=70, Lk=40)
    mask = torch.zeros(2, 4, 70, 16, dtype=torch.bool)
    mask[:, :, :31] = True
    assert "allowed" not in where(case, "o", mask)


@pytest.mark.parametrize(
    ("found", "n", "words"),
    [
        ([0, 1, 2], 3, ""),
        ([4], 9, "row 4"),
        ([8], 9, "the last row (8)"),
        ([0, 1, 2, 3], 9, "rows 0..3"),
        (list(range(8)), 20, "rows 0..7, tile 8 or a divisor"),
        ([5, 6, 7, 8], 9, "rows >= 5"),
        ([0, 3, 4], 9, "3 of 9 rows (0, 3, 4)"),
        ([0, 3, 6], 9, "every 3rd row from 0 on"),
        ([16], 17, "the last row (16)"),
    ],
)
def test_a_set_of_indices_is_told_in_words(found: list[int], n: int, words: str) -> None:
    assert span(found, n, "row") == words


@pytest.mark.parametrize(
    ("tensor", "times", "words"),
    [
        ("lse", 1 / math.log(2), "base 2"),
        ("lse", math.log(2), "ln 2 was applied twice"),
        ("dk", 0.25, "scale is applied once too often"),
        ("dk", 4.0, "scale is missing"),
        ("dv", 2.0, "G, the heads of a group"),
        ("o", -1.0, "sign is flipped"),
        ("o", 1.7, "got is 1.7 times want"),
        ("dq", 1 / 70, "1/Lk"),
    ],
)
def test_a_constant_factor_is_named(tensor: str, times: float, words: str) -> None:
    want = values(tensor)
    assert words in factor(CASE, tensor, times * want, want, torch.ones_like(want, dtype=torch.bool))


def test_rounding_does_not_hide_a_factor() -> None:
    want = values("o")
    got = (-want).bfloat16()
    assert "sign" in factor(CASE, "o", got, want, torch.ones_like(want, dtype=torch.bool))


def test_one_element_that_does_not_fit_forbids_a_factor() -> None:
    want = values("o")
    got = 2 * want
    got[0, 0, 0, 0] = 9.0
    assert factor(CASE, "o", got, want, torch.ones_like(want, dtype=torch.bool)) == ""


def test_a_constant_difference_of_the_lse_is_named() -> None:
    want = values("lse")
    assert (
        factor(CASE, "lse", want + math.log(70), want, torch.ones_like(want, dtype=torch.bool))
        == "got is want + 4.248 (log Lk)"
    )


@pytest.mark.parametrize(("value", "name"), [(0.0, "zero"), (math.nan, "NaN"), (math.inf, "infinite")])
def test_one_value_in_all_wrong_elements_is_told(value: float, name: str) -> None:
    want, mask = values("dq"), wrong_at("dq", 1)
    got = torch.where(mask, torch.tensor(value, dtype=torch.float64), want)
    assert factor(CASE, "dq", got, want, mask) == f"got is {name} wherever it is wrong"


def test_a_missing_scale_is_not_claimed_where_the_scale_is_one() -> None:
    want = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    assert "scale" not in factor(Case(), "dk", 2 * want, want, want.bool())


def test_the_explanation_joins_place_and_factor() -> None:
    want = {t: values(t) for t in SHAPES}
    wrong = {"lse": torch.ones(SHAPES["lse"], dtype=torch.bool)}
    text = explain(CASE.but(mask=Full()), wrong, want | {"lse": want["lse"] / math.log(2)}, want)
    assert text.startswith(
        "lse wrong everywhere; o, dq, dk and dv right; lse: got is 1.443 times want: it looks like base 2"
    )


def test_a_factor_of_one_explains_nothing() -> None:
    want = torch.linspace(1, 2, 24, dtype=torch.float64).reshape(1, 2, 3, 4)
    assert factor(CASE, "o", want * 1.005, want, torch.ones_like(want, dtype=torch.bool)) == ""


@pytest.mark.parametrize(
    ("dtype", "times", "n", "words"),
    [
        ("float32", 0.5001, 40, "got is 0.5001 times want"),  # not within the rounding of float32
        ("float32", 1 / 8, 40, "got is 0.125 times want: 1/D"),
        ("bfloat16", 0.1252, 40, "got is 0.1252 times want: 1/D"),
        ("float32", 1 / 8, 2, ""),  # too few elements
        ("float32", 0.25, 40, "got is 0.25 times want"),  # 1/G and 1/Lk fit as well as each other
    ],
)
def test_a_factor_is_named_only_where_one_name_fits_many_elements(dtype: str, times: float, n: int, words: str) -> None:
    case = Case(D=8, Dv=8, Hq=4, Hkv=1, Lk=4, Lq=5, dtype=dtype)
    want = torch.linspace(1, 2, n, dtype=torch.float64).reshape(1, 1, n, 1)
    assert factor(case, "o", times * want, want, torch.ones_like(want, dtype=torch.bool)) == words
