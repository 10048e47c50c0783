"""Failures that one deviation of precision explains, and logic bugs that none does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashproof.ci.draw import draw
from flashproof.fuzz.case import Case
from flashproof.fuzz.judge import Verdict
from flashproof.fuzz.study import _on_both, wider
from flashproof.fuzz.tensors import build
from flashproof.impls.emulation import Arithmetic, broken, run
from flashproof.oracles.contract import contract_for
from flashproof.oracles.diagnose import Deviation, explain, hypotheses
from flashproof.oracles.elements import judge_problem
from flashproof.oracles.exact import Problem
from flashproof.oracles.finding import Finding
from flashproof.oracles.value import diagnose

SPEC = "delta=do.o,kv_tile=16,gqa_u=0"

PRECISION = {
    "tf32": ("float32", "tf32", "TF32 operands"),
    "bf16 dots": ("float32", "bf16", "bfloat16 operands"),
    "lse_bf16": ("bfloat16", "", "lse stored in bfloat16"),
    "lse_fp16": ("bfloat16", "", "lse stored in float16"),
    "l_rounded": ("bfloat16", "", "the normaliser summed from the rounded P"),
    "exp_poly3": ("float32", "", "an exponential with relative error 1e-4"),
    "s_lowp": ("float16", "", "scores stored in bfloat16"),
    "dv_bf16acc": ("float32", "", "dk and dv accumulated in bfloat16 across query tiles"),
}


def failing(name: str, dtype: str, dots: str) -> tuple[Problem, dict[str, torch.Tensor]]:
    """A case on which the deviation is a failure."""
    for seed in range(20):
        p = draw(seed, dtype, data="normal", kind="none", shortest=33).problem
        out = run(p, Arithmetic(dots=dots) if dots else broken(Arithmetic(), name))
        if judge_problem(p, out, contract_for(SPEC, dtype)).findings:
            return p, out
    raise AssertionError(name)


@pytest.mark.parametrize("name", PRECISION)
def test_a_precision_deviation_is_named_and_its_declaration_settles_it(name: str) -> None:
    dtype, dots, label = PRECISION[name]
    p, out = failing(name, dtype, dots)
    found = {d.label: d for d in explain(p, out, contract_for(SPEC, dtype))}
    assert label in found
    spec = found[label].declaration.removeprefix("--contract ")
    assert not [f for f in judge_problem(p, out, contract_for(spec, dtype)).findings if f.severity == "fail"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        "miss_last_key",
        "causal_plus1",
        "no_delta",
        "gqa_map",
        "tail_pad",
        "dk_noscale_tile",
        "drop_one",
        "l_norescale_last",
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_precision_deviation_explains_a_logic_bug(fault: str, dtype: str) -> None:
    failures = 0
    for seed in range(6):
        drawn = draw(seed, dtype, data="normal", kind="causal" if "causal" in fault else "none", group=2, shortest=17)
        out = run(drawn.problem, replace(broken(Arithmetic(), fault), diagonal=drawn.diagonal))
        if judge_problem(drawn.problem, out, contract_for(SPEC, dtype)).findings:
            failures += 1
            assert explain(drawn.problem, out, contract_for(SPEC, dtype)) == []
    assert failures > 2


def test_a_constant_with_too_few_digits_is_named() -> None:
    p = draw(3, "float32", data="normal", kind="none", shortest=33).problem
    p = replace(p, q=4 * p.q)
    out = run(replace(p, scale=p.scale * (1 + 6e-6)), Arithmetic())
    assert explain(p, out, contract_for(SPEC, "float32"))[0].declaration.endswith("constant_u=2^-17")


def test_an_explanation_must_hold_for_a_larger_case_that_fails_alike() -> None:
    finding = Finding("value", "o", "wrong")
    tf32, p16, exp = (Deviation(label, "", "") for label in ("TF32 operands", "P cast to float16", "an exponential"))
    smallest = Verdict(Case(), "fail", (finding,), deviations=(p16, tf32, exp))
    large = Verdict(wider(Case()), "fail", (finding,), deviations=(exp, tf32))
    assert _on_both(smallest, "value:o", large).deviations == (exp, tf32)
    assert _on_both(smallest, "value:o", replace(large, deviations=())).deviations == ()
    assert _on_both(smallest, "value:o", Verdict(wider(Case()), "pass")).deviations == (p16, tf32, exp)


def test_a_right_answer_needs_no_explanation() -> None:
    p = draw(3, "bfloat16", data="normal").problem
    assert explain(p, run(p, Arithmetic()), contract_for("", "bfloat16")) == []


def test_a_deviation_reads_as_label_declaration_and_code_change() -> None:
    case = Case(Hq=2, Hkv=2, Lq=33, Lk=40, D=16, Dv=16)
    inputs = build(case)
    found = diagnose(inputs, run(Problem.of(inputs), Arithmetic(dots="tf32")), contract_for())
    assert found[0] == Deviation("TF32 operands", "--contract tf32", found[0].code_change)
    assert 'input_precision="ieee" in tl.dot' in found[0].code_change
    assert str(found[0]).startswith("consistent with TF32 operands; declare --contract tf32, or change the code: ")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_hypothesis_can_be_declared(dtype: str) -> None:
    for h in hypotheses(dtype):
        spec = h.declared or ",".join(f"{n}={str(v).lower()}" for n, v in h.fields.items())
        assert contract_for(spec, dtype).spec == spec
