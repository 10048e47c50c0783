import random
import time
from dataclasses import fields
from functools import lru_cache
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, Phase, find, given, seed, settings
from hypothesis import strategies as st

from flashproof.fuzz import ladders
from flashproof.fuzz.case import (
    ALIBI,
    BIAS,
    DATA,
    DTYPES,
    GRADS,
    LAYOUTS,
    MASK_FILLS,
    MASK_FORMS,
    MODES,
    SEQUENCES,
    SINKS,
    Case,
)
from flashproof.fuzz.masks import KINDS, And, Causal, Full, Not, Window
from flashproof.fuzz.region import MASKS, Region, mask_kind
from flashproof.fuzz.strategies import CHOICES, FEATURES, cases, decode, menu_of
from flashproof.fuzz.tensors import MAX_ORACLE_BYTES, oracle_bytes

SEEDS = (0, 1, 2, 3, 4)
EXAMPLES = 300


def drawn(strategy, run, examples=EXAMPLES):
    """What Hypothesis generates under a seed."""
    out = []

    @seed(run)
    @settings(
        max_examples=examples,
        database=None,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(case):
        out.append(case)

    collect()
    return out


def decoded(run, examples, region=Region(), features=FEATURES):  # noqa: B008 (frozen)
    """Cases of evenly random bytes, without Hypothesis, which is slower."""
    menu, bytes_of = menu_of(region, min(region.max_len, 300), features), random.Random(run).randbytes  # noqa: S311 (no secrets)
    return [decode(menu, bytes_of(len(CHOICES))) for _ in range(examples)]


@lru_cache
def default(run):
    return drawn(cases(), run)


def minimal(condition, strategy=None):
    budget = settings(max_examples=5000, database=None)
    return find(strategy or cases(), condition, settings=budget, random=random.Random(0))  # noqa: S311 (no secrets)


def subsets(letters):
    return {"".join(a for n, a in enumerate(letters) if bits >> n & 1) for bits in range(1 << len(letters))}


# Every kind of every axis

ALIGNED = {(kind, align) for kind in ("causal", "window", "prefix") for align in ("top_left", "bottom_right")}
COMPOSED = ("and", "or", "not")


def inner_kinds(case):
    return {m.kind for m in case.mask.walk()} - set(COMPOSED) if case.mask.kind in COMPOSED else set()


def scale_kind(case):
    if not case.scale:
        return "none" if case.scale is None else "zero"
    size = abs(case.scale)
    return "negative" if case.scale < 0 else "tiny" if size < 0.01 else "large" if size > 2 else "usual"


def one_storage(case):
    packed = (case.layout_q, case.layout_k, case.layout_v) == ("packed",) * 3
    return packed and case.Lq == case.Lk and case.D == case.Dv


def beside(c, times, distances):
    """(tile, n) where a length is n beside so many tiles."""
    return {(t, n - times * t) for n in (c.Lq, c.Lk) for t in ladders.TILES if n - times * t in distances}


LENGTHS = ("Lq", "Lk")
AXES = {
    "dtype": (lambda c: {c.dtype}, set(DTYPES) - {"float64"}),
    "data": (lambda c: {c.data}, set(DATA)),
    "grad": (lambda c: {c.grad}, set(GRADS)),
    "mask kind": (lambda c: {c.mask.kind}, set(KINDS)),
    "mask kind inside another": (inner_kinds, {"causal", "window", "padding", "random", "prefix"}),
    "mask structure": (lambda c: {mask_kind(c)}, set(MASKS)),
    "mask alignment": (lambda c: {(m.kind, m.align) for m in c.mask.walk() if hasattr(m, "align")}, ALIGNED),
    "form of a dense mask": (
        lambda c: {c.mask_form} if mask_kind(c) in ("bool", "additive") else set(),
        set(MASK_FORMS),
    ),
    "mask fill": (lambda c: {c.mask_fill}, set(MASK_FILLS)),
    "axes of masks and biases": (lambda c: {c.mask_axes, *([c.bias_axes] if c.bias else [])}, subsets("bhqk")),
    "bias": (lambda c: {c.bias}, set(BIAS)),
    "requires_grad of q, k, v": (lambda c: {c.requires_grad.rstrip("bs")}, subsets("qkv")),
    "requires_grad of the bias": (lambda c: {"b" in c.requires_grad} if c.bias else set(), {True, False}),
    "ALiBi": (lambda c: {c.alibi}, set(ALIBI)),
    "sinks": (lambda c: {c.sinks}, set(SINKS)),
    "requires_grad of the sinks": (lambda c: {"s" in c.requires_grad} if c.sinks else set(), {True, False}),
    "size of requires_grad": (lambda c: {len(c.requires_grad)}, {0, 1, 2, 3, 4}),
    "gradient through lse": (lambda c: {c.lse_grad}, {True, False}),
    "scale": (lambda c: {scale_kind(c)}, {"none", "zero", "negative", "tiny", "large", "usual"}),
    "softcap": (lambda c: {c.softcap}, {0.0, 1.0, 5.0, 30.0, 50.0}),
    "dropout": (lambda c: {c.dropout}, {0.0, 0.1, 0.5, 0.9}),
    "sequence": (lambda c: {c.sequence}, set(SEQUENCES)),
    **{f"layout of {t}": (lambda c, t=t: {getattr(c, f"layout_{t}")}, set(LAYOUTS)) for t in ("q", "k", "v", "do")},
    "layout of the mask": (lambda c: {c.layout_mask}, set(LAYOUTS) - {"packed"}),
    "packed in one storage": (lambda c: {one_storage(c)}, {True, False}),
    "B": (lambda c: {c.B}, {0, 1, 2, 3}),
    "query heads per key head": (lambda c: {c.G}, {1, 2, 3, 5, 7, 12}),
    "several groups of query heads": (lambda c: {c.Hkv > 1 and c.G > 1}, {True, False}),
    "D": (lambda c: {c.D}, {1, 4, 8, 16, 24, 40, 64, 72, 80, 96, 128, 192, 256}),
    "odd D": (lambda c: {c.D}, {3, 5, 7}),
    "Dv beside D": (lambda c: {(c.Dv > c.D) - (c.Dv < c.D)}, {-1, 0, 1}),
    "Lq beside Lk": (lambda c: {(c.Lq > c.Lk) - (c.Lq < c.Lk)}, {-1, 0, 1}),
    "Lq above Lk under causal": (
        lambda c: {mask_kind(c)} if c.Lq > c.Lk else set(),
        {"causal_top_left", "causal_bottom_right"},
    ),
    "zero and one": (lambda c: {(n, getattr(c, n)) for n in LENGTHS}, {(n, x) for n in LENGTHS for x in (0, 1)}),
    "residues of tile 8": (
        lambda c: {(n, getattr(c, n) % 8) for n in LENGTHS},
        {(n, x) for n in LENGTHS for x in range(8)},
    ),
    "residues of tile 16": (lambda c: {c.Lq % 16, c.Lk % 16}, set(range(16))),
    "tile edges": (lambda c: beside(c, 1, (-1, 0, 1)), {(t, n) for t in ladders.TILES for n in (-1, 0, 1)}),
    "one more than two tiles": (lambda c: beside(c, 2, (1,)), {(t, 1) for t in ladders.TILES[:4]}),
}


@pytest.mark.parametrize("run", SEEDS)
@pytest.mark.parametrize("axis", AXES)
def test_every_kind_of_every_axis_is_drawn_within_300_examples(axis, run):
    kinds, expected = AXES[axis]
    assert expected - {kind for case in default(run) for kind in kinds(case)} == set()


def test_every_field_of_a_case_varies():
    for name in set(Case.__dataclass_fields__) - {"mode"}:  # on in a region that names modes
        assert len({getattr(case, name) for case in default(0)}) > 1, name


@pytest.mark.slow
@pytest.mark.parametrize("tile", ladders.TILES)
def test_every_residue_of_every_tile_is_drawn(tile):
    some = decoded(0, 5000)
    assert {n % tile for c in some for n in (c.Lq, c.Lk)} == set(range(tile))


def test_boolean_and_additive_masks_come_in_every_broadcast_shape():
    seen = {"bool": set(), "additive": set()}
    for case in decoded(0, 6000, Region(masks=("bool", "additive"))):
        axes = case.mask.axes + case.mask_axes + (case.bias_axes if case.bias else "")
        additive = case.bias or case.mask_form == "additive"
        seen["additive" if additive else "bool"].add("".join(a for a in "bhqk" if a in axes))
    assert seen == {"bool": subsets("bhqk"), "additive": subsets("bhqk")}


# Small cases first


def work(case):
    return case.B * case.Hq * case.Lq * case.Lk * max(case.D, case.Dv)


def test_most_cases_are_small_and_none_is_large():
    sizes = sorted(work(case) for run in SEEDS for case in default(run))
    assert sizes[len(sizes) // 2] <= 1 << 13 and sum(sizes) / len(sizes) <= 1 << 15 and sizes[-1] <= 1 << 18


def test_some_cases_reach_the_longest_length():
    assert max(case.Lk for run in SEEDS for case in default(run)) > 280


def test_a_draw_costs_less_than_three_milliseconds():
    marks = [(drawn(cases(), turn), time.process_time())[1] for turn in range(4)]
    assert min(b - a for a, b in pairwise(marks)) / EXAMPLES < 3e-3  # the quickest of three: other work takes caches


def test_nan_in_masked_out_keys_comes_with_a_mask():
    assert all(mask_kind(c) != "none" for c in decoded(0, 2000) if c.data == "nonfinite_masked")


def test_a_gradient_through_lse_is_asked_for_only_where_lse_has_one():
    assert all(set(c.requires_grad) & set("qkb") for c in decoded(0, 2000) if c.lse_grad)


def test_nothing_is_rejected():
    assert len(default(0)) == EXAMPLES


def test_most_features_are_off_in_most_cases():
    names = ("scale", "softcap", "dropout", "bias", "lse_grad", "sequence", "grad", "alibi", "sinks")
    for name in names:
        share = (
            sum(getattr(case, name) != getattr(Case(), name) for run in SEEDS for case in default(run))
            / len(SEEDS)
            / EXAMPLES
        )
        assert 0.05 < share < 0.3, name


# Shrinking


def test_hypothesis_prints_the_case_as_short_python():
    @settings(database=None)
    @given(cases())
    def fails(case):
        assert case.Lk < 17

    with pytest.raises(AssertionError) as failure:
        fails()
    assert "case=Case(Lk=17)" in "".join(failure.value.__notes__)


def test_the_simplest_case_is_the_default():
    assert minimal(lambda case: True) == Case()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (lambda c: c.Lk > 16, Case(Lk=17)),
        (lambda c: c.Lq > 16, Case(Lq=17)),
        (lambda c: c.Lk > 128, Case(Lk=129)),
        (lambda c: c.Lk > 16 and c.Lq > 16, Case(Lk=17, Lq=17)),
        (lambda c: c.Lq == 0, Case(Lq=0)),
        (lambda c: c.Lk == 0, Case(Lk=0)),
        (lambda c: c.B == 0 and c.Lk > 8, Case(B=0, Lk=9)),
        (lambda c: c.B > 1, Case(B=2)),
        (lambda c: c.G > 1, Case(Hq=2)),
        (lambda c: c.G > 1 and c.Hkv > 1, Case(Hq=4, Hkv=2)),
        (lambda c: c.D >= 64, Case(D=64, Dv=64)),
        (lambda c: c.Dv > c.D, Case(Dv=2)),
        (lambda c: c.dtype == "bfloat16", Case(dtype="bfloat16")),
        (lambda c: c.softcap > 0, Case(softcap=30.0)),
        (lambda c: c.dropout > 0, Case(dropout=0.5)),
        (lambda c: c.scale == 0, Case(scale=0.0)),
        (lambda c: c.data == "needle", Case(data="needle")),
        (lambda c: isinstance(c.mask, Causal), Case(mask=Causal())),
        (lambda c: mask_kind(c) == "causal_bottom_right" and c.Lk > 16, Case(mask=Causal("bottom_right"), Lk=17)),
        (lambda c: c.mask_fill == "min", Case(mask=Full(), mask_form="additive", mask_fill="min")),
        (lambda c: isinstance(c.mask, Not), Case(mask=Not(Causal()))),
        (lambda c: isinstance(c.mask, And), Case(mask=And(Causal(), Causal()))),
        (
            lambda c: isinstance(c.mask, Window) and c.mask.left == 15 and c.mask_form == "flags",
            Case(mask=Window(15, -1)),
        ),
        (lambda c: "b" in c.requires_grad, Case(bias="normal", requires_grad="qkvb")),
        (lambda c: c.layout_k == "transposed", Case(layout_k="transposed")),
        (lambda c: c.lse_grad, Case(lse_grad=True)),
        (lambda c: c.sequence == "mask", Case(sequence="mask")),
    ],
)
def test_a_case_shrinks_to_what_matters(condition, expected):
    assert minimal(condition) == expected


