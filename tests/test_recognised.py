"""Dense masks, strides and numbers are recognised as what a case calls them."""

import pytest
import torch

from flashproof.fuzz.called import CannotExpressError, Source, read
from flashproof.fuzz.case import LAYOUTS, Case
from flashproof.fuzz.masks import BlockSparse, Causal, Document, Full, Not, Padding, Prefix, Random, Window
from flashproof.fuzz.measured import measure, regime
from flashproof.fuzz.measured import read as numbers
from flashproof.fuzz.recognised import layout_of, mask_of, nearest
from flashproof.fuzz.reduced import MOST_BYTES, reduced
from flashproof.fuzz.tensors import build, oracle_bytes

SIZES = (3, 2, 37, 53)
RIGHT, LEFT = Padding((53, 20, 1)), Not(Padding((0, 20, 52)))
EXACT = [
    Full(), Causal(), Causal("bottom_right"), Window(4, 0), Window(4, 3, "bottom_right"), Window(-1, 2), Window(3, -1),
    RIGHT, LEFT, RIGHT & LEFT, Prefix(5), Prefix(30, "bottom_right"), Document((10, 7, 36)), Document((10, 7, 36)) & Causal(),
    Causal() & RIGHT, Causal("bottom_right") & LEFT, Window(6, 0, "bottom_right") & RIGHT, Prefix(5) & RIGHT,
]  # fmt: skip


@pytest.mark.parametrize("mask", EXACT, ids=repr)
def test_a_dense_mask_is_recognised_as_a_mask_with_the_same_dense_form(mask):
    dense = mask.dense(*SIZES)
    found = mask_of(dense, SIZES)
    assert found is not None
    assert torch.equal(found.dense(*SIZES).expand(SIZES), dense.expand(SIZES)), found


def test_the_alignment_of_a_causal_mask_is_told_apart():
    assert mask_of(Causal().dense(1, 1, 5, 9), (1, 1, 5, 9)) == Causal()
    assert mask_of(Causal("bottom_right").dense(1, 1, 5, 9), (1, 1, 5, 9)) == Causal("bottom_right")


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1), (2, 1, 1, 40), (1, 1, 40, 1), (1, 1, 7, 7), (1, 1, 0, 3), (1, 1, 3, 0)]
)
def test_a_mask_of_any_size_is_never_taken_for_another(sizes):
    for mask in (*EXACT, Random(50), Random(100), Random(0), Random(50, axes="bk")):
        dense = mask.dense(*sizes)
        found = mask_of(dense, sizes)
        assert found is None or torch.equal(found.dense(*sizes).expand(sizes), dense.expand(sizes)), (mask, found)


def test_one_wrong_element_is_not_overlooked():
    dense = Causal().dense(*SIZES)
    dense[0, 0, 30, 2] = False
    assert mask_of(dense, SIZES) is None


def test_an_unknown_mask_is_told_by_one_with_its_density_and_tiles():
    assert nearest(Random(30, axes="hqk").dense(1, 2, 200, 200)) == Random(30, axes="hqk")
    found = nearest(BlockSparse(32, 32, 40, seed=3).dense(1, 1, 256, 256))
    assert isinstance(found, BlockSparse)
    assert (found.block_q, found.block_k) == (32, 32)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_strides_of_a_layout_are_recognised(name):
    made = build(Case(B=2, Hq=3, Hkv=3, Lq=5, Lk=5, D=4, Dv=4, layout_q=name, layout_k=name, layout_v=name))
    shared = made.q.untyped_storage().data_ptr() == made.k.untyped_storage().data_ptr()
    found, exact = layout_of(made.q.shape, made.q.stride(), misaligned=made.q.data_ptr() % 16 != 0, shared=shared)
    assert (found, exact) == ("contiguous" if name == "size1" else name, True)


def test_meaningless_strides_of_size_1_are_recognised():
    assert layout_of((2, 1, 5, 4), (20, 777, 4, 1)) == ("size1", False)


