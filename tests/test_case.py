import json

import pytest
from hypothesis import given

from flashproof.fuzz import masks
from flashproof.fuzz.case import SCHEMA, SIZES, Case, case_from_json
from flashproof.fuzz.masks import And, Causal, Full, Not, Padding, Window
from flashproof.fuzz.strategies import cases


@given(cases())
def test_json_gives_the_same_case_back(case):
    assert case_from_json(json.loads(json.dumps(case.to_json(), allow_nan=False))) == case


@given(cases())
def test_json_text_is_accepted_too(case):
    assert case_from_json(case.key) == case


@given(cases(), cases())
def test_cases_are_equal_exactly_when_their_keys_are(one, other):
    assert (one == other) == (one.key == other.key)


def test_equal_numbers_of_other_types_give_the_same_key():
    assert Case(softcap=30, scale=-0.0, dropout=0).key == Case(softcap=30.0, scale=0.0).key


def test_json_names_sizes_and_what_differs_from_the_default_only():
    assert set(Case(softcap=5.0).to_json()) == {"schema", *SIZES, "dtype", "seed", "softcap"}


def test_a_case_prints_as_the_python_that_makes_it():
    case = Case(Lk=17, mask=Causal(), softcap=5)
    assert repr(case) == "Case(Lk=17, mask=Causal(align='top_left'), softcap=5.0)" and repr(Case()) == "Case()"


@given(cases())
def test_evaluating_what_a_case_prints_gives_it_back(case):
    assert eval(repr(case), vars(masks) | {"Case": Case}) == case  # noqa: S307 (our own text)


def test_the_default_case_is_the_simplest():
    assert {getattr(Case(), name) for name in SIZES} == {1}


def test_default_scale_is_one_over_the_root_of_the_width():
    assert Case(D=16).resolved_scale == 0.25


MALFORMED = {
    "Hq": [0, -1, 1.0, "2", True, None],
    "Hkv": [0, 2, "1", None],
    "Lq": [-1, 0.5, None, [1]],
    "Lk": [-1, "7"],
    "B": [-1, 1.5],
    "D": [0, None],
    "Dv": [0, {}],
    "seed": [-1, 0.1, "x"],
    "dtype": ["float8", "", None, 32],
    "mask": [None, "causal", [], {"kind": "diagonal"}, {"kind": ["full"]}, {}],
    "mask_form": ["dense", None],
    "mask_fill": [0, "inf"],
    "mask_axes": ["qb", "qq", "x", None, ["q"]],
    "bias": ["strong", None, 1],
    "bias_axes": ["kq", 3],
    "scale": ["1", float("nan"), float("inf"), 10**400, True],
    "softcap": [-1.0, float("nan"), None, "5"],
    "dropout": [1.0, -0.1, None, True],
    "data": ["gauss", None],
    "grad": ["random", 1],
    "lse_grad": [1, "true", None],
    "requires_grad": ["vq", "x", None, ["q"]],
    "layout_q": ["bhld", None],
    "layout_k": ["", 0],
    "layout_v": ["bhld"],
    "layout_do": ["bhld"],
    "layout_mask": ["bhld"],
    "sequence": ["twice", None],
    "alibi": ["steep", None, 1],
    "sinks": ["inf", None, 0],
    "mode": ["eager", None],
}


def test_every_field_has_malformed_values_in_the_table():
    assert set(MALFORMED) == set(Case.__dataclass_fields__)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in MALFORMED.items() for value in values])
def test_a_malformed_field_is_named(name, value):
    with pytest.raises(
        ValueError, match=r"mask (kind )?must" if name == "mask" else rf"case field {name} must .*got {name}="
    ):
        case_from_json({"schema": SCHEMA, name: value})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", "case must be JSON"),
        ("[1]", "case must be a JSON object, got list"),
        (None, "case must be a JSON object, got NoneType"),
        ({}, "case schema must be 1 .* got schema=None"),
        ({"schema": SCHEMA + 1}, f"got schema={SCHEMA + 1}"),
        ({"schema": SCHEMA, "heads": 2}, "only the fields .*Hkv.*got 'heads'"),
        ("[" * 100_000, "case must be JSON"),
    ],
)
def test_what_is_no_case_gets_one_clear_sentence(data, message):
    with pytest.raises(ValueError, match=message):
        case_from_json(data)


@pytest.mark.parametrize("sequence", ["scale", "mask", "layout", "values", "refill"])
@given(case=cases(without=["sequence"]))
def test_the_middle_call_of_a_sequence_differs_and_has_the_same_shapes(sequence, case):
    middle = case.but(sequence=sequence).varied()
    assert middle != case.but(sequence=sequence)
    assert all(getattr(middle, name) == getattr(case, name) for name in SIZES)


def test_the_middle_call_of_a_masked_case_has_no_mask():
    case = Case(mask=And(Causal(), Padding((1,))), sequence="mask")
    assert case.varied().mask == Full()


def test_the_middle_call_of_an_unmasked_case_is_causal():
    assert Case(sequence="mask").varied().mask == Causal()


def test_a_mask_inside_a_mask_survives_json():
    case = Case(mask=Not(And(Window(3, 0, "bottom_right"), Padding((2, 0)))))
    assert case_from_json(case.key).mask == case.mask