# Regions and narrowing

REGIONS = st.builds(
    Region,
    dtypes=st.sampled_from([("float32",), ("bfloat16", "float64"), ("float16", "bfloat16")]),
    head_dims=st.sampled_from([(), (64,), (128, 32), (256,)]),
    max_head_dim=st.sampled_from([256, 300]),
    min_len=st.sampled_from([0, 1, 7, 128]),
    max_len=st.sampled_from([128, 200, 1 << 30]),
    masks=st.sets(st.sampled_from(MASKS), min_size=1).map(lambda chosen: tuple(m for m in MASKS if m in chosen)),
    modes=st.sampled_from([(), ("autocast",), MODES[1:]]),
    **{field.name: st.booleans() for field in fields(Region) if field.type == "bool"},
)


@given(REGIONS)
def test_cases_lie_inside_their_region(region):
    for case in decoded(0, 100, region):
        assert region.refuses(case) == ""
        assert oracle_bytes(case) <= MAX_ORACLE_BYTES


@given(REGIONS)
def test_the_middle_call_of_a_sequence_lies_inside_the_region_too(region):
    for case in decoded(0, 100, region):
        assert region.refuses(case.varied()) == ""


def test_a_region_of_equal_lengths_has_empty_cases_of_equal_lengths():
    some = decoded(0, 2000, Region(lq_differs=False))
    assert all(c.Lq == c.Lk for c in some) and any(c.Lq == 0 for c in some)


