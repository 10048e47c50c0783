"""Attention by its definition, against the float64 reference and its limits."""

import math

import pytest
import torch
from hypothesis import given

from flashproof.fuzz.case import Case
from flashproof.fuzz.execute import Runner
from flashproof.fuzz.judge import Judge
from flashproof.fuzz.masks import Causal, Padding, Random
from flashproof.fuzz.strategies import cases
from flashproof.impls.textbook import REGION, textbook

JUDGE = Judge(Runner("textbook"), "ieee", REGION)


@given(cases(REGION, max_len=70))
def test_every_drawn_case_is_within_the_limits(case):
    verdict = JUDGE.check(case)
    assert verdict.status == "pass", verdict.failures


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_all_features_together_are_within_the_limits(dtype):
    case = Case(
        2, 6, 2, 5, 7, 4, 3, dtype, mask=Random(60, 20), bias="normal", bias_axes="hk", scale=-0.7, softcap=2.0, dropout=0.2,
        lse_grad=True, requires_grad="qkvb", layout_q="blhd", layout_do="strided",
    )  # fmt: skip
    verdict = JUDGE.check(case)
    assert verdict.status == "pass", verdict.failures


def test_a_row_without_keys_gives_zero_and_minus_infinity_and_no_gradient():
    q, k, v = (torch.randn(1, 1, n, 2, requires_grad=True) for n in (2, 1, 1))
    o, lse = textbook(q, k, v, mask=Causal("bottom_right"), return_lse=True)
    grads = torch.autograd.grad((o.sum(), lse[0, 0, 0]), (q, k, v), (torch.ones(()), torch.ones(())))
    assert o[0, 0, 0].tolist() == [0, 0] and lse[0, 0, 0] == -math.inf
    assert grads[0][0, 0, 0].tolist() == [0, 0] and all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_an_unseen_key_holds_reaches_no_result(value):
    q, k, v = (torch.randn(2, n, 3, 2) for n in (4, 2, 2))
    k[1, :, 1:], v[1, :, 1:] = value, value
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = textbook(*leaves, mask=Padding((3, 1)))
    assert all(x.isfinite().all() for x in (o, *torch.autograd.grad(o.sum(), leaves)))


def test_dropout_keeps_the_expected_output():
    q, k, v = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 4000, 1), torch.ones(1, 1, 4000, 1)
    assert abs(textbook(q, k, v, dropout=0.5, dropout_seed=3).item() - 1) < 4 / math.sqrt(4000)
