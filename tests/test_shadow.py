import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from flashproof.oracles import interpreter

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


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


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def distance(monitor, tensor, want):
    value, exact = monitor.value(tensor)
    assert exact
    return float((value - want).abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_and_backward_equal_float64_in_every_dtype(attention, dtype):
    q, k, v, do = (random(1, 2, 33, 24, dtype=dtype) for _ in range(4))
    with interpreter.exact() as m:
        o, lse = attention.forward(q, k, v, True)
        grads = attention.backward(q, k, v, o, lse, do, True)
    wanted = attention.reference(q, k, v, do, True)
    assert max(distance(m, t, w) for t, w in zip((o, *grads), wanted, strict=True)) < 1e-13
    assert not m.violations


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_by_autograd_equal_float64(attention, dtype):
    q, k, v = (random(1, 2, 33, 24, dtype=dtype).requires_grad_() for _ in range(3))
    do = random(1, 2, 33, 24, dtype=dtype)
    with interpreter.exact() as m:
        o = attention.Attention.apply(q, k, v, True)
        grads = torch.autograd.grad(o, (q, k, v), do)
    wanted = attention.reference(q, k, v, do, True)
    assert max(distance(m, t, w) for t, w in zip((o, *grads), wanted, strict=True)) < 1e-13


def test_a_scale_that_is_off_by_1e_4_shows_in_bf16(attention):
    q, k, v = (random(1, 1, 16, 16, dtype=torch.bfloat16) for _ in range(3))
    with interpreter.exact() as m:
        o, _ = attention.forward(q, k, v)
    want = attention.reference(q, k, v, torch.zeros_like(q))[0]
    wrong = attention.reference(q.double() * (1 + 1e-4), k, v, torch.zeros_like(q))[0]
    assert distance(m, o, want) < 1e-13
    assert distance(m, o, wrong) > 1e-6


def test_memory_keeps_the_rounded_values(attention):
    q, k, v = (random(1, 1, 16, 16, dtype=torch.bfloat16) for _ in range(3))
    with interpreter.exact() as m:
        o, _ = attention.forward(q, k, v)
    assert torch.equal(o, m.value(o)[0].to(torch.bfloat16))
    assert not torch.equal(o.double(), m.value(o)[0])


CARRIED = {
    "cast": lambda t: t.to(torch.float16).to(torch.float32),
    "clone": lambda t: t.clone(),
    "copy": lambda t: torch.empty_like(t, dtype=torch.float16).copy_(t),
    "view": lambda t: t.view(4, 64).unsqueeze(0).expand(2, 4, 64),
    "transpose": lambda t: t.transpose(2, 3).contiguous(),
    "reshape": lambda t: t.permute(0, 3, 1, 2).reshape(-1),
    "slice": lambda t: t[..., 3:9, ::2],
    "pad": lambda t: torch.nn.functional.pad(t, (0, 3)),
    "zeros": lambda t: torch.zeros(2, *t.shape, dtype=t.dtype).add_(t),
    "zeros_like": lambda t: torch.zeros_like(t) + t,
    "cat": lambda t: torch.cat([t, t.half().float()], 1),
    "sum": lambda t: t.sum(-1),
    "sum to float": lambda t: t.half().sum((0, 2), dtype=torch.float32),
    "scale": lambda t: t * 0.1,
    "scale in place": lambda t: t.clone().mul_(0.1),
    "part in place": lambda t: t.clone().narrow(3, 0, 5).fill_(0.1)._base,
    "softmax": lambda t: torch.softmax(t, -1),
    "matmul": lambda t: t @ t.mT,
    "where": lambda t: torch.where(torch.ones(16, 16, dtype=torch.bool).tril(), t, 0.5),
    "out": lambda t: torch.add(t, t, out=torch.empty_like(t)),
}


@pytest.mark.parametrize("name", CARRIED)
def test_values_are_carried_through_torch_operations(attention, name):
    q, k, v = (random(1, 1, 16, 16, dtype=torch.float16) for _ in range(3))
    with interpreter.exact() as m:
        o, _ = attention.forward(q, k, v)
        base = o.float()
        result = CARRIED[name](base)
    unrounded = attention.reference(q, k, v, torch.zeros_like(q))[0]
    want = {"cast": unrounded, "sum to float": unrounded.sum((0, 2))}.get(name)
    if want is None:
        want = _in_float64(CARRIED[name], unrounded)
    assert distance(m, result, want) < 1e-12


class _in_float64:  # noqa: N801, reads as a function
    """The operation on float64 with its own casts made harmless."""

    def __new__(cls, operation, values):
        with _NoCasts():
            return operation(values)


class _NoCasts(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = {
            k: torch.float64 if isinstance(v, torch.dtype) and v.is_floating_point else v
            for k, v in (kwargs or {}).items()
        }
        return func(*args, **kwargs)


def test_a_random_operation_loses_exactness_and_says_so(attention):
    q, k, v = (random(1, 1, 16, 16) for _ in range(3))
    with interpreter.exact() as m:
        o, _ = attention.forward(q, k, v)
        dropped, _ = torch.native_dropout(o, 0.5, True)
        later = dropped * 2
    assert m.value(o)[1]
    assert not m.value(dropped)[1]
    assert not m.value(later)[1]
    assert torch.equal(m.value(dropped)[0], dropped.double())


def test_random_numbers_are_exactly_what_was_drawn(attention):
    q, k, v = (random(1, 1, 16, 16, dtype=torch.bfloat16) for _ in range(3))
    with interpreter.exact() as m:
        o, _ = attention.forward(q, k, v)
        kept = torch.empty_like(o).bernoulli_(0.5)
        dropped = o * kept
    assert distance(m, dropped, m.value(o)[0] * kept) == 0.0


@pytest.mark.usefixtures("attention")
def test_a_tensor_nobody_calculated_is_not_called_exact():
    with interpreter.exact() as m:
        pass
    assert m.value(torch.ones(2))[1] is False


def test_a_look_at_the_bits_loses_exactness(attention):
    q, k, v = (random(1, 1, 16, 16, dtype=torch.bfloat16) for _ in range(3))
    with interpreter.exact() as m:
        o, _ = attention.forward(q, k, v)
        m.window(o.view(torch.int16))  # as a kernel's argument
        m.window(o)
    assert not m.value(o)[1]


def test_a_gradient_accumulated_from_two_uses_is_exact(attention):
    q, k, v = (random(1, 1, 16, 16, dtype=torch.bfloat16) for _ in range(3))
    leaf = q.clone().requires_grad_()
    with interpreter.exact() as m:
        o = attention.Attention.apply(leaf, k, v, False) + attention.Attention.apply(leaf * 2, k, v, False)
        o.backward(torch.ones_like(o))
    twice = q.double().requires_grad_()
    want = sum(torch.softmax((f * twice) @ k.double().mT / 4, -1) @ v.double() for f in (1, 2))
    (wanted,) = torch.autograd.grad(want.sum(), twice)
    assert distance(m, leaf.grad, wanted) < 1e-13
