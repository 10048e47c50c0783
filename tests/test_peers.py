"""torch's own attention as targets: inside the declared regions nothing is refused and everything is within the limits."""

import pytest
import torch
from hypothesis import given, settings

from flashproof.fuzz.case import Case
from flashproof.fuzz.dialects import expressible, recognise
from flashproof.fuzz.execute import Runner
from flashproof.fuzz.judge import Judge
from flashproof.fuzz.masks import BlockSparse, Causal, Document, Padding, Prefix, Random, Strided, Window
from flashproof.fuzz.strategies import cases
from flashproof.fuzz.worker import Worker
from flashproof.impls import REGISTRY, peers

CPU = ("sdpa_math", "sdpa_cpu_flash", "flex")
CUDA = ("sdpa_math", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn")


def judge(name, device="cpu"):
    declared = REGISTRY[name]
    runner = Runner(name) if device == "cpu" else Worker(name, device=device)  # in this process kernels are interpreted
    return Judge(runner, declared.contract, declared.supports)


def region(name):
    declared = REGISTRY[name]
    return expressible(recognise(declared.call, declared.dialect), declared.supports)


def campaign(name, device, examples):
    """Judge drawn cases; a refusal inside the declared region fails, as any finding does."""
    one = judge(name, device)

    @settings(max_examples=examples)
    @given(cases(region(name), max_len=70))
    def every_case(case):
        verdict = one.check(case)
        assert not verdict.failures, (case.key, [str(f) for f in verdict.failures])

    every_case()


@pytest.mark.slow
@pytest.mark.parametrize("name", CPU)
def test_drawn_cases_are_within_the_limits(name):
    campaign(name, "cpu", 40)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CUDA)
def test_drawn_cases_are_within_the_limits_on_a_gpu(name):
    campaign(name, "cuda", 40)


@pytest.mark.parametrize(
    "mask",
    [
        Causal("bottom_right"),
        Window(1, 2),
        Padding((3, 0)),
        Document((2, 3)),
        Prefix(2),
        Strided(2),
        BlockSparse(2, 2),
        Random(),
    ],
    ids=str,
)
def test_flex_takes_our_masks_as_index_predicates(mask):
    verdict = judge("flex").check(Case(2, 4, 2, 5, 7, 8, 4, mask=mask, requires_grad="", bias="normal", softcap=2.0))
    assert verdict.status == "pass", [str(f) for f in verdict.failures]


@pytest.mark.parametrize(
    "changes",
    [{"Dv": 2}, {"dropout": 0.5}, {"mask": Causal(), "scale": -1.0}, {"mask": Causal(), "scale": 0.0}, {"Lk": 0}],
    ids=str,
)
def test_a_backend_that_declines_is_a_refusal_outside_its_region(changes):
    case = Case(**changes)
    assert REGISTRY["sdpa_cpu_flash"].supports.refuses(case)
    assert judge("sdpa_cpu_flash").check(case).status == "refused"


def test_the_cpu_flash_backend_adds_the_heads_of_a_group_in_a_narrow_accumulator():
    case = Case(Hq=12, Lk=47, D=72, Dv=72, dtype="bfloat16", requires_grad="v", seed=25736)
    assert judge("sdpa_cpu_flash").check(case).status == "pass"
    assert (
        "value:dv" in Judge(Runner("sdpa_cpu_flash"), contract="torch-cpu-flash,dkv_acc_u=0,acc_eta=0").check(case).keys
    )


def test_a_backend_is_asked_for_alone():
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(NotImplementedError, match="FLASH_ATTENTION backend"):
        peers.sdpa_cpu_flash(q, q, torch.zeros(1, 1, 2, 3))
    assert peers.sdpa_math(q, q, torch.zeros(1, 1, 2, 3)).shape == (1, 1, 2, 3)


def test_flex_restores_the_switch_it_sets():
    from torch.nn.attention import flex_attention

    before = flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    peers.flex(*(torch.zeros(1, 1, 1, 1) for _ in range(3)))
    assert before is flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
