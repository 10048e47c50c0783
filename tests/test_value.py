"""The value verdict: its sentences, non-finite entries, rows with no key, shapes, statistics, dropout."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashproof.fuzz.case import Case
from flashproof.fuzz.masks import Causal
from flashproof.fuzz.tensors import build
from flashproof.impls.emulation import Arithmetic, broken, run
from flashproof.oracles.contract import contract_for
from flashproof.oracles.elements import ValueReport, judge_problem
from flashproof.oracles.exact import Problem, Reference
from flashproof.oracles.identities import judge_unknown_dropout
from flashproof.oracles.taint import separate
from flashproof.oracles.value import judge_values

LEAKY = "masked_nonfinite=may_leak"


def normal(
    dtype: torch.dtype = torch.float32, lq: int = 6, lk: int = 10, groups: int = 1, seed: int = 0, B: int = 1
) -> Problem:
    g = torch.Generator().manual_seed(seed)
    shapes = ((B, 2, lq, 8), (B, 2 // groups, lk, 8), (B, 2 // groups, lk, 8), (B, 2, lq, 8))
    return Problem(*(torch.randn(*s, generator=g).to(dtype) for s in shapes), scale=8**-0.5)


def judge(p: Problem, outputs: dict[str, Tensor], spec: str = "", generic: bool = False) -> ValueReport:
    return judge_problem(p, outputs, contract_for(spec, str(p.q.dtype).removeprefix("torch.")), generic=generic)


def keys(report: ValueReport) -> set[str]:
    return {f.key for f in report.findings}


def put(x: Tensor, at: tuple[int, ...], value: float) -> Tensor:
    y = x.clone()
    y[at] = value
    return y


def test_a_right_answer_has_no_findings_and_a_budget_below_one() -> None:
    p = normal()
    report = judge(p, run(p, Arithmetic()), generic=True)
    assert not report.findings
    assert not report.wrong
    assert all(0 < b < 1 for b in report.budget.values())
    assert set(report.zrms) == {"o", "dq", "dk", "dv", "lse"}


def test_a_wrong_element_is_named_with_error_limit_got_and_want() -> None:
    p = normal()
    out = run(p, Arithmetic())
    report = judge(p, out | {"dk": put(out["dk"], (0, 1, 3, 2), 4.0)})
    (finding,) = report.findings
    want = float(Reference(p).outputs()["dk"][0, 1, 3, 2])
    assert finding.key == "value:dk"
    assert finding.index == (0, 1, 3, 2)
    assert finding.message.startswith(f"error {abs(4 - want):.1f}e0 exceeds limit ")
    assert finding.message.endswith(f" at [0, 1, 3, 2]: got 4, want {want:.3g}")
    assert finding.details["count"] == 1
    assert report.wrong["dk"].nonzero().tolist() == [[0, 1, 3, 2]]


def test_got_and_want_show_as_many_digits_as_they_need_to_differ() -> None:
    p = normal()
    out = run(p, Arithmetic())
    (finding,) = judge(p, {"lse": out["lse"] * (1 + 2e-5)}).findings
    got, want = finding.message.split("got ")[1].split(", want ")
    assert got != want


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tensor", ["o", "lse", "dq", "dk", "dv"])
def test_a_non_finite_entry_is_found_wherever_the_answer_is_finite(tensor: str, value: float) -> None:
    p = normal()
    out = run(p, Arithmetic())
    at = (0, 1, 2) if tensor == "lse" else (0, 1, 2, 3)
    report = judge(p, {tensor: put(out[tensor], at, value)})
    assert keys(report) == {f"nonfinite:{tensor}"}
    assert report.budget[tensor] == math.inf


def test_an_infinite_want_accepts_nothing_but_itself() -> None:
    """|x - r| <= atol + rtol * |r| would accept anything where r is infinite."""
    p = replace(normal(), keep=torch.tensor([False] + [True] * 5).view(1, 1, 6, 1))
    out = run(p, Arithmetic())
    assert not judge(p, {"lse": out["lse"]}).findings
    for wrong in (0.0, 1e30, math.inf, math.nan):
        assert keys(judge(p, {"lse": put(out["lse"], (0, 0, 0), wrong)})) == {"dead-row:lse"}


def test_a_float16_answer_beyond_the_largest_number_may_be_infinite_with_its_sign() -> None:
    p = normal(torch.float16, lk=1)
    p = replace(p, v=torch.full_like(p.v, 6e4), do=torch.full_like(p.do, 2e4) if p.do is not None else None)
    out = run(p, Arithmetic())
    assert out["dv"].isinf().all()
    assert not judge(p, {"dv": out["dv"]}).findings
    assert keys(judge(p, {"dv": -out["dv"]})) == {"nonfinite:dv"}


def test_shape_mismatch_is_a_finding_and_no_crash() -> None:
    p = normal(groups=2)
    out = run(p, Arithmetic())
    report = judge(p, out | {"dk": out["dk"].repeat(1, 2, 1, 1), "lse": out["lse"].unsqueeze(-1)}, generic=True)
    assert keys(report) == {"shape:dk", "shape:lse"}
    assert report.findings[0].message == "shape must be [1, 2, 6], got [1, 2, 6, 1]"


def test_missing_outputs_are_not_judged() -> None:
    p = normal()
    assert set(judge(p, {"lse": run(p, Arithmetic())["lse"]}).budget) == {"lse"}


# Rows with no allowed key.


def dead() -> tuple[Problem, dict[str, Tensor]]:
    """Row 0 of every head sees no key."""
    p = replace(normal(), keep=torch.tensor([False] + [True] * 5).view(1, 1, 6, 1))
    return p, run(p, Arithmetic())


def test_rows_without_a_key_must_be_exactly_zero() -> None:
    p, out = dead()
    assert not judge(p, out).findings
    for tensor in ("o", "dq"):
        report = judge(p, {tensor: put(out[tensor], (0, 1, 0, 3), 1e-30)})
        assert keys(report) == {f"dead-row:{tensor}"}
        assert report.findings[0].message == "row with no allowed key is wrong at [0, 1, 0, 3]: got 1e-30, want 0"


def test_a_declared_nan_policy_wants_nan_there_and_right_values_elsewhere() -> None:
    p, out = dead()
    nan = torch.where(torch.arange(6).view(6, 1) == 0, torch.tensor(math.nan), out["o"])
    assert not judge(p, {"o": nan}, "dead_rows=nan").findings
    assert keys(judge(p, {"o": out["o"]}, "dead_rows=nan")) == {"dead-row:o"}
    assert keys(judge(p, {"o": put(nan, (0, 0, 3, 0), 9.0)}, "dead_rows=nan")) == {"value:o"}


def test_a_declared_mean_policy_wants_the_mean_of_v_there() -> None:
    p, out = dead()
    mean = torch.where(torch.arange(6).view(6, 1) == 0, p.v.mean(2, keepdim=True), out["o"])
    assert not judge(p, {"o": mean}, "dead_rows=mean").findings
    assert keys(judge(p, {"o": out["o"]}, "dead_rows=mean")) == {"dead-row:o"}


def test_the_lse_of_such_rows_follows_its_own_policy() -> None:
    p, out = dead()
    plus = torch.where(out["lse"].isinf(), torch.tensor(math.inf), out["lse"])
    assert not judge(p, {"lse": plus}, "dead_lse=+inf").findings
    assert keys(judge(p, {"lse": out["lse"]}, "dead_lse=+inf")) == {"dead-row:lse"}
    assert not judge(p, {"lse": put(plus, (0, 0, 0), 7.0)}, "dead_lse=any").findings


# NaN and Inf in the inputs.


def poisoned(name: str, at: tuple[int, ...], value: float = math.nan, causal: bool = False) -> Problem:
    p = normal(lq=6, lk=6)
    p = replace(p, keep=torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()) if causal else p
    return replace(p, **{name: put(getattr(p, name), at, value)})


def test_a_nan_in_a_row_of_q_must_show_in_its_row_and_nowhere_else_in_o() -> None:
    p = poisoned("q", (0, 1, 2, 3))
    out = run(p, Arithmetic(algorithm="textbook"))
    assert out["o"][0, 1, 2].isnan().all()
    assert not judge(p, out).findings
    swallowed = judge(p, {"o": out["o"].nan_to_num()})
    assert keys(swallowed) == {"nonfinite:o"}
    assert "finite where a NaN or Inf input must show" in swallowed.findings[0].message
    assert swallowed.findings[0].want != swallowed.findings[0].want
    assert keys(judge(p, {"o": put(out["o"], (0, 1, 3, 0), math.nan)})) == {"nonfinite:o"}


def test_untainted_elements_are_held_to_their_limits() -> None:
    p = poisoned("v", (0, 0, 2, 3))
    out = run(p, Arithmetic())
    assert not judge(p, out).findings
    assert keys(judge(p, {"o": put(out["o"], (0, 0, 1, 4), 5.0)})) == {"value:o"}
    assert keys(judge(p, {"o": put(out["o"], (0, 1, 1, 3), 5.0)})) == {"value:o"}


def test_an_infinity_in_v_must_show_too() -> None:
    p = poisoned("v", (0, 0, 2, 3), math.inf)
    assert keys(judge(p, {"o": torch.zeros_like(p.q)})) >= {"nonfinite:o"}


def masked_key(value: float = math.nan) -> Problem:
    """Key 9 is NaN in k and v, and masked by every row."""
    p = normal()
    keep = (torch.arange(10) < 9).view(1, 1, 1, 10)
    return replace(p, k=put(p.k, (0, 0, 9, 1), value), v=put(p.v, (0, 0, 9, 1), value), keep=keep)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_key_that_every_row_masks_must_not_leak_unless_declared(value: float) -> None:
    p = masked_key(value)
    out = run(p, Arithmetic())
    assert out["o"].isnan().any()
    assert "nonfinite:o" in keys(judge(p, {"o": out["o"]}))
    assert not judge(p, out, LEAKY).findings
    clean = run(separate(p, contract_for())[0], Arithmetic())
    assert not judge(p, clean).findings


def test_where_nan_may_reach_anything_a_nan_elsewhere_is_right() -> None:
    p = normal()
    p = replace(p, q=put(p.q, (0, 0, 3, 0), math.nan))
    out = run(p, Arithmetic())
    out = out | {"o": put(out["o"], (0, 0, 2, 0), math.nan)}
    assert keys(judge(p, out)) == {"nonfinite:o"}
    assert not keys(judge(p, out, "nonfinite=any"))


def test_a_leak_of_one_head_into_another_is_found_even_where_leaks_are_declared() -> None:
    p = masked_key()
    out = run(p, Arithmetic())
    assert "nonfinite:o" in keys(judge(p, {"o": put(out["o"], (0, 1, 2, 2), math.nan)}, LEAKY))


def test_a_key_that_some_rows_mask_may_reach_all_of_them() -> None:
    p = poisoned("v", (0, 0, 5, 1), causal=True)
    out = run(p, Arithmetic())
    assert out["o"][0, 0, 0].isnan().any()
    assert not judge(p, out).findings


def test_non_finite_inputs_of_every_tensor_are_judged_without_false_alarm() -> None:
    for seed in range(40):
        g = torch.Generator().manual_seed(seed)
        name = ("q", "k", "v", "do")[seed % 4]
        p = normal(groups=1 + seed // 4 % 2, seed=seed)
        flat = int(torch.randint(0, getattr(p, name).numel(), (1,), generator=g))
        bad = getattr(p, name).clone()
        bad.view(-1)[flat] = (math.nan, math.inf, -math.inf)[seed % 3]
        p = replace(
            p, **{name: bad}, keep=torch.ones(1, 1, 6, 10, dtype=torch.bool).tril(4), softcap=(0.0, 5.0)[seed // 8 % 2]
        )
        for algorithm in ("flash", "textbook"):
            report = judge(p, run(p, Arithmetic(algorithm=algorithm, kv_tile=4, q_tile=4)))
            assert not report.findings, (seed, name, algorithm, [str(f) for f in report.findings])


# Statistics.


def test_errors_larger_than_roundings_explain_warn_on_generic_data_only() -> None:
    p = normal(torch.bfloat16, lq=40, lk=700)
    out = run(p, broken(Arithmetic(kv_tile=16), "acc_bf16"))
    spec = "delta=do.o,kv_tile=16"
    (finding,) = [f for f in judge(p, {"o": out["o"]}, spec, generic=True).findings if f.oracle == "statistical"]
    assert finding.severity == "warning"
    assert not [f for f in judge(p, {"o": out["o"]}, spec).findings if f.oracle == "statistical"]


def test_dbias_from_the_rounded_weights_is_as_large_as_expected() -> None:
    p = normal(torch.float16, lq=8, lk=8)
    p = replace(p, q=p.q * 10, do=p.do * 100, bias=torch.zeros(1, 1, 8, 8, dtype=torch.float16))
    out = run(p, broken(Arithmetic(), "ds_from_pc"))
    assert judge(p, out, "p_in_ds_u=io,p_in_ds_eta=io_eta", generic=True).zrms["dbias"] < 1.5
    assert judge(p, out, "", generic=True).zrms["dbias"] > 10


def test_rows_that_may_answer_anything_are_no_statistics() -> None:
    p = replace(
        normal(lq=30, lk=20), keep=torch.ones(1, 1, 30, 20, dtype=torch.bool).tril(-10)
    )  # ten rows without a key
    out = run(p, Arithmetic())
    out["o"][..., :10, :] = p.v.mean(-2, keepdim=True)
    assert "o" not in judge(p, out, "dead_rows=mean", generic=True).zrms
    assert "o" in judge(p, run(p, Arithmetic()), generic=True).zrms


@pytest.mark.parametrize("sizes", [{"lq": 0, "lk": 70}, {"lq": 70, "lk": 0}])
def test_narrow_accumulators_without_a_tile_are_judged(sizes: dict[str, int]) -> None:
    p = normal(torch.bfloat16, **sizes)
    report = judge(p, run(p, Arithmetic()), "dkv_acc_u=io,dq_acc_u=io,acc_eta=io_eta", generic=True)
    assert not report.findings


def test_few_elements_are_no_statistics() -> None:
    p = normal(lq=1, lk=2)
    assert "o" not in judge(p, run(p, Arithmetic()), generic=True).zrms


# Dropout.


def dropped(rate: float = 0.5, **changes: object) -> tuple[Problem, Problem]:
    """A problem and the same with a keep mask."""
    p = replace(normal(lq=20, lk=30), **changes)  # type: ignore[arg-type]
    keep = torch.rand(1, 2, 20, 30, generator=torch.Generator().manual_seed(9)) >= rate
    return p, replace(p, dropout=keep.double() / (1 - rate))


def test_a_known_dropout_mask_is_judged_element_by_element() -> None:
    plain, p = dropped()
    assert not judge(p, run(p, Arithmetic())).findings
    assert keys(judge(p, run(plain, Arithmetic()))) >= {"value:o", "value:dv", "value:dq"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_unknown_dropout_mask_passes_whatever_it_was(dtype: torch.dtype) -> None:
    bias = torch.randn(1, 1, 1, 30, generator=torch.Generator().manual_seed(1))
    for changes in ({}, {"softcap": 2.0}, {"bias": bias.to(dtype)}, {"dlse": torch.ones(1, 2, 20)}):
        plain, p = dropped(0.3, **changes)
        tensors = {n: getattr(plain, n).to(dtype) for n in ("q", "k", "v", "do")}
        out = run(replace(p, **tensors), Arithmetic())
        report = judge_unknown_dropout(
            replace(plain, **tensors), out, contract_for("", str(dtype).removeprefix("torch.")), 0.3
        )
        assert not report.findings, [str(f) for f in report.findings]


UNKNOWN = {
    "dv forgets a row": (lambda out: {"dv": out["dv"] * 1.01}, "identity:dv"),
    "dk without its scale": (lambda out: {"dk": out["dk"] * 1.5}, "identity:dk"),
    "o beyond what any mask gives": (lambda out: {"o": out["o"] + 9.0}, "value:o"),
    "lse": (lambda out: {"lse": out["lse"] + 1.0}, "value:lse"),
    "dbias": (lambda out: {"dbias": out["dbias"] + 0.5}, "identity:dbias"),
    "nan": (lambda out: {"dq": out["dq"] * math.nan}, "nonfinite:dq"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_dropout_mask_hides_no_broken_identity(name: str) -> None:
    change, key = UNKNOWN[name]
    plain, p = dropped(0.3, bias=torch.zeros(1, 1, 20, 30))
    out = run(p, Arithmetic())
    report = judge_unknown_dropout(plain, out | change(out), contract_for(), 0.3)
    assert key in keys(report)


# Through a case.


def test_the_inputs_of_a_case_are_judged_as_the_problem_they_pose() -> None:
    case = Case(
        B=2,
        Hq=4,
        Hkv=2,
        Lq=9,
        Lk=12,
        D=8,
        Dv=5,
        dtype="bfloat16",
        mask=Causal("bottom_right"),
        bias="normal",
        softcap=3.0,
        lse_grad=True,
    )
    inputs = build(case)
    out = run(Problem.of(inputs), Arithmetic())
    assert not judge_values(inputs, out, contract_for("", "bfloat16"), generic=True).findings
    wrong = run(Problem.of(build(case.but(mask=Causal("top_left")))), Arithmetic())
    assert "value:o" in keys(judge_values(inputs, wrong, contract_for("", "bfloat16"), generic=True))


def test_dropout_of_a_case_is_judged_with_and_without_its_mask() -> None:
    inputs = build(Case(Hq=2, Hkv=2, Lq=8, Lk=8, D=4, Dv=4, dropout=0.25))
    out = run(Problem.of(inputs), Arithmetic())
    plain = run(Problem.of(inputs, dropout_known=False), Arithmetic())
    assert not judge_values(inputs, out, contract_for(), generic=True).findings
    assert not judge_values(inputs, out, contract_for(), generic=True, dropout_known=False).findings
    assert "value:o" in keys(judge_values(inputs, plain, contract_for(), generic=True))


def test_what_may_overflow_in_float16_promises_no_identity_under_unknown_dropout():
    case = Case(Lk=3, Dv=2, dtype="float16", dropout=0.5, data="large", requires_grad="qk")
    inputs = build(case)
    o, dq = torch.zeros(1, 1, 1, 2, dtype=torch.float16), torch.zeros(1, 1, 1, 1, dtype=torch.float16)
    dk = torch.full((1, 1, 3, 1), -math.inf, dtype=torch.float16)
    found = {}
    for value in (-math.inf, math.nan):
        outputs = {"o": o, "dq": dq, "dk": dk.fill_(value)}
        report = judge_values(inputs, outputs, contract_for("", "float16"), generic=False, dropout_known=False)
        found[value] = {f.key for f in report.findings} & {"identity:dk", "nonfinite:dk"}
    assert list(found.values()) == [set(), {"nonfinite:dk"}]
