"""A capture changes nothing: not the results, not the caller's modes, not its speed; an error in it is told at the end."""

import subprocess
import sys
import time
import weakref

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import flashproof
from flashproof.fuzz import capture as module
from flashproof.fuzz.corpus import load_all
from flashproof.fuzz.masks import Causal


def tensors(*shape, n=3, **kwargs):
    return [torch.randn(*shape, **kwargs) for _ in range(n)]


def test_an_error_of_the_recorder_is_told_at_the_end_and_breaks_nothing(capture, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(module.Recorded, "of", broken)
    q, k, v = tensors(1, 1, 3, 4)
    with capture() as log:
        out = F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v))
    assert "the recorder failed: ZeroDivisionError: planted" in log.summary()


def test_an_error_in_the_hook_breaks_no_backward_pass(capture, monkeypatch):
    monkeypatch.setattr("flashproof.fuzz.recorded.layout_of", lambda *_, **__: 1 / 0)
    q, k, v = tensors(1, 1, 3, 4, requires_grad=True)
    with capture() as log:
        F.scaled_dot_product_attention(q, k, v).sum().backward()
    assert q.grad is not None
    (one,) = log.recorded.values()
    assert "grad_output could not be looked at" in one.call.notes[-1]


@pytest.mark.slow
def test_a_compiled_caller_is_left_alone_and_told(capture):
    q, k, v = tensors(1, 1, 3, 4)
    with capture() as log:
        compiled = torch.compile(
            lambda: F.scaled_dot_product_attention(q, k, v) + 1, backend="aot_eager", fullgraph=True
        )
        assert torch.equal(compiled(), F.scaled_dot_product_attention(q, k, v) + 1)
    assert "traced by torch.compile" in log.summary()


@pytest.mark.slow
def test_torch_compile_still_works_after_its_first_use_inside_a_capture(tmp_path):
    code = f"""
import torch, flashproof
from torch.nn import functional
q = torch.randn(1, 1, 3, 4)
def f():
    return functional.scaled_dot_product_attention(q, q, q) + 1
with flashproof.capture({str(tmp_path / "x")!r}):
    torch.compile(f, backend="aot_eager", fullgraph=True)()
assert torch.equal(torch.compile(f, backend="aot_eager", fullgraph=True)(), f())
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_modes_of_the_caller_do_not_see_the_recorder(capture):
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    q, k, v = tensors(1, 1, 3, 4)
    with Count() as plain:
        F.scaled_dot_product_attention(q, k, v)
    with capture(), Count() as watched:
        F.scaled_dot_product_attention(q, k, v)
    assert plain.calls == watched.calls


def test_recomputed_checkpoints_are_recorded_and_right(capture, folder):
    def block(x):
        return F.scaled_dot_product_attention(x.sin(), x.cos(), x)

    x = torch.randn(1, 2, 6, 4, requires_grad=True)
    with capture():
        (got,) = torch.autograd.grad(checkpoint(block, x, use_reentrant=False).square().sum(), x)
    assert torch.equal(got, torch.autograd.grad(block(x).square().sum(), x)[0])
    assert [r.case.requires_grad for _, r in load_all(folder)] == ["qkv"]


def test_a_further_call_of_a_structure_costs_under_50_microseconds(capture):
    q, k, v = tensors(1, 1, 1, 1)
    fn = flashproof.capture.wrap(lambda q, k, v: q, "cheap", "sdpa")

    def fastest():
        times = []
        for _ in range(200):
            start = time.perf_counter()
            for _ in range(10):
                fn(q, k, v)
            times.append((time.perf_counter() - start) / 10)
        return min(times)

    plain = fastest()
    with capture([]):
        fn(q, k, v)
        assert fastest() - plain < 50e-6


def test_the_model_s_tensors_are_not_kept_alive(capture):
    q, k, v = tensors(1, 1, 3, 4)
    gone = weakref.ref(k)
    with capture():
        F.scaled_dot_product_attention(q, k, v)
        del k
        assert gone() is None


@pytest.mark.gpu
def test_a_cuda_graph_that_is_being_captured_is_left_alone(capture):
    q, k, v = tensors(1, 1, 64, 64, device="cuda", dtype=torch.float16)
    F.scaled_dot_product_attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with capture() as log:
        with torch.cuda.graph(graph):
            F.scaled_dot_product_attention(q, k, v)
        graph.replay()
        F.scaled_dot_product_attention(q, k, v)
    assert "1 calls not recorded: a CUDA graph was being captured" in log.summary()
    assert [r.count for r in log.recorded.values()] == [1]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_call_on_a_gpu_does_not_wait_for_it(capture, folder):
    q, k, v = tensors(1, 2, 64, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    with capture():
        torch.cuda.set_sync_debug_mode("error")
        try:
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    ((_, record),) = load_all(folder)
    assert (record.device, record.case.mask, record.case.dtype) == ("cuda", Causal(), "float16")
