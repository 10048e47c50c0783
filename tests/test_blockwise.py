"""FlashAttention in PyTorch, against the float64 reference and against the definition."""

import math

import pytest
import torch
from hypothesis import given

from flashproof.fuzz.case import Case
from flashproof.fuzz.execute import Runner
from flashproof.fuzz.judge import Judge
from flashproof.fuzz.masks import BlockSparse, Causal, Document, Full, Padding, Prefix, Random, Strided, Window
from flashproof.fuzz.strategies import cases
from flashproof.impls import REGISTRY
from flashproof.impls import blockwise as module
from flashproof.impls.blockwise import REGION, blockwise
from flashproof.impls.textbook import textbook

JUDGE = Judge(Runner("blockwise"), REGISTRY["blockwise"].contract, REGION)
FEATURES = Case(
    2, 6, 2, 37, 35, 4, 3, mask=Random(60, 20), bias="normal", bias_axes="hk", scale=-0.7, softcap=2.0, dropout=0.2,
    lse_grad=True, requires_grad="qkvb", layout_q="blhd", layout_do="strided",
)  # fmt: skip


@pytest.mark.slow
@given(cases(REGION, max_len=70))
def test_every_drawn_case_is_within_the_limits(case):
    verdict = JUDGE.check(case)
    assert verdict.status == "pass", verdict.failures


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_all_features_together_are_within_the_limits(dtype):
    verdict = JUDGE.check(FEATURES.but(dtype=dtype))
    assert verdict.status == "pass", verdict.failures


@pytest.mark.parametrize(
    "mask",
    [
        Full(), Causal(), Causal("bottom_right"), Window(3, 2), Padding((20, 0)), Document((5, 9)), Prefix(4), Strided(3),
        BlockSparse(8, 8, 30, axes="hqk"), Random(50, 30, axes="bhqk"), ~Causal(), Causal() & Padding((20,)), Window(0, 0) | Prefix(2),
    ],
    ids=str,
)  # fmt: skip
def test_every_kind_of_mask_is_within_the_limits(mask):
    verdict = JUDGE.check(Case(2, 2, 2, 37, 35, 4, 4, mask=mask))
    assert verdict.status == "pass", verdict.failures


def results(attention, **keywords):
    """(o, lse, dq, dk, dv, dbias) in float64, with a gradient through lse."""
    torch.manual_seed(0)
    q, k, v, bias = (
        torch.randn(s, dtype=torch.float64) for s in ((2, 4, 19, 8), (2, 2, 21, 8), (2, 2, 21, 5), (1, 4, 19, 1))
    )
    leaves = [x.requires_grad_() for x in (q, k, v, bias)]
    o, lse = attention(
        q, k, v, bias=bias, mask=Causal(), softcap=3.0, dropout=0.1, dropout_seed=5, return_lse=True, **keywords
    )
    return [o, lse, *torch.autograd.grad((o, lse), leaves, (torch.randn_like(o), torch.randn_like(lse)))]


@pytest.mark.parametrize("tile", [(1, 1), (3, 7), (16, 5), (64, 64)])
def test_any_tile_gives_what_the_definition_gives(tile):
    for mine, textbooks in zip(results(blockwise, Br=tile[0], Bc=tile[1]), results(textbook), strict=True):
        assert (mine - textbooks).abs().max() < 1e-12


def test_tiles_that_the_mask_empties_are_not_computed(monkeypatch):
    seen = []
    monkeypatch.setattr(module, "_scores", lambda *a: seen.append(a[-2:]) or scores(*a))
    q = torch.randn(1, 1, 48, 2, requires_grad=True)
    blockwise(q, q, q, mask=Causal(), Br=16).sum().backward()
    assert len(seen) == 2 * 6  # of 9 tiles 6 touch the lower triangle, once in each direction


scores = module._scores


def test_a_row_without_keys_gives_zero_and_minus_infinity_and_no_gradient():
    q, k, v = (torch.randn(1, 1, n, 2, requires_grad=True) for n in (2, 1, 1))
    o, lse = blockwise(q, k, v, mask=Causal("bottom_right"), return_lse=True)
    dq = torch.autograd.grad((o.sum(), lse[0, 0, 0]), q, (torch.ones(()), torch.ones(())))[0]
    assert o[0, 0, 0].tolist() == [0, 0] and lse[0, 0, 0] == -math.inf and dq[0, 0, 0].tolist() == [0, 0]
