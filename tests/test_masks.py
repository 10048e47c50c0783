import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashproof.fuzz.masks import (
    KINDS,
    MAX_DEPTH,
    And,
    BlockSparse,
    Causal,
    Document,
    Full,
    Grid,
    Not,
    Or,
    Packed,
    Padding,
    Prefix,
    Random,
    Strided,
    Window,
    mask_from_json,
)
from flashproof.fuzz.strategies import cases

SHAPES = ((2, 2, 5, 5), (1, 1, 3, 9), (2, 1, 9, 3), (1, 2, 1, 7), (1, 1, 7, 1))


def document(lengths, n):
    ends = itertools.accumulate(lengths)
    return sum(n >= end for end in ends)


DEFINITIONS = [
    (Full(), lambda b, h, i, j, Lq, Lk: True),
    (Causal(), lambda b, h, i, j, Lq, Lk: j <= i),
    (Causal("bottom_right"), lambda b, h, i, j, Lq, Lk: j - i <= Lk - Lq),
    (Window(2, 1), lambda b, h, i, j, Lq, Lk: -2 <= j - i <= 1),
    (Window(0, 0, "bottom_right"), lambda b, h, i, j, Lq, Lk: j - i == Lk - Lq),
    (Window(-1, 1), lambda b, h, i, j, Lq, Lk: j - i <= 1),
    (Window(1, -1), lambda b, h, i, j, Lq, Lk: j - i >= -1),
    (Padding((2, 0)), lambda b, h, i, j, Lq, Lk: j < (2, 0)[b]),
    (Padding((3,)), lambda b, h, i, j, Lq, Lk: j < 3),
    (Document((2, 0, 1)), lambda b, h, i, j, Lq, Lk: document((2, 0, 1), i) == document((2, 0, 1), j)),
    (Packed((1, 2), (3, 0)), lambda b, h, i, j, Lq, Lk: i < 1 and j < 3),
    (Packed((0, 2, 1), (1, 1, 2)), lambda b, h, i, j, Lq, Lk: (i < 2 and j == 1) or (i == 2 and 2 <= j < 4)),
    (Packed((2, 1), (1, 2), "top_left"), lambda b, h, i, j, Lq, Lk: (i < 2 and j == 0) or (i == 2 and j == 1)),
    (Packed((2, 1), (1, 2), "bottom_right"), lambda b, h, i, j, Lq, Lk: (i == 1 and j == 0) or (i == 2 and 1 <= j < 3)),
    (Packed((2, 2), (2, 2), "", 0, 0), lambda b, h, i, j, Lq, Lk: i == j < 4),
    (Prefix(2), lambda b, h, i, j, Lq, Lk: j < 2 or j <= i),
    (Prefix(1, "bottom_right"), lambda b, h, i, j, Lq, Lk: j < 1 or j - i <= Lk - Lq),
    (Strided(3), lambda b, h, i, j, Lq, Lk: 0 <= i - j and (i - j < 3 or (i - j) % 3 == 0)),
    (And(Causal(), Padding((2, 4))), lambda b, h, i, j, Lq, Lk: j <= i and j < (2, 4)[b]),
    (Or(Causal(), Padding((2, 4))), lambda b, h, i, j, Lq, Lk: j <= i or j < (2, 4)[b]),
    (Not(Window(1, 0)), lambda b, h, i, j, Lq, Lk: not -1 <= j - i <= 0),
    (BlockSparse(2, 3, 100), lambda b, h, i, j, Lq, Lk: True),
    (Random(0), lambda b, h, i, j, Lq, Lk: False),
    (Random(100, 100), lambda b, h, i, j, Lq, Lk: False),
]


def test_every_kind_has_a_definition():
    assert {mask.kind for mask, _ in DEFINITIONS} == set(KINDS)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("mask", "allowed"), DEFINITIONS)
def test_the_dense_mask_follows_its_definition(mask, allowed, shape):
    _, _, Lq, Lk = shape
    dense = mask.dense(*shape).expand(shape)
    for b, h, i, j in itertools.product(*map(range, shape)):
        assert dense[b, h, i, j].item() == allowed(b, h, i, j, Lq, Lk), (b, h, i, j)


@given(cases())
def test_the_dense_mask_has_full_size_on_its_own_axes_only(case):
    sizes = (case.B, case.Hq, case.Lq, case.Lk)
    shape = tuple(n if axis in case.mask.axes else 1 for axis, n in zip("bhqk", sizes, strict=True))
    assert case.mask.dense(*sizes).shape == shape


@given(cases(max_len=40), st.integers(1, 40), st.integers(1, 40))
def test_a_smaller_case_keeps_the_mask_of_what_remains(case, lq, lk):
    lq, lk = min(lq, case.Lq), min(lk, case.Lk)
    if any(getattr(m, "align", "") == "bottom_right" for m in case.mask.walk()):
        lk, lq = case.Lk, case.Lq  # such a mask is tied to the far end by its meaning
    whole = case.mask.dense(case.B, case.Hq, case.Lq, case.Lk).expand(case.B, case.Hq, case.Lq, case.Lk)
    part = case.mask.dense(case.B, case.Hq, lq, lk).expand(case.B, case.Hq, lq, lk)
    assert torch.equal(part, whole[:, :, :lq, :lk])


