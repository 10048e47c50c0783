"""Negative controls: approximations of attention are rejected at once; sparse patterns, exactly computed, pass."""

import math
from dataclasses import replace

import pytest
import torch

from flashproof.fuzz.case import Case
from flashproof.fuzz.engine import hunt
from flashproof.fuzz.execute import Runner
from flashproof.fuzz.found import Policy
from flashproof.fuzz.judge import Judge
from flashproof.fuzz.masks import And, Causal, Or, Padding, Strided, Window
from flashproof.impls import REGISTRY, load_registry
from flashproof.impls.approximate import linformer, performer

load_registry()
SOON = Policy(more=(0, 0), distinct=0)
LONGFORMER = Or(Window(3, 0), And(Causal(), Padding((2,))))
"""A causal window with two global keys."""


def judge(target):
    declared = REGISTRY[target]
    return Judge(Runner(target), declared.contract, declared.supports)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["performer", "linformer"])
def test_an_approximation_is_rejected_within_a_dozen_cases(name, seed):
    campaign = hunt(judge(name), examples=12, seed=seed, policy=SOON)
    assert campaign.cases_to_first_failure is not None and campaign.cases_to_first_failure <= 12


@pytest.mark.parametrize("call", [performer, linformer])
def test_an_approximation_does_approximate(call):
    """A control that is plain noise would prove nothing."""
    generator = torch.Generator().manual_seed(1)
    q, k = (0.3 * torch.randn(1, 2, 32, 8, generator=generator) for _ in range(2))
    v = torch.ones(1, 2, 32, 4) + 0.01 * torch.randn(1, 2, 32, 4, generator=generator)
    exact = torch.softmax(q @ k.mT / math.sqrt(8), -1) @ v
    got = call(q, k, v)
    assert got.shape == exact.shape and not torch.allclose(got, exact, atol=1e-6)
    if call is performer:
        assert (got - exact).abs().max() < 0.05


@pytest.mark.parametrize(
    ("dtype", "lower"), [("float32", torch.float16), ("float32", torch.bfloat16), ("float16", torch.bfloat16)]
)
def test_the_exact_answer_rounded_to_a_lower_precision_is_rejected(dtype, lower):
    def rounded(q, k, v, *, mask=None, scale=None):
        exact = REGISTRY["textbook"](q.double(), k.double(), v.double(), mask=mask, scale=scale)
        return exact.to(lower).to(q.dtype)

    region = REGISTRY["performer"].supports
    campaign = hunt(
        Judge(Runner(rounded, dialect="native"), region=replace(region, dtypes=(dtype,), backward=False)),
        replace(region, dtypes=(dtype,), backward=False),
        examples=12,
        policy=SOON,
    )
    assert campaign.cases_to_first_failure is not None


@pytest.mark.parametrize("target", ["textbook", "blockwise", "triton_flash"])
@pytest.mark.parametrize("mask", [LONGFORMER, Strided(4)], ids=["longformer", "strided"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sparse_pattern_computed_exactly_passes(target, mask, dtype):
    case = Case(B=1, Hq=2, Hkv=1, Lq=40, Lk=40, D=16, Dv=16, mask=mask, dtype=dtype)
    assert judge(target).check(case).status == "pass"
