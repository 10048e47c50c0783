"""Limits: where they are zero, what they must cover, what they must refuse."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from flashproof.ci.calibrate import Tally, campaign
from flashproof.ci.controls import CONTROLS, count
from flashproof.ci.draw import DTYPES, Drawn, draw
from flashproof.fuzz.case import Case
from flashproof.fuzz.masks import Padding, Random
from flashproof.fuzz.region import Region
from flashproof.fuzz.strategies import CHOICES, FEATURES, decode, menu_of
from flashproof.fuzz.tensors import build
from flashproof.impls.emulation import Arithmetic, run
from flashproof.oracles.contract import Contract, contract_for
from flashproof.oracles.elements import ValueReport, judge_problem
from flashproof.oracles.exact import Problem, Reference
from flashproof.oracles.limits import limits
from flashproof.oracles.spread import partial_sums
from flashproof.oracles.taint import separate


def normal(
    dtype: str = "float32", *, q: tuple[int, ...] = (1, 2, 9, 16), lk: int = 20, groups: int = 1, seed: int = 0
) -> Problem:
    g = torch.Generator().manual_seed(seed)
    B, H, _, D = q
    shapes = (q, (B, H // groups, lk, D), (B, H // groups, lk, D), q)
    return Problem(*(torch.randn(*s, generator=g).to(DTYPES[dtype]) for s in shapes), scale=D**-0.5)


def verdict(p: Problem, outputs: dict[str, Tensor], spec: str = "") -> ValueReport:
    return judge_problem(p, outputs, contract_for(spec, str(p.q.dtype).removeprefix("torch.")))


def rejected(p: Problem, outputs: dict[str, Tensor], spec: str = "") -> set[str]:
    """Tensors with a failing finding."""
    return {f.tensor for f in verdict(p, outputs, spec).findings if f.severity == "fail"}


def test_limits_have_the_shapes_of_the_outputs() -> None:
    p = replace(normal(q=(2, 6, 5, 8), groups=3), bias=torch.zeros(1, 6, 1, 20))
    r = Reference(p)
    b = limits(r, contract_for()).b
    assert {n: x.shape for n, x in b.items()} == {n: tuple(x.shape) for n, x in r.outputs().items()}


def test_limits_are_zero_where_nothing_contributes() -> None:
    keep = torch.ones(1, 1, 9, 20, dtype=torch.bool)
    keep[..., 3, :] = False
    keep[..., 7] = False
    b = limits(Reference(replace(normal("bfloat16"), keep=keep)), contract_for("", "bfloat16")).b
    assert not b["o"][:, :, 3].any()
    assert not b["dq"][:, :, 3].any()
    assert not b["dk"][:, :, 7].any()
    assert not b["dv"][:, :, 7].any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_no_limit_is_nan_or_negative(dtype: str) -> None:
    menu = menu_of(Region(dtypes=(dtype,)), 64, FEATURES)
    drawn = np.random.default_rng(7).integers(0, 256, (250, len(CHOICES)), dtype=np.uint8)
    contracts = [contract_for(spec, dtype) for spec in ("", "lowp")] + [Contract.exact()]
    for row in drawn:
        case = decode(menu, row.tobytes())
        clean, _ = separate(Problem.of(build(case)), contracts[0])
        r = Reference(clean)
        for contract in contracts:
            for name, limit in limits(r, contract).b.items():
                assert (limit >= 0).all(), (case, contract.spec, name)


def test_a_mask_filled_with_the_lowest_float64_keeps_o_within_the_range_of_v() -> None:
    case = Case(dtype="float64", D=1, Dv=2, mask=Padding((0,)), mask_form="additive", mask_fill="min")
    p = Problem.of(build(case))
    b = limits(Reference(p), contract_for("", "float64")).b
    assert (b["o"] <= 2.1 * p.v.abs().numpy()).all()
    assert not rejected(p, {"o": p.v})
    assert rejected(p, {"o": 4 * p.v}) == {"o"}


@pytest.mark.parametrize("name", ["lse", "dq", "dk", "dv", "dbias"])
def test_where_a_limit_is_infinite_nothing_is_promised(name: str) -> None:
    scarce = Random(percent=10, seed=1, axes="hq")
    case = Case(Lq=37, Lk=28, D=2, Dv=3, dtype="float64", mask=scarce, mask_form="additive", mask_fill="min",
                mask_axes="bq", data="negative", layout_mask="expand", seed=3729)  # fmt: skip
    allowed = limits(Reference(Problem.of(build(case))), contract_for("", "float64"))
    unlimited = np.isinf(allowed.b[name])
    assert unlimited.any()
    assert allowed.loose[name][unlimited].all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_limits_grow_with_every_unit_of_the_contract(dtype: str) -> None:
    p = replace(normal(dtype, q=(1, 4, 9, 16), groups=2), bias=torch.randn(1, 1, 9, 20).to(DTYPES[dtype]))
    r, base = Reference(p), contract_for("", dtype)
    before = limits(r, base).b
    units = [
        "dot_u",
        "q_u",
        "s_u",
        "exp_u",
        "p_u",
        "dp_u",
        "ds_u",
        "p_in_ds_u",
        "out_u",
        "lse_u",
        "gqa_u",
        "dkv_acc_u",
        "dq_acc_u",
    ]
    for unit in units:
        after = limits(r, base.but(**{unit: 0.01})).b
        assert all((after[n] >= before[n]).all() for n in before), unit
        assert any((after[n] > before[n]).any() for n in before), unit


def test_narrow_accumulators_of_one_gradient_leave_the_other_as_it_is() -> None:
    r = Reference(normal("float16", q=(1, 2, 40, 16)))
    base = contract_for("", "float16")
    before = limits(r, base).b
    for declared, wider in (("dkv_acc_u", {"dk", "dv"}), ("dq_acc_u", {"dq"})):
        after = limits(r, contract_for(f"{declared}=io,acc_eta=io_eta", "float16")).b
        assert {n for n in before if (after[n] > before[n]).any()} == wider


def test_partial_sums_of_a_walk_have_the_size_that_is_expected() -> None:
    steps = np.random.default_rng(0).standard_normal((20_000, 6)) + 0.3
    sums = steps.cumsum(-1)
    expected = partial_sums(6, sums[:, -1] ** 2, np.full(len(steps), 6.0))
    assert (sums[:, :-1] ** 2).sum(-1).mean() == pytest.approx(expected.mean(), rel=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fill", ["min", "-1e4"])
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_finite_mask_fills_leave_limits_that_reject_zeros_and_a_lost_key(dtype: str, fill: str, share: float) -> None:
    value = torch.finfo(DTYPES[dtype]).min if fill == "min" else -1e4
    drawn = torch.rand(1, 1, 9, 20, generator=torch.Generator().manual_seed(1)) < share
    drawn[..., 0] = False
    p = replace(normal(dtype), bias=torch.zeros(1, 1, 9, 20).masked_fill(drawn, value).to(DTYPES[dtype]))
    answer = run(p, Arithmetic())
    assert not rejected(p, answer)
    for name, x in answer.items():
        zeros = verdict(p, {name: torch.zeros_like(x)}).wrong[name]
        missed = ~zeros & (x.float().abs() > 0.05 * x.float().abs().max())
        assert not missed.any(), name
    keep = torch.ones(1, 1, 9, 20, dtype=torch.bool)
    keep[..., 0] = False
    lost = run(replace(p, keep=keep), Arithmetic())
    assert rejected(p, lost) == {"o", "lse", "dq", "dk", "dv", "dbias"}


def test_a_row_that_is_filled_with_the_smallest_number_throughout_may_be_answered_but_not_by_nan() -> None:
    fill = torch.finfo(torch.float32).min
    for keys in (1, 20):
        p = replace(normal(lk=keys), bias=torch.full((1, 1, 9, keys), fill))
        natural, base_two = run(p, Arithmetic(algorithm="textbook")), run(p, Arithmetic())
        assert natural["o"].any()
        assert not base_two["o"].any()
        assert not rejected(p, natural)
        assert not rejected(p, base_two)
        assert rejected(p, {"o": torch.full_like(natural["o"], math.nan)}) == {"o"}


def test_lazy_rescaling_needs_its_slack_declared_and_then_conforms() -> None:
    for seed in range(20):
        p = draw(seed, "float32", data="huge", kind="none").problem
        assert not rejected(p, run(p, Arithmetic(lazy=8.0)), "kv_tile=16,rescale_slack=5.6")


# The holes that an earlier campaign found in the limits themselves.


def test_partial_sums_rounded_per_query_head_conform_when_declared() -> None:
    seen = 0
    for seed in range(40):
        p = draw(seed, "bfloat16", data="normal", kind="none", group=3).problem
        faulty = run(p, Arithmetic(faults=frozenset(["gqa_lowp"])))
        assert not rejected(p, faulty, "gqa_u=io,gqa_eta=io_eta,kv_tile=16")
        seen += bool(rejected(p, faulty, "gqa_u=0,gqa_eta=0,delta=do.o,kv_tile=16"))
    assert seen


def test_partial_sums_that_overflow_before_they_cancel_are_unconstrained() -> None:
    p = normal("float16", q=(1, 2, 1, 4), lk=1, groups=2)
    p = replace(
        p,
        do=torch.tensor([60000.0, -60000.0]).view(1, 2, 1, 1).expand(1, 2, 1, 4).half(),
        keep=torch.ones(1, 1, 1, 1, dtype=torch.bool),
    )
    nan = {"dv": torch.full((1, 1, 1, 4), math.nan, dtype=torch.float16)}
    assert rejected(p, nan, "gqa_u=0") == {"dv"}
    low = contract_for("gqa_u=io", "float16").but(out_max=5e4)
    assert not judge_problem(p, nan, low).findings


@pytest.mark.parametrize("tensor", ["dq", "dv"])
def test_exponentials_below_the_smallest_normal_may_be_flushed_in_bfloat16(tensor: str) -> None:
    """P of 2^-127 times dO of 2^40 is 2^-87, far above the subnormals of bfloat16, and is lost when P is flushed."""
    q, k = torch.tensor([[1.0]]), torch.tensor([[0.0], [-88.1]])
    v, do = torch.tensor([[1.0], [-1.0]]), torch.tensor([[2.0**40]])
    p = Problem(*(x.view(1, 1, *x.shape).bfloat16() for x in (q, k, v, do)))
    want = Reference(p).outputs()
    assert float(want["dv"][0, 0, 1, 0]) > 2.0**-90
    flushed = want["dv"].clone()
    flushed[0, 0, 1] = 0
    out = {"dv": flushed.bfloat16()} if tensor == "dv" else {"dq": torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16)}
    assert not rejected(p, out)


def test_huge_scores_with_narrow_dots_have_an_error_that_is_not_clamped() -> None:
    for seed in range(30):
        p = draw(seed, "float32", data="huge", kind="none").problem
        assert not rejected(p, run(p, Arithmetic(dots="bf16", kv_tile=32)), "bf16,kv_tile=16")


@pytest.mark.parametrize("stage", ["scores", "dP"])
def test_an_overflow_of_a_stored_masked_entry_frees_its_row(stage: str) -> None:
    p = normal("float16", q=(1, 1, 2, 4), lk=3)
    big = torch.zeros(1, 1, 3, 4)
    big[..., 2, :] = 250.0
    keep = torch.tensor([True, True, False]).view(1, 1, 1, 3)
    p = replace(
        p, k=(p.k + big).half() if stage == "scores" else p.k, v=(p.v + big).half() if stage == "dP" else p.v, keep=keep
    )
    p = replace(p, q=torch.full_like(p.q, 70.0)) if stage == "scores" else replace(p, do=torch.full_like(p.do, 70.0))
    nan = {"dq": torch.full((1, 1, 2, 4), math.nan, dtype=torch.float16)}
    assert rejected(p, nan) == {"dq"}
    assert not rejected(p, nan, "lowp")


def test_a_rounded_p_inside_ds_may_underflow_in_float16() -> None:
    """P = 2^-26 becomes 0 in float16; times dP of 1e4 that is 1.5e-4."""
    q, k, v, do = (
        torch.ones(1, 1),
        torch.tensor([[0.0], [-18.02]]),
        torch.tensor([[0.0], [100.0]]),
        torch.full((1, 1), 100.0),
    )
    p = Problem(*(x.view(1, 1, *x.shape).half() for x in (q, k, v, do)))
    out = Reference(p).outputs()
    lost = {"dk": torch.zeros(1, 1, 2, 1, dtype=torch.float16)}
    assert float(out["dk"].abs().max()) > 1e-4
    assert rejected(p, lost, "ds_eta=0,p_in_ds_u=io") == {"dk"}
    assert not rejected(p, lost, "p_in_ds_u=io,p_in_ds_eta=io_eta")


def test_scores_stored_again_after_the_softcap_conform_to_lowp() -> None:
    for seed in range(40):
        p = draw(seed, ("float16", "bfloat16")[seed % 2], kind="softcap").problem
        assert not rejected(p, run(p, Arithmetic(algorithm="narrow")), "lowp,kv_tile=16")


def test_a_scaled_ds_underflows_elsewhere_and_has_its_own_field() -> None:
    p = normal("float16", q=(1, 1, 8, 16))
    p = replace(p, do=p.do * 2e-4, scale=2.0**-10)
    r = Reference(p)
    scaled = torch.from_numpy(np.array(r.ds * r.scale)).half().double() @ p.k.double()
    assert rejected(p, {"dq": scaled.half()}) == {"dq"}
    assert not rejected(p, {"dq": scaled.half()}, "ds_scaled=true")


# What the limits are for.


@pytest.mark.slow
def test_no_conforming_implementation_is_rejected_on_1000_seeded_cases() -> None:
    tally: Tally = campaign(1000, first_seed=1, per_case=1)
    assert not tally.violations, [f"{name}: {drawn}: {finding}" for name, drawn, finding in tally.violations]
    assert tally.cases == 1000
    assert tally.tensors > 4000


@pytest.mark.slow
def test_every_negative_control_that_differs_is_rejected() -> None:
    missed: list[str] = []
    seen = count(60, report=missed.append)
    assert not missed
    for control in CONTROLS:
        assert seen[control, "rejected"] == seen[control, "differs"] > 0.5 * seen[control, "tried"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_lost_key_among_ten_thousand_shows_in_every_dtype(dtype: str) -> None:
    p = normal(dtype, q=(1, 1, 4, 64), lk=10_000)
    answer = Reference(p).outputs()
    keep = torch.ones(1, 1, 1, 10_000, dtype=torch.bool)
    keep[..., -1] = False
    lost = Reference(replace(p, keep=keep)).outputs()
    io = DTYPES[dtype]
    assert not rejected(p, {n: x.float() if n == "lse" else x.to(io) for n, x in answer.items()})
    assert {"dk", "dv"} <= rejected(p, {n: x.float() if n == "lse" else x.to(io) for n, x in lost.items()})


def test_the_exact_contract_sees_a_constant_that_is_written_short() -> None:
    p = normal()
    p = Problem(p.q.double(), p.k.double(), p.v.double(), p.do.double() if p.do is not None else None, scale=p.scale)
    strict = Contract.exact()
    assert not judge_problem(p, Reference(p).outputs(), strict).findings
    for short, fails in ((1.44269504, False), (1.4427, True)):
        off = Reference(replace(p, scale=p.scale * short / 1.4426950408889634)).outputs()
        assert bool(judge_problem(p, {n: off[n] for n in ("o", "dv")}, strict).findings) == fails


def test_the_reference_itself_passes_the_exact_contract_on_every_regime() -> None:
    for seed in range(60):
        drawn: Drawn = draw(seed, "float32")
        other = run_float64(drawn.problem)
        findings = judge_problem(drawn.problem, other, Contract.exact(0.0)).findings
        assert not findings, (str(drawn), [str(f) for f in findings])


def run_float64(p: Problem) -> dict[str, Tensor]:
    """Attention in float64 by another route: keys in reverse order, softmax by torch."""
    keys = torch.arange(p.k.shape[2] - 1, -1, -1)
    groups = p.q.shape[1] // p.k.shape[1]
    k, v = (x.double()[:, :, keys].repeat_interleave(groups, 1) for x in (p.k, p.v))
    s = (p.q.double() @ k.mT) * p.scale
    s = p.softcap * torch.tanh(s / p.softcap) if p.softcap else s
    full = s.shape
    s = s if p.bias is None else s + p.bias.expand(full).double()[..., keys]
    s = s if p.keep is None else s.masked_fill(~p.keep.expand(full)[..., keys], -math.inf)
    o = torch.softmax(s, -1).nan_to_num() @ v
    return {"o": o, "lse": torch.logsumexp(s, -1)}
