"""Form, purity, global state, equal bits, guarded allocations."""

import ctypes

import pytest
import torch

from flashproof.fuzz.case import Case
from flashproof.fuzz.tensors import build
from flashproof.oracles import invariants
from flashproof.oracles.allocations import MARGIN, GuardedAllocations
from flashproof.oracles.finding import Finding
from flashproof.oracles.invariants import Watched, form_of_lse, form_of_output, purity, same_bits


def texts(findings: list[Finding]) -> list[str]:
    return [str(f) for f in findings]


def test_equal_bits_are_no_finding_and_nan_equals_itself() -> None:
    x = {"o": torch.tensor([1.0, float("nan")])}
    assert same_bits("repeat", "twice", x, {"o": x["o"].clone()}) == []


def test_one_bit_is_a_finding_with_its_place() -> None:
    a, b = torch.zeros(2, 2, dtype=torch.bfloat16), torch.zeros(2, 2, dtype=torch.bfloat16)
    b[1, 0] = -0.0
    found = same_bits("repeat", "twice", {"o": a}, {"o": b})
    assert texts(found) == ["o: twice: 1 of 4 elements differ, first at [1, 0]: 0.0, then -0.0"]


def test_lse_must_be_float32_of_heads_and_rows() -> None:
    inputs = build(Case(Hq=2, Lq=3, dtype="bfloat16"))
    assert form_of_lse(torch.zeros(1, 2, 3), inputs) == []
    assert texts(form_of_lse(torch.zeros(1, 3, 2).bfloat16(), inputs)) == [
        "lse: shape must be (1, 2, 3), got (1, 3, 2)",
        "lse: dtype must be float32, got bfloat16",
    ]


def test_output_on_another_device_or_layout_is_a_finding() -> None:
    inputs = build(Case())
    assert [f.oracle for f in form_of_output(torch.zeros(1, 1, 1, 1, device="meta"), inputs.do, inputs)] == ["device"]
    assert [f.oracle for f in form_of_output(torch.zeros(1, 1, 1, 1).to_sparse(), inputs.do, inputs)] == ["type"]


def test_empty_outputs_share_no_storage() -> None:
    inputs = build(Case(Lq=0, Lk=0))
    assert form_of_output(torch.empty(1, 1, 0, 1), inputs.do, inputs) == []


def test_changed_input_and_changed_guard_are_told_apart() -> None:
    inputs = build(Case(Lq=2, D=2))
    assert purity(inputs) == []
    inputs.q[0, 0, 1, 0] = 5.0
    inputs.k.as_strided((3,), (1,), inputs.k.storage_offset())[-1] = 5.0
    assert {(f.oracle, f.tensor) for f in purity(inputs)} == {("purity", "q"), ("guard", "k")}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("default dtype", lambda: torch.set_default_dtype(torch.float64)),
        ("default device", lambda: torch.set_default_device("meta")),
        ("number of threads", lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
        ("grad mode", lambda: torch._C._set_grad_enabled(False)),
        ("deterministic algorithms", lambda: torch.use_deterministic_algorithms(True, warn_only=True)),
        ("float32 matmul precision", lambda: torch.set_float32_matmul_precision("medium")),
        ("anomaly detection", lambda: torch.autograd.set_detect_anomaly(True, check_nan=False)),
        ("random number generator", lambda: torch.manual_seed(123)),
    ],
)
def test_changed_global_state_is_found_and_restored(name: str, change: object) -> None:
    before = [s.read() for s in invariants.SETTINGS]
    watched = Watched(change, random=False)  # type: ignore[arg-type]
    watched()
    assert [f.tensor for f in watched.findings] == [name]
    assert all(
        torch.equal(a, s.read()) if isinstance(a, torch.Tensor) else a == s.read()
        for a, s in zip(before, invariants.SETTINGS, strict=True)
    )


def test_global_state_is_restored_when_the_target_raises() -> None:
    def fn() -> None:
        torch.set_default_dtype(torch.float64)
        raise RuntimeError

    watched = Watched(fn, random=False)
    with pytest.raises(RuntimeError):
        watched()
    assert torch.get_default_dtype() == torch.float32


def test_random_numbers_may_be_drawn_where_there_is_dropout() -> None:
    watched = Watched(lambda: torch.rand(1), random=True)
    watched()
    assert watched.findings == []


def test_fresh_memory_is_poisoned_and_filled_memory_is_not() -> None:
    with GuardedAllocations():
        made = [
            torch.empty(2, 3),
            torch.empty_like(torch.ones(2)),
            torch.ones(2).new_empty(3),
            torch.empty_strided((2,), (2,)),
        ]
        filled = [
            torch.zeros(3),
            torch.full((2,), 7.0),
            torch.ones(1, dtype=torch.int64),
            torch.zeros(2, requires_grad=True),
        ]
    assert all(bool(x.isnan().all()) for x in made)
    assert [x.tolist() for x in filled] == [[0.0, 0.0, 0.0], [7.0, 7.0], [1], [0.0, 0.0]]


def test_guarded_tensors_look_like_plain_ones() -> None:
    like = torch.ones(2, 3).t()
    with GuardedAllocations():
        x, y = torch.empty_like(like), torch.empty(0, 4)
    assert (x.stride(), x.dtype, x._base, y.shape) == (like.stride(), like.dtype, None, (0, 4))


@pytest.mark.parametrize(
    ("offset", "words"),
    [(-4, "4 bytes before its start"), (32, "0 bytes after its end"), (40, "8 bytes after its end")],
)
def test_a_write_outside_an_allocation_is_found(offset: int, words: str) -> None:
    with GuardedAllocations() as guarded:
        x = torch.empty(8)
        ctypes.memset(x.data_ptr() + offset, 0, 4)
    (found,) = guarded.findings()
    assert found.key == "guard:workspace"
    assert words in found.message
    assert f"(8,) float32 by empty made at {__file__}:" in found.message


def test_allocations_in_a_backward_pass_are_guarded() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return 2 * x

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            return torch.empty_like(grad)

    x = torch.ones(3, requires_grad=True)
    with GuardedAllocations() as guarded:
        (grad,) = torch.autograd.grad(Double.apply(x).sum(), x)
    assert bool(grad.isnan().all())
    assert any("by empty_like" in str(a) for a in guarded.made)


def test_margins_keep_the_alignment_of_an_allocation() -> None:
    with GuardedAllocations():
        assert torch.empty(1000).data_ptr() % 64 == 0
    assert MARGIN % 512 == 0