def off(feature):
    """Whether a case shows nothing of a feature."""
    return {
        "data": lambda c: c.data == "normal",
        "nonfinite": lambda c: not c.data.startswith("nonfinite"),
        "mask": lambda c: mask_kind(c) == "none",
        "layouts": lambda c: {c.layout_q, c.layout_k, c.layout_v, c.layout_do, c.layout_mask} == {"contiguous"},
        "scale": lambda c: c.scale is None and c.sequence != "scale",
        "dv": lambda c: c.D == c.Dv,
        "grad": lambda c: c.grad == "normal",
        "requires_grad": lambda c: c.requires_grad in ("qkv", "qkvb", "qkvs", "qkvbs"),
        "lse_grad": lambda c: not c.lse_grad,
        "softcap": lambda c: c.softcap == 0,
        "bias": lambda c: c.bias == "",
        "dropout": lambda c: c.dropout == 0,
        "sequence": lambda c: c.sequence == "",
        "gqa": lambda c: c.Hq == c.Hkv,
        "lq": lambda c: c.Lq == c.Lk,
        "empty": lambda c: min(c.B, c.Lq, c.Lk) > 0,
        "backward": lambda c: c.requires_grad == "" and c.grad == "normal" and not c.lse_grad,
        "alibi": lambda c: not c.alibi,
        "sinks": lambda c: not c.sinks,
        "mode": lambda c: not c.mode,
    }[feature]


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_left_out_never_appears(feature):
    others = set(FEATURES) - {feature, "empty" if feature == "lq" else ""}  # an empty Lq is beside Lk by itself
    assert all(map(off(feature), decoded(0, 500, features=others)))


