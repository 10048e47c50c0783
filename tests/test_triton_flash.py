"""The Triton kernels: interpreted under the monitor on a CPU, and compiled for GPUs that need not be there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from flashproof.fuzz.case import Case
from flashproof.fuzz.execute import Runner
from flashproof.fuzz.judge import Judge
from flashproof.fuzz.masks import Causal, Document, Padding, Random, Window
from flashproof.fuzz.strategies import cases
from flashproof.fuzz.worker import Worker
from flashproof.impls import REGISTRY
from flashproof.impls.triton_flash import Problem, tiles, triton_flash

pytest.importorskip("triton")
DECLARED = REGISTRY["triton_flash"]
FEATURES = Case(
    2, 6, 2, 37, 70, 4, 3, mask=Random(60, 20), bias="normal", bias_axes="hk", scale=-0.7, softcap=2.0,
    lse_grad=True, requires_grad="qkvb", layout_q="blhd", layout_k="transposed", layout_do="strided",
)  # fmt: skip
SHARED_MEMORY = {80: 101_376, 90: 232_448}
"""Bytes a block may use: on consumer GPUs of the generation of sm_80 (sm_86, sm_89), and on sm_90."""


@pytest.fixture(scope="module")
def judge():
    return Judge(Runner("triton_flash"), DECLARED.contract, DECLARED.supports)


@pytest.fixture(scope="module")
def compiled():
    with Worker("triton_flash", device="cuda") as worker:  # in this process kernels are interpreted
        yield Judge(worker, DECLARED.contract, DECLARED.supports)


def check(judge, case):
    verdict = judge.check(case)
    assert verdict.status == "pass", [str(f) for f in verdict.failures]


@pytest.mark.slow
@settings(max_examples=30)
@given(case=cases(DECLARED.supports, max_len=70))
def test_every_drawn_case_is_within_the_limits_and_clean(judge, case):
    check(judge, case)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_all_features_together_are_within_the_limits_and_clean(judge, dtype):
    check(judge, FEATURES.but(dtype=dtype))


@pytest.mark.parametrize(
    "mask",
    [
        Causal(),
        Causal("bottom_right"),
        Window(3, 2),
        Window(-1, 0, "bottom_right"),
        Window(64, -1),
        Padding((70, 3)),
        Document((5, 70)),
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", [(70, 90), (90, 70)], ids=str)
def test_bands_and_dense_masks_over_several_tiles_are_within_the_limits(judge, mask, lengths):
    check(judge, Case(B=2, Lq=lengths[0], Lk=lengths[1], D=2, Dv=2, mask=mask))


@pytest.mark.parametrize("sizes", [(0, 3, 2), (2, 0, 2), (2, 3, 0)], ids=str)
def test_empty_problems_give_zeros(judge, sizes):
    B, Lq, Lk = sizes
    check(judge, Case(B=B, Lq=Lq, Lk=Lk, mask=Causal()))


def test_the_widest_heads_are_within_the_limits(judge):
    check(judge, Case(Hq=2, Lq=20, Lk=40, D=256, Dv=129, dtype="bfloat16"))


def test_small_arguments_of_tanh_keep_their_digits(judge):
    check(judge, Case(Lq=4, Lk=4, D=4, softcap=1e4, bias="normal", requires_grad="qkvb"))


@pytest.mark.parametrize("changes", [{"dropout": 0.5}, {"dtype": "float64"}, {"D": 257}])
def test_what_lies_outside_the_region_is_refused(judge, changes):
    case = Case(**changes)
    assert DECLARED.supports.refuses(case)
    assert judge.check(case).status == "refused"


def test_causal_masks_and_windows_need_no_dense_mask():
    q, k = torch.zeros(1, 1, 5, 1), torch.zeros(1, 1, 8, 1)
    made = [Problem.of(q, k, m, 1.0, 0.0) for m in (Causal(), Causal("bottom_right"), Window(2, 1, "bottom_right"))]
    assert [(p.high, p.mask) for p in made] == [(0, None), (3, None), (4, None)] and made[2].low == 1


def test_query_heads_of_a_group_share_a_tile_where_queries_are_few():
    size = tiles(torch.zeros(1, 12, 5, 1), torch.zeros(1, 1, 9, 1), 1)
    assert (size["ROWS"], size["BLOCK_M"]) == (8, 64)


COMPILED = [
    {"dtype": "float16", "D": 64, "Dv": 64, "mask": "causal", "architectures": [80]},
    {"dtype": "bfloat16", "D": 128, "Dv": 128, "mask": "random", "bias": True, "softcap": 2.0, "architectures": [90]},
    {"dtype": "float32", "D": 256, "Dv": 200, "mask": "window", "architectures": [80]},
]


@pytest.mark.slow
@pytest.mark.parametrize("what", COMPILED, ids=lambda w: f"{w['dtype']}-{w['D']}")
def test_kernels_compile_without_a_gpu_and_fit_in_shared_memory(what):
    env = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "kernels" / "compile_triton_flash.py"
    done = subprocess.run(
        [sys.executable, script, json.dumps(what)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    built = json.loads(done.stdout)
    assert {b["kernel"] for b in built} == {"forward_kernel", "dq_kernel", "dkdv_kernel"}
    assert all(0 < b["shared"] <= SHARED_MEMORY[b["architecture"]] for b in built), built


@pytest.mark.gpu
@settings(max_examples=50)
@given(case=cases(DECLARED.supports, max_len=300))
def test_compiled_kernels_are_within_the_limits(compiled, case):
    check(compiled, case)


def test_dropout_is_refused_before_any_launch():
    with pytest.raises(NotImplementedError, match="without dropout"):
        triton_flash(*(torch.zeros(1, 1, 1, 1) for _ in range(3)), dropout=0.5)
