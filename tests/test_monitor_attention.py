import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from flashproof.oracles import interpreter


@pytest.fixture(scope="module")
def attention():
    interpreter.enable()
    spec = importlib.util.spec_from_file_location(
        "kernels_attention", Path(__file__).parent / "kernels" / "attention.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    interpreter.disable()


def kinds(monitor):
    return {(v.kind, v.argument) for v in monitor.violations}


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize(
    ("fault", "wanted"),
    [
        ("", set()),
        ("key-tail", {("oob-load", "K")}),
        ("row-tail", {("oob-store", "O"), ("race-store-after-write", "O")}),
        ("lse-padding", {("uninitialised-load", "LSE")}),
        (
            "plain-dq",
            {(f"race-{kind}", "DQ") for kind in ("load-after-write", "store-after-write", "store-after-read")},
        ),
    ],
)
def test_each_memory_fault_of_an_attention_kernel_is_found(attention, fault, wanted):
    q, k, v, do = (random(1, 2, 33, 24) for _ in range(4))
    with interpreter.monitored() as m:
        o, lse = attention.forward(q, k, v, True, fault=fault)
        grads = attention.backward(q, k, v, o, lse, do, True, fault=fault)
    assert kinds(m) == wanted
    assert all(m.unwritten(t) is None for t in (o, *grads))


def test_an_overrun_into_the_next_head_is_seen_when_heads_have_gaps(attention):
    q, v = random(1, 2, 33, 24), random(1, 2, 33, 24)
    k = random(1, 2, 40, 24)[:, :, :33]
    with interpreter.monitored() as m:
        attention.forward(q, k, v, fault="key-tail")
    assert ("gap-load", "K") in kinds(m)
    assert next(v for v in m.violations if v.kind == "gap-load").program[1] == 0


@pytest.mark.parametrize("fault", ["", "key-tail"])
def test_packed_views_with_offsets_are_followed(attention, fault):
    packed = random(1, 33, 3, 2, 24)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    with interpreter.monitored() as m:
        o, _ = attention.forward(q, k, v, fault=fault)
    want = attention.reference(q, k, v, torch.zeros_like(q))[0]
    assert (o - want).abs().max() < 1e-4
    assert bool(m.violations) == bool(fault)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [16, 32])
def test_bytes_moved_are_exactly_what_the_tiling_implies(attention, causal, block):
    q, k, v = (random(1, 2, 33, 24) for _ in range(3))
    with interpreter.monitored() as m:
        attention.forward(q, k, v, causal, block=block)
    tiles = range(-(-33 // block))
    keys = sum(min(33, block * (i + 1)) if causal else 33 for i in tiles)
    assert m.by_arg()["forward_kernel", "K", "load"] == (2 * 24 * 4 * keys, 2 * 24 * keys)
    assert m.by_arg()["forward_kernel", "O", "store"].elements == q.numel()
