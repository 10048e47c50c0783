"""ALiBi and sinks: answers worked out by hand, conforming kernels accepted, faults rejected, every dialect that takes them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flashproof.ci.draw import DTYPES, Drawn, Source, draw, with_extras
from flashproof.ci.kill_rates import BY_NAME, active_runs
from flashproof.fuzz.added import as_bias
from flashproof.fuzz.case import ALIBI, SINKS, Case
from flashproof.fuzz.dialects import Inexpressible, answer, keywords, recognise
from flashproof.fuzz.execute import Runner
from flashproof.fuzz.judge import Judge
from flashproof.fuzz.masks import Causal, Padding
from flashproof.fuzz.probe import probe_keywords
from flashproof.fuzz.shrink import shrink
from flashproof.fuzz.tensors import Inputs, build
from flashproof.impls.blockwise import blockwise
from flashproof.impls.emulation import Arithmetic, run
from flashproof.impls.textbook import textbook
from flashproof.oracles.contract import contract_for
from flashproof.oracles.elements import judge_problem
from flashproof.oracles.exact import Problem, Reference
from flashproof.oracles.limits import limits
from flashproof.oracles.limits_forward import score_effect, weights

CASE = Case(B=2, Hq=4, Hkv=2, Lq=5, Lk=9, D=8, Dv=8)
FAULTS = (
    "sink_scaled",
    "sink_not_in_lse",
    "sink_per_tile",
    "alibi_signed",
    "alibi_top_left",
    "alibi_kv_head",
    "alibi_before_softcap",
    "alibi_bf16",
)


def one_row(**changes: Any) -> dict[str, Tensor]:
    """Answers of one query whose scores are 0, on keys with v = 1, 2, 3."""
    v = torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 3, 1)
    q, k = torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 3, 1)
    return Reference(Problem(q, k, v, torch.ones(1, 1, 1, 1), **changes)).outputs()


def test_a_sink_is_one_more_key_whose_value_is_zero() -> None:
    out = one_row(sinks=torch.tensor([math.log(3.0)]))
    assert out["o"].item() == pytest.approx(1.0)
    assert out["lse"].item() == pytest.approx(math.log(6.0))
    assert out["dsinks"].item() == pytest.approx(-0.5)  # -p delta, p = 3/6, delta = do * o = 1


def test_a_sink_of_minus_infinity_is_none() -> None:
    plain, sunk = one_row(), one_row(sinks=torch.tensor([-math.inf]))
    assert sunk.pop("dsinks").item() == 0
    assert all(torch.equal(plain[n], sunk[n]) for n in plain)


def test_a_row_without_keys_has_its_sink_as_lse_and_passes_its_gradient_on() -> None:
    dead = torch.zeros(1, 1, 1, 3, dtype=torch.bool)
    out = one_row(keep=dead, sinks=torch.tensor([0.75]), dlse=torch.tensor([[[2.0]]]))
    assert (out["o"].item(), out["lse"].item(), out["dsinks"].item()) == (0.0, 0.75, 2.0)
    out = one_row(keep=dead, sinks=torch.tensor([-math.inf]), dlse=torch.tensor([[[2.0]]]))
    assert (out["o"].item(), out["lse"].item(), out["dsinks"].item()) == (0.0, -math.inf, 0.0)


def test_alibi_measures_from_the_last_key_and_is_not_capped() -> None:
    out = one_row(alibi=torch.tensor([1.0]), softcap=0.1)  # the query stands at key 2: distances 2, 1, 0
    weights = torch.tensor([-2.0, -1.0, 0.0]).double().softmax(0)
    assert out["o"].item() == pytest.approx(float(weights @ torch.tensor([1.0, 2.0, 3.0]).double()))


def test_limits_are_zero_where_a_row_has_no_keys_but_a_sink() -> None:
    p = Problem.of(build(CASE.but(mask=Causal(), Lq=5, sinks="normal", dtype="bfloat16", Lk=0)))
    b = limits(Reference(p), contract_for("", "bfloat16")).b
    assert not b["o"].any()
    assert not b["dq"].any()
    assert b["lse"].all()


def added(count: int, first: int) -> Iterator[Drawn]:
    """Drawn problems with sinks, ALiBi, or both."""
    index = first
    while count:
        drawn = with_extras(draw(index, tuple(DTYPES)[index % 3]))
        index += 1
        if {"alibi", "sinks"} & set(drawn.extras):
            count -= 1
            yield drawn


def ways(s: Source) -> Arithmetic:
    return Arithmetic(
        sink=s.choice(["first", "last", "after"]),
        alibi_scaled=bool(s.integer(0, 1)),
        delta=s.choice(["do.o", "do.o32", "p.dp"]),
        algorithm=s.choice(["flash", "flash", "textbook"]),
    )


def violations(count: int, first: int) -> list[str]:
    out = []
    for drawn in added(count, first):
        arithmetic = ways(Source(drawn.seed))
        report = judge_problem(
            drawn.problem, run(drawn.problem, arithmetic), contract_for("gqa_u=0,kv_tile=16", drawn.dtype)
        )
        out += [f"{drawn} {arithmetic}: {f}" for f in report.findings if f.severity == "fail"]
    return out


def test_conforming_kernels_with_alibi_and_sinks_are_never_rejected() -> None:
    assert violations(60, 11_000_000) == []


@pytest.mark.nightly
def test_two_thousand_conforming_runs_with_alibi_and_sinks_are_never_rejected() -> None:
    assert violations(2000, 12_000_000) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_alibi_or_sinks_is_rejected_wherever_it_shows(name: str, dtype: str) -> None:
    contract, seen = contract_for("delta=do.o,kv_tile=16,gqa_u=0", dtype), 0
    for drawn, outputs in active_runs(BY_NAME[name], dtype, "normal", 4):
        seen += 1
        assert any(f.severity == "fail" for f in judge_problem(drawn.problem, outputs, contract).findings), str(drawn)
    assert seen == 4


@pytest.mark.parametrize("call", [textbook, blockwise])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_implementations_are_right_with_every_kind(call: Any, dtype: str) -> None:
    judge = Judge(Runner(call.__name__))
    base = CASE.but(dtype=dtype, mask=Causal("bottom_right"), Lq=11, requires_grad="qkvs", lse_grad=True)
    for n, (alibi, sinks) in enumerate([*((a, "") for a in ALIBI), *(("batch", s) for s in SINKS)]):
        verdict = judge.check(base.but(alibi=alibi, sinks=sinks, softcap=n % 2 * 5.0, dropout=n % 3 * 0.25))
        assert verdict.status == "pass", verdict.failures
        assert ("dsinks" in (verdict.report.budget if verdict.report else {})) == bool(sinks)


def flash(q, k, v, softmax_scale=None, causal=False, alibi_slopes=None, s_aux=None, return_lse=False):  # type: ignore[no-untyped-def]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o, lse = textbook(
        q, k, v, scale=softmax_scale, mask=Causal("bottom_right") if causal else None, alibi=alibi_slopes, sinks=s_aux,
        return_lse=True,
    )  # fmt: skip
    return (o.transpose(1, 2), lse) if return_lse else o.transpose(1, 2)


def faulty(q, k, v, softmax_scale=None, causal=False, alibi_slopes=None, s_aux=None, return_lse=False):  # type: ignore[no-untyped-def]
    return flash(q, k, v, softmax_scale, causal, alibi_slopes, None if s_aux is None else s_aux.detach(), return_lse)


def ignoring(q, k, v, softmax_scale=None, causal=False, alibi_slopes=None, sinks=None):  # type: ignore[no-untyped-def]
    return flash(q, k, v, softmax_scale, causal)


ADDED = CASE.but(alibi="batch", sinks="normal", requires_grad="qkvs")


def test_a_flash_attn_like_target_gets_slopes_and_sinks_and_gives_their_gradient() -> None:
    inputs = build(ADDED)
    binding = recognise(flash)
    assert keywords(binding, inputs)["alibi_slopes"] is inputs.alibi
    assert answer(binding, flash, inputs).outputs["dsinks"].shape == (4,)
    assert Judge(Runner(flash), "may_leak").check(ADDED).status == "pass"


def test_a_lost_gradient_of_the_sinks_is_a_finding() -> None:
    keys = Judge(Runner(faulty), "may_leak").check(ADDED).keys
    assert keys == ("grad:dsinks",)


def test_keywords_for_slopes_and_sinks_that_are_ignored_are_found() -> None:
    _, findings = probe_keywords(recognise(ignoring), ignoring)
    assert {f.tensor for f in findings} == {"alibi_slopes", "sinks"}


def test_the_numbers_of_slopes_and_sinks_are_guarded_inputs() -> None:
    inputs = build(ADDED)
    assert (inputs.alibi.shape, inputs.alibi.dtype, inputs.alibi.is_contiguous()) == ((2, 4), torch.float32, True)  # type: ignore[union-attr]
    assert (inputs.sinks.shape, inputs.sinks.dtype) == ((4,), torch.float32)  # type: ignore[union-attr]
    inputs.alibi[1, 2] += 1.0  # type: ignore[index]
    inputs.sinks[3] = 0.0  # type: ignore[index]
    assert {name for name, _, what in inputs.damage() if what == "input changed"} == {"alibi", "sinks"}


def test_standard_slopes_are_powers_of_two_to_the_minus_eight_over_heads() -> None:
    slopes = build(Case(Hq=8, alibi="standard")).alibi
    assert slopes is not None
    assert slopes.tolist() == [2.0 ** -(h + 1) for h in range(8)]


def sdpa(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):  # type: ignore[no-untyped-def]
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def told(case: Case) -> Inputs | None:
    return as_bias(build(case))


def test_slopes_become_a_bias_only_where_the_dtype_holds_it_exactly() -> None:
    case = CASE.but(alibi="standard")
    bias = told(case).bias  # type: ignore[union-attr]
    assert bias is not None
    assert bias[0, 0, 0].tolist() == [-abs(0 + 9 - 5 - j) / 4 for j in range(9)]
    assert told(case.but(Hq=6)) is None  # 2^(-8/6) times 3 has more bits than float32
    assert told(case.but(dtype="bfloat16", Lk=300)) is None
    assert told(case.but(bias="normal")) is None


def test_a_target_with_a_mask_only_is_told_alibi_as_a_bias_and_judged() -> None:
    case = CASE.but(alibi="standard", mask=Padding((6, 9)))
    assert Judge(Runner(sdpa), "torch-cpu-math").check(case).status == "pass"
    with pytest.raises(Inexpressible, match="no bias of its dtype says it exactly"):
        keywords(recognise(sdpa), build(case.but(Hq=6)))
    with pytest.raises(Inexpressible, match="no keyword for sinks"):
        keywords(recognise(sdpa), build(case.but(sinks="normal")))


def test_a_case_shrinks_out_of_alibi_and_sinks_or_down_to_the_plainest() -> None:
    big = ADDED.but(alibi="large", sinks="-inf", softcap=5.0, seed=3)
    assert shrink(big, lambda c: c.Lk > 4) == Case(Lk=5, requires_grad="")
    assert shrink(big, lambda c: bool(c.alibi)) == Case(alibi="standard", requires_grad="")
    assert shrink(big, lambda c: "s" in c.requires_grad and bool(c.sinks)) == Case(sinks="normal", requires_grad="s")


def test_the_spread_of_normal_data_with_alibi_and_sinks_is_what_is_observed() -> None:
    largest: dict[str, float] = {}
    for seed in range(40):
        p = draw(20_000 + seed, tuple(DTYPES)[seed % 3], data="normal", kind="none", shortest=17).problem
        s = Source(seed)
        p = replace(p, sinks=s.normal(p.q.shape[1]).to(p.q.dtype), alibi=s.uniform(p.q.shape[1]))
        dtype = str(p.q.dtype).removeprefix("torch.")
        report = judge_problem(p, run(p, Arithmetic()), contract_for("gqa_u=0,kv_tile=16", dtype), generic=True)
        largest = {n: max(z, largest.get(n, 0.0)) for n, z in report.zrms.items()}
    assert 0.2 < np.mean(list(largest.values())) and max(largest.values()) < 2.0, largest


def corrected(q, k, v, *, mask=None, bias=None, scale=None, sinks=None, return_lse=False):  # type: ignore[no-untyped-def]
    o, lse = textbook(q, k, v, mask=mask, bias=bias, scale=scale, return_lse=True)
    if sinks is not None:
        o = (o.float() * torch.sigmoid(lse - sinks.float()[:, None]).unsqueeze(-1)).to(q.dtype)
    return (o, lse) if return_lse else o


def test_an_lse_without_the_sink_is_wrong_unless_it_is_declared() -> None:
    case = CASE.but(sinks="normal", requires_grad="qkvs", mask=Causal("bottom_right"), Lq=11)
    assert Judge(Runner(corrected)).check(case).keys == ("nonfinite:lse", "value:lse")
    verdict = Judge(Runner(corrected), "sink_lse=without").check(case)
    assert verdict.status == "pass", verdict.failures
    assert verdict.report is not None
    assert {"o", "lse", "dq", "dk", "dv", "dsinks"} <= set(verdict.report.budget)


def test_the_worst_case_of_the_weights_counts_the_sink_and_is_reached() -> None:
    """One key and a sink, their log weights wrong by E in opposite directions: the bound is that error to first order."""
    v, E = 3.0, 1e-4
    p = Problem(
        torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1, 1), v), sinks=torch.tensor([0.5])
    )
    r = Reference(p)
    errors = np.full((1, 1, 1, 1), E)
    w = weights(r, errors, errors)
    bound = score_effect(r, w.off, w.off.sum(-1, keepdims=True), True, w.off_sink).item()
    key, sink = math.exp(E), math.exp(0.5 - E)
    moved = abs(v * key / (key + sink) - r.o.item())
    assert moved <= bound <= 1.05 * moved


def test_the_limits_allow_for_alibi_in_scores_that_are_stored_narrow() -> None:
    for seed in range(12):
        p = draw(31_000 + seed, "bfloat16", data="tiny", kind="none", shortest=17).problem  # scores are all ALiBi
        p = replace(p, alibi=Source(seed).uniform(p.q.shape[1]) * 4)
        report = judge_problem(p, run(p, Arithmetic(algorithm="narrow")), contract_for("lowp,kv_tile=16", "bfloat16"))
        assert not report.findings, report.findings
        without = judge_problem(p, run(p, Arithmetic(algorithm="narrow")), contract_for("kv_tile=16", "bfloat16"))
        assert without.findings  # the rounding shows: a contract that does not declare it rejects it