def test_a_part_of_a_longer_cache_is_told_by_the_nearest_layout():
    cache = torch.zeros(2, 3, 100, 4)[:, :, :7]
    assert layout_of(cache.shape, cache.stride()) == ("chunk", False)


@pytest.mark.parametrize(
    "data", ["normal", "uniform", "outlier", "offset", "constant", "tiny", "sparse_int", "nonfinite", "huge"]
)
def test_the_regime_of_drawn_numbers_is_recognised(data):
    case = Case(B=2, Hq=2, Hkv=2, Lq=90, Lk=90, D=32, Dv=32, data=data, seed=5)
    made = build(case)
    seen = {n: numbers(measure(getattr(made, n))) for n in "qkv"}
    assert regime(seen, case.resolved_scale, torch.float32, masked=False) == data


def test_a_large_case_is_reduced_to_one_with_the_same_head_dims_groups_and_remainders():
    case = Case(B=16, Hq=32, Hkv=8, Lq=4096 + 5, Lk=8192 + 77, D=64, Dv=80, mask=Causal("bottom_right"))
    small = reduced(case)
    assert oracle_bytes(small) <= MOST_BYTES < oracle_bytes(case)
    assert (small.D, small.Dv, small.G, small.mask, small.Lq % 128, small.Lk % 128) == (64, 80, 4, case.mask, 5, 77)
    assert small.Lq > 128
    assert small.Lk > small.Lq


def test_a_small_case_is_not_reduced():
    case = Case(B=4, Hq=8, Hkv=2, Lq=100, Lk=100, D=64, Dv=64)
    assert reduced(case) == case


def test_the_lengths_in_a_mask_are_reduced_with_the_case():
    case = Case(B=4, Hq=8, Hkv=8, Lq=4096, Lk=4096, D=64, Dv=64, mask=Padding((4096, 3000, 5, 0)))
    small = reduced(case)
    assert small.mask.lengths[:2] == (small.Lk, 128 * max(23 * small.Lk // 4096, 1) + 3000 % 128)


def attention(q, k, v, mask=None, *, causal=False, scale=None, window_size=(-1, -1), softcap=0.0, mystery=None):
    """Stands for a callable of the flash_attn dialect."""


X = torch.zeros(2, 5, 4, 8)


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"q": X, "mystery": torch.ones(3)}, "mystery"),
        ({"q": X, "mystery": 3}, "mystery"),
        ({"q": X.to_sparse()}, "q must be a plain strided tensor"),
        ({"q": X.to("meta")}, "q must be a plain strided tensor"),
        ({"q": X.int(), "k": X.int(), "v": X.int()}, "dtype must be one of"),
        ({"q": X.half()}, "one dtype"),
        ({"q": X[:1]}, "agree in batch"),
        ({"q": X[0]}, "4 dimensions"),
        ({"q": X, "mask": torch.ones(7, 7, dtype=torch.bool)}, "broadcastable"),
        ({"q": X, "mask": torch.ones(5, 5, dtype=torch.int32)}, "boolean or floating"),
        ({"q": X, "scale": "half"}, "must be numbers"),
        ({"q": X, "scale": float("nan")}, "scale must be"),
        ({"q": torch.zeros(2, 5, 6, 8)}, "Hkv must be"),
    ],
)
def test_a_call_that_cannot_be_expressed_is_told_in_one_sentence(kwargs, said):
    with pytest.raises(CannotExpressError, match=said) as e:
        read(Source.of(attention, "here:attention"), (), {"k": X, "v": X, **kwargs}, grad=True)
    assert "\n" not in str(e.value)


def test_keywords_of_the_flash_attn_dialect_become_the_case():
    source = Source.of(attention, "here:attention")
    case = read(
        source, (X, X, X), {"causal": True, "window_size": (3, -1), "scale": 0.5, "softcap": 30}, grad=False
    ).case
    mask = Causal("bottom_right") & Window(3, -1, "bottom_right")
    where = dict.fromkeys(("layout_q", "layout_k", "layout_v"), "blhd")
    assert case == Case(2, 4, 4, 5, 5, 8, 8, mask=mask, scale=0.5, softcap=30, requires_grad="", **where)
