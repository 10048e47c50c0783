"""The Gluon kernels for Hopper: what is refused, what is compiled without a GPU, and, on one, what is answered."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from flashproof.fuzz.case import Case
from flashproof.fuzz.judge import Judge
from flashproof.fuzz.masks import Causal, Full, Padding, Window
from flashproof.fuzz.strategies import cases
from flashproof.fuzz.worker import Worker
from flashproof.impls import REGISTRY
from flashproof.impls.hopper import OPEN, Problem, _descriptor, _readable, band, describe, hopper, refuses, section

pytest.importorskip("triton.experimental.gluon")
DECLARED = REGISTRY["hopper"]
GOOD = {"bias": None, "scale": 1.0, "softcap": 0.0, "dropout": 0.0}


def tensors(D=64, Dv=None, dtype=torch.float16, L=2):
    return *(torch.zeros(1, 1, L, D, dtype=dtype) for _ in range(2)), torch.zeros(1, 1, L, Dv or D, dtype=dtype)


@pytest.mark.parametrize(
    ("shape", "mask", "changes", "rule"),
    [
        ({}, None, {"dropout": 0.5}, "without dropout, got dropout=0.5"),
        ({}, None, {"softcap": 2.0}, "without softcap, got softcap=2.0"),
        ({}, None, {"bias": torch.zeros(1)}, "without bias"),
        ({}, Padding((1,)), {}, "mask that is none, causal or a window"),
        ({"dtype": torch.float32}, None, {}, "float16 or bfloat16, got dtype=torch.float32"),
        ({"D": 96}, None, {}, "head dim in (64, 128, 256), got D=96"),
        ({"D": 128, "Dv": 64}, None, {}, "v as wide as q, got D=128, Dv=64"),
        ({}, None, {"scale": -1.0}, "scale above 0, got scale=-1.0"),
        ({"L": 0}, None, {}, "at least one batch, query and key"),
        ({}, None, {}, "run on a CUDA device, got device=cpu"),
    ],
)
def test_what_is_refused_is_refused_with_the_rule_and_the_value(shape, mask, changes, rule):
    assert rule in refuses(*tensors(**shape), mask, **(GOOD | changes))


def test_a_refusal_is_an_error_that_the_harness_counts_as_one():
    with pytest.raises(NotImplementedError, match="hopper must run on a CUDA device"):
        hopper(*tensors())


@pytest.mark.parametrize(
    ("mask", "edges"),
    [
        (None, (-OPEN, OPEN)),
        (Full(), (-OPEN, OPEN)),
        (Causal(), (-OPEN, 0)),
        (Causal("bottom_right"), (-OPEN, 3)),
        (Window(2, 1), (-2, 1)),
        (Window(2, -1, "bottom_right"), (1, OPEN)),
    ],
    ids=str,
)
def test_a_mask_is_a_band_of_differences(mask, edges):
    assert band(mask, 5, 8) == edges


def test_rows_that_the_copy_engine_cannot_read_are_copied_and_others_are_not():
    x = torch.zeros(2, 8, 3, 64, dtype=torch.float16)
    assert _readable(x) is x and _readable(y := x.transpose(1, 2)) is y
    for unreadable in (x.mT, x[..., 1:], x.expand(2, 8, 3, 64)[:, :, :1].expand(2, 8, 3, 64)):
        assert _readable(unreadable).is_contiguous()


def test_a_cached_descriptor_is_of_the_same_memory_with_the_same_shape_strides_dtype_and_tile():
    x = torch.zeros(1, 2, 128, 64, dtype=torch.float16)
    turned = x.view(1, 128, 2, 64).transpose(1, 2)
    others = [describe(x, 128), describe(x[:, :1], 64), describe(x.view(torch.bfloat16), 64), describe(turned, 64)]
    same = describe(x, 64)
    assert describe(x.view(1, 2, 128, 64), 64) is same
    assert all(other is not same for other in others)
    assert same.base.data_ptr() == x.data_ptr()


def test_a_cached_descriptor_keeps_no_memory():
    before = _descriptor.cache_info().currsize
    described = describe(torch.zeros(1, 1, 64, 128, dtype=torch.float16), 64)
    assert _descriptor.cache_info().currsize == before + 1 and not isinstance(described.base, torch.Tensor)


def test_heads_are_taken_together_as_far_as_the_cache_holds_them():
    causal, full = Problem(-OPEN, 0, 1.0), Problem(-OPEN, OPEN, 1.0)
    assert section(64, 1 << 20, 24 << 20, causal.flags) == 24 and section(8, 1, 24 << 20, causal.flags) == 8
    assert section(64, 1 << 30, 24 << 20, causal.flags) == 1 and section(64, 1 << 20, 24 << 20, full.flags) == 1


def compiled(D, mask):
    env = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "kernels" / "compile_hopper.py"
    done = subprocess.run([sys.executable, script, str(D), mask], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


PINNED = json.loads((Path(__file__).parent / "kernels" / "compile_hopper.json").read_text())
"""By version of Triton, head dim and mask: bytes of spill stores and loads, and of shared memory, of each kernel. They may only fall."""


@pytest.mark.slow
@pytest.mark.parametrize(("D", "mask"), [(64, "causal"), (128, "full"), (128, "causal"), (256, "full")], ids=str)
def test_kernels_compile_without_a_gpu_to_no_more_than_they_did(D, mask):
    import triton

    got = compiled(D, mask)
    numbers = {k["kernel"]: [k["spill_stores"], k["spill_loads"], k["shared"]] for k in got}
    assert not any(set(k["warnings"]) for k in got), got
    for kernel, pinned in PINNED.get(triton.__version__, {}).get(f"{D} {mask}", {}).items():
        assert all(now <= before for now, before in zip(numbers[kernel], pinned, strict=True)), (
            kernel,
            numbers,
            pinned,
        )


@pytest.mark.gpu
@settings(max_examples=50)
@given(case=cases(DECLARED.supports, max_len=600))
def test_compiled_kernels_are_within_the_limits(judge, case):
    verdict = judge.check(case)
    assert verdict.status == "pass", [str(f) for f in verdict.failures]


@pytest.fixture(scope="module")
def judge():
    with Worker("hopper", device="cuda") as worker:
        yield Judge(worker, DECLARED.contract, DECLARED.supports)


def test_the_region_says_what_the_entry_refuses():
    outside = [{"dtype": "float32"}, {"D": 32, "Dv": 32}, {"dropout": 0.5}, {"softcap": 1.0}, {"scale": -1.0}]
    assert all(DECLARED.supports.refuses(Case(**({"D": 64, "Dv": 64, "dtype": "float16"} | c))) for c in outside)
