"""A case is told in a sentence that says what differs from the simplest case."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from flashproof.fuzz.case import Case, case_from_json
from flashproof.fuzz.generate import drawn
from flashproof.fuzz.masks import KINDS, And, Causal, Full, Not, Or, Padding, Window
from flashproof.fuzz.strategies import cases
from flashproof.fuzz.words import mask_words, sentence


def test_the_simplest_case_is_its_sizes() -> None:
    assert sentence(Case()) == "float32, B = Hq = Lq = Lk = D = 1"


def test_a_last_key_tile_reads_as_a_person_would_write_it() -> None:
    assert sentence(Case(Lk=17, requires_grad="")) == "float32, B = Hq = Lq = D = 1, Lk = 17; forward only"


def test_equal_lengths_are_said_once() -> None:
    assert sentence(Case(Lq=2, Lk=2)) == "float32, B = Hq = D = 1, Lq = Lk = 2"


def test_key_heads_and_value_width_are_said_where_they_differ() -> None:
    assert sentence(Case(Hq=4, Hkv=2, D=3, Dv=1)) == "float32, B = Lq = Lk = Dv = 1, Hq = 4, Hkv = 2, D = 3"


def test_a_window_is_told_with_its_corner() -> None:
    assert mask_words(Window(3, -1, "bottom_right")) == "window of 3 back and any number ahead (bottom-right)"


def test_composed_masks_are_told_in_brackets() -> None:
    mask = Or(And(Causal(), Padding((3, 0))), Not(Full()))
    assert mask_words(mask) == "((causal (top-left)) and (padding to 3, 0 keys)) or (not (every key allowed))"


OTHER: dict[str, Any] = {
    "B": 2, "Hq": 3, "Hkv": 1, "Lq": 5, "Lk": 6, "D": 7, "Dv": 8, "dtype": "float16", "mask": Causal(), "mask_form": "bool",
    "bias": "large", "scale": 0.5, "softcap": 3.0, "dropout": 0.5, "data": "heavy", "grad": "zero", "lse_grad": True,
    "requires_grad": "q", "layout_q": "blhd", "layout_k": "packed", "layout_v": "chunk", "layout_do": "expand",
    "layout_mask": "offset", "sequence": "scale", "seed": 9, "mask_fill": "-1e4", "mask_axes": "bh", "bias_axes": "q",
    "alibi": "standard", "sinks": "normal", "mode": "autocast",
}  # fmt: skip
NEEDS: dict[str, dict[str, Any]] = {
    "mask_fill": {"mask_form": "additive"},
    "mask_axes": {"mask_form": "bool"},
    "bias_axes": {"bias": "large"},
    "Hkv": {"Hq": 3, "Hkv": 3},
}


@pytest.mark.parametrize("name", [f.name for f in fields(Case)])
def test_every_field_shows_in_the_sentence(name: str) -> None:
    base = Case(**NEEDS.get(name, {}))
    assert sentence(base.but(**{name: OTHER[name]})) != sentence(base)


def test_different_cases_have_different_sentences() -> None:
    found = {c.key for c in drawn(cases(), 300, 2)}
    assert len({sentence(case_from_json(key)) for key in found}) == len(found)


def test_every_mask_kind_has_words() -> None:
    plain = {name: cls() for name, cls in KINDS.items() if name not in ("and", "or", "not")}
    assert all(mask_words(m) != name or name == "full" for name, m in plain.items())