@given(cases(max_len=40), st.integers(1, 20), st.integers(1, 20))
def test_blocks_say_which_tiles_have_some_and_only_allowed_pairs(case, block_q, block_k):
    B, H, Lq, Lk = case.B, case.Hq, case.Lq, case.Lk
    some, every = case.mask.blocks(B, H, Lq, Lk, block_q, block_k)
    dense = case.mask.dense(B, H, Lq, Lk).expand(-1, -1, Lq, Lk)
    assert some.shape[2:] == every.shape[2:] == (-(-Lq // block_q), -(-Lk // block_k))
    for i, j in itertools.product(*map(range, some.shape[2:])):
        tile = dense[:, :, i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k].flatten(2)
        assert torch.equal(some[:, :, i, j], tile.any(2)) and torch.equal(every[:, :, i, j], tile.all(2))


def test_a_tile_of_the_predicate_is_a_slice_of_the_dense_mask():
    mask = And(Random(50, 30, 3, "bhqk"), Causal("bottom_right"))
    whole = mask.dense(2, 2, 20, 30)
    grid = Grid.of(2, 2, 20, 30)
    tile = Grid(grid.b, grid.h, grid.i[:, :, 4:9], grid.j[..., 7:19], 20, 30)
    assert torch.equal(mask.keep(tile), whole[:, :, 4:9, 7:19])


@pytest.mark.parametrize("percent", [10, 50, 90])
def test_a_random_mask_keeps_its_share_of_pairs(percent):
    share = Random(percent).dense(1, 1, 200, 200).double().mean().item()
    assert abs(share - percent / 100) < 6 * (percent / 100 * (1 - percent / 100) / 40_000) ** 0.5


def test_a_random_mask_has_its_share_of_dead_rows():
    dead = ~Random(100, 30).dense(1, 1, 2000, 1).any(3)
    assert abs(dead.double().mean().item() - 0.3) < 6 * (0.21 / 2000) ** 0.5


@pytest.mark.parametrize("mask", [Random(50), BlockSparse(1, 1, 50), Random(90, 50)])
def test_another_seed_gives_another_mask(mask):
    other = type(mask)(**{**vars(mask), "seed": 1})
    assert not torch.equal(mask.dense(1, 1, 16, 16), other.dense(1, 1, 16, 16))


def test_a_block_sparse_mask_is_constant_inside_a_tile_and_has_empty_ones():
    some, every = BlockSparse(4, 8, 50).blocks(1, 1, 64, 64, 4, 8)
    assert torch.equal(some, every) and some.any() and not some.all()


@pytest.mark.parametrize("axes", ["b", "h", "q", "k", "bk", "hq", "bhqk"])
def test_a_random_mask_varies_along_each_of_its_axes(axes):
    dense = Random(50, 0, 0, axes).dense(8, 8, 8, 8)
    for axis in (n for n, name in enumerate("bhqk") if name in axes):
        assert not torch.equal(dense, dense.roll(1, axis))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"kind": "causal", "align": "left"},
            "mask field align must be one of top_left, bottom_right, got align='left'",
        ),
        ({"kind": "window", "left": -2}, "mask field left must be an integer >= -1"),
        ({"kind": "window", "right": 1.0}, "mask field right must"),
        ({"kind": "padding", "lengths": []}, "mask field lengths must be a non-empty list"),
        ({"kind": "padding", "lengths": [1, -1]}, "mask field lengths must"),
        ({"kind": "padding", "lengths": 3}, "mask field lengths must"),
        ({"kind": "document", "lengths": [True]}, "mask field lengths must"),
        ({"kind": "prefix", "length": -1}, "mask field length must be an integer >= 0"),
        ({"kind": "strided", "stride": 0}, "mask field stride must be an integer >= 1"),
        ({"kind": "block_sparse", "block_q": 0}, "mask field block_q must"),
        ({"kind": "block_sparse", "axes": "b"}, "mask field axes must be one of"),
        ({"kind": "random", "percent": 101}, r"mask field percent must be an integer in 0\.\.100"),
        ({"kind": "random", "axes": "kq"}, "mask field axes must be a non-empty subset"),
        ({"kind": "random", "seed": -1}, "mask field seed must"),
        ({"kind": "full", "lengths": [1]}, r"mask full must have only the fields \(none\), got 'lengths'"),
        ({"kind": "and", "first": {"kind": "full"}}, "mask and must have the fields first, second"),
        ({"kind": "and", "first": {"kind": "full"}, "second": 1}, "mask kind must be one of full, causal.*got kind=1"),
        ({"kind": "not", "inner": {"kind": "no"}}, "mask kind must be one of .* got kind='no'"),
    ],
)
def test_a_malformed_mask_is_named(data, message):
    with pytest.raises(ValueError, match=message):
        mask_from_json(data)


def test_masks_nested_too_deeply_are_refused():
    data = {"kind": "full"}
    for _ in range(MAX_DEPTH + 1):
        data = {"kind": "not", "inner": data}
    with pytest.raises(ValueError, match="nested at most"):
        mask_from_json(data)


def test_and_with_a_full_mask_is_the_other_mask():
    assert Full() & Causal() == Causal() and Causal() & Full() == Causal()


def test_walk_finds_every_mask_inside():
    assert [m.kind for m in Not(And(Causal(), Or(Full(), Strided()))).walk()] == [
        "not",
        "and",
        "causal",
        "or",
        "full",
        "strided",
    ]