@pytest.mark.parametrize("feature", FEATURES)
def test_only_the_features_named_appear(feature):
    some = decoded(0, 300, features=[feature, "backward"])
    for other in set(FEATURES) - {feature, "backward", "lq" if feature == "empty" else ""}:
        assert all(map(off(other), some)), other


def test_features_can_be_named_or_left_out():
    assert {mask_kind(c) for c in drawn(cases(without=["mask"]), 0, 100)} == {"none"}
    assert {(c.softcap, c.dropout > 0) for c in drawn(cases(features=["dropout"]), 0, 100)} == {
        (0.0, False),
        (0.0, True),
    }


def test_lengths_stay_below_max_len():
    assert max(max(c.Lq, c.Lk) for c in drawn(cases(max_len=20), 0)) == 20


def test_longer_cases_can_be_asked_for():
    assert max(c.Lk for c in drawn(cases(max_len=4000), 0)) > 2000


def test_dtypes_and_masks_are_those_asked_for():
    some = drawn(cases(dtypes=["float64", "bfloat16"], masks=["window", "none"]), 0)
    assert {c.dtype for c in some} == {"float64", "bfloat16"} and {mask_kind(c) for c in some} == {"window", "none"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtypes": ["bf16"]}, "dtypes must be among float32, float16, bfloat16, float64, got 'bf16'"),
        ({"dtypes": "bfloat16"}, "dtypes must be a list of names, got dtypes='bfloat16'"),
        ({"dtypes": []}, "must have a dtype and a mask to draw"),
        (
            {"dtypes": ["float16"], "region": Region(dtypes=("float32",))},
            r"inside the region \(float32\), got 'float16'",
        ),
        ({"masks": ["diagonal"]}, "masks must be among none, causal_top_left"),
        ({"masks": []}, "must have a dtype and a mask to draw"),
        ({"masks": ["bool"], "without": ["mask"]}, "masks must include 'none'"),
        ({"features": ["rope"]}, "features must be among sequence, dropout"),
        ({"without": ["rope"]}, "without must be among"),
        ({"max_len": 0}, "max_len must be at least 1, got max_len=0"),
        ({"max_len": 16, "region": Region(min_len=32)}, "max_len must be at least 32"),
        ({"region": Region(head_dims=(512,))}, "head_dims must have an entry up to 256"),
        ({"region": Region(min_len=100_000), "max_len": 1 << 20}, "smallest case must need at most"),
    ],
)
def test_what_cannot_be_drawn_is_said(arguments, message):
    with pytest.raises(ValueError, match=message):
        cases(**arguments)
