"""What a verdict is: values, endings, regions, contracts, confirmation, memory of verdicts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashproof.fuzz.case import Case
from flashproof.fuzz.execute import Execution, Runner
from flashproof.fuzz.judge import Judge, Verdict, exact_contract, is_generic, judge, one_in
from flashproof.fuzz.masks import Causal
from flashproof.fuzz.region import Region
from flashproof.impls.loading import load
from flashproof.oracles import elements
from flashproof.oracles.contract import contract_for
from flashproof.oracles.finding import Finding
from flashproof.oracles.limits import Limits

TARGETS = Path(__file__).parent / "targets"
CASE = Case(B=2, Hq=2, Hkv=2, Lq=3, Lk=5, D=4, Dv=2)
IEEE = contract_for("ieee", "float32", "cpu")


def faulty(name: str, **how: Any) -> Judge:
    return Judge(Runner(f"{TARGETS}/faulty.py:{name}"), **how)


def ending(status: str, message: str, region: Region | None = None) -> Verdict:
    return judge(CASE, Execution(status, message=message), IEEE, region)


def test_an_oracle_that_computes_nan_says_nothing_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elements, "limits", lambda r, c, backward: Limits({"o": np.full(r.o.shape, np.nan)}, {}))
    verdict = Judge(Runner("textbook")).check(CASE)
    assert (verdict.status, verdict.findings) == ("infrastructure", ())
    assert verdict.execution is not None
    assert verdict.execution.message.startswith("the oracle's own limit for o is NaN")


@pytest.mark.parametrize("target", ["textbook", *(f"{TARGETS}/right.py:{n}" for n in ("sdpa", "flash", "native"))])
def test_right_targets_pass(target: str) -> None:
    one = Judge(Runner(target))
    for case in (CASE, CASE.but(mask=Causal("bottom_right")), CASE.but(sequence="scale", dtype="bfloat16")):
        assert one.check(case, thorough=True).status == "pass"


def test_wrong_values_fail_for_each_tensor() -> None:
    verdict = faulty("wrong_value").check(CASE)
    assert verdict.status == "fail"
    assert verdict.keys == ("value:o", "value:dq", "value:dk", "value:dv")


def test_every_target_is_judged_by_inputs_built_here() -> None:
    runner = Runner(f"{TARGETS}/right.py:sdpa")
    verdict = judge(CASE, replace(runner.run(CASE.but(seed=1))), IEEE)
    assert "value:o" in verdict.keys


def test_a_tensor_that_was_not_returned_is_not_judged() -> None:
    out = Runner(f"{TARGETS}/right.py:sdpa").run(CASE)
    del out.outputs["dq"]
    verdict = judge(CASE, out, IEEE)
    assert verdict.status == "pass"
    assert verdict.report is not None
    assert "dq" not in verdict.report.budget


@pytest.mark.parametrize(
    ("status", "message", "key"),
    [
        ("raised", "RuntimeError: no kernel image", "exception:RuntimeError"),
        ("crashed", "SIGSEGV", "crash:SIGSEGV"),
        ("hung", "no answer within 5 s", "hang:call"),
    ],
)
def test_endings_are_failures_of_their_own_kind(status: str, message: str, key: str) -> None:
    verdict = ending(status, message)
    assert (verdict.status, verdict.keys) == ("fail", (key,))


@pytest.mark.parametrize("status", ["inexpressible", "infrastructure"])
def test_what_was_not_run_is_neither_right_nor_wrong(status: str) -> None:
    assert (ending(status, "why").status, ending(status, "why").findings) == (status, ())


@pytest.mark.parametrize(
    ("region", "status"),
    [
        (None, "refused"),
        (Region(), "fail"),
        (Region(dtypes=("float16",)), "refused"),
        (Region(lq_differs=False), "refused"),
    ],
)
def test_refusal_fails_inside_a_declared_region_only(region: Region | None, status: str) -> None:
    assert ending("refused", "ValueError: no", region).status == status


def test_a_refusal_that_left_something_changed_fails() -> None:
    out = Execution("refused", message="ValueError: no", findings=[Finding("purity", "k", "input changed at [0]")])
    assert judge(CASE, out, IEEE).keys == ("purity:k",)


def test_other_exceptions_fail_outside_the_region_too() -> None:
    assert ending("raised", "IndexError: no", Region(dtypes=("float16",))).status == "fail"


def test_declared_nondeterminism_is_allowed() -> None:
    out = replace(
        Runner(f"{TARGETS}/right.py:sdpa").run(CASE),
        findings=[Finding("repeat", "dq", "differs"), Finding("sequence", "o", "differs")],
    )
    assert judge(CASE, out, IEEE).keys == ("repeat:dq", "sequence:o")
    assert judge(CASE, out, IEEE.but(deterministic=("o",))).keys == ("sequence:o",)


def test_missing_gradient_is_allowed_where_forward_only_is_declared() -> None:
    assert faulty("detached").check(CASE).keys == ("grad:o",)
    assert (
        Judge(Runner(f"{TARGETS}/faulty.py:detached", contract="forward_only=true"), "forward_only=true")
        .check(CASE)
        .status
        == "pass"
    )


def test_exact_run_is_held_to_the_exact_contract() -> None:
    out = Runner(f"{TARGETS}/right.py:sdpa").run(CASE)
    right = Runner(f"{TARGETS}/right.py:sdpa").run(CASE.but(dtype="float64")).outputs
    wide = {n: x.double() for n, x in out.outputs.items()}
    assert judge(CASE, replace(out, exact=wide), IEEE).keys[0] == "exact:o"
    assert "in exact arithmetic error" in judge(CASE, replace(out, exact=wide), IEEE).findings[0].message
    assert set(right) == set(wide)


def test_exact_contract_keeps_policies() -> None:
    strict = exact_contract(IEEE.but(dead_rows="nan", masked_nonfinite="may_leak"))
    assert (strict.dead_rows, strict.masked_nonfinite, strict.u, strict.constant_u) == (
        "nan",
        "may_leak",
        2.0**-52,
        2.0**-30,
    )


def test_region_and_contract_default_to_what_the_target_declares() -> None:
    one = Judge(Runner("textbook"))
    assert one.region == load("textbook").supports
    assert one.spec == load("textbook").contract


def test_verdicts_are_remembered_by_the_case() -> None:
    calls: list[Case] = []
    runner = Runner(f"{TARGETS}/right.py:sdpa")
    original = runner.run
    runner.run = lambda case, **how: calls.append(case) or original(case, **how)  # type: ignore[method-assign, func-returns-value]
    one = Judge(runner)
    for how in ({}, {}, {"thorough": True}, {"thorough": True}, {"fresh": True}):
        one.check(CASE, **how)
    assert len(calls) == 3


def test_remembered_passes_hold_no_tensors() -> None:
    one = Judge(Runner(f"{TARGETS}/right.py:sdpa"))
    one.check(CASE)
    execution = one.check(CASE).execution
    assert execution is not None
    assert not execution.outputs


def test_reproduction_is_counted_in_fresh_processes() -> None:
    one = faulty("wrong_value")
    restarts: list[int] = []
    one.runner.restart = lambda: restarts.append(1)  # type: ignore[attr-defined]
    assert one.reproduces(CASE, "value:o") == (3, 3)
    assert one.reproduces(CASE, "value:lse", times=2) == (0, 2)
    assert len(restarts) == 5


def test_wrong_values_are_explained_where_a_single_deviation_explains_them() -> None:
    def tf32(q, k, v, is_causal=False, scale=None):  # type: ignore[no-untyped-def]
        def cut(x: torch.Tensor) -> torch.Tensor:
            return ((x.detach().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

        s = cut(q) @ cut(k).transpose(-1, -2) * q.shape[-1] ** -0.5
        return cut(torch.softmax(s, -1)) @ cut(v)

    verdict = Judge(Runner(tf32), "ieee").check(Case(Lq=16, Lk=16, D=32, Dv=32, requires_grad=""))
    assert verdict.status == "fail"
    assert any("TF32" in d.label for d in verdict.deviations)


def statistical(tensors_by_seed: dict[int, tuple[str, ...]]) -> Judge:
    """A judge whose runs show statistical warnings on the tensors given per seed."""

    class Fixed:
        info = Runner(f"{TARGETS}/right.py:sdpa").info

        def run(self, case: Case, **_: bool) -> Execution:
            found = [
                Finding("statistical", t, "large errors", severity="warning")
                for t in tensors_by_seed.get(case.seed, ())
            ]
            return Execution("refused", message="ValueError: no", findings=found)

    return Judge(Fixed())


def test_statistical_warning_fails_when_three_fresh_seeds_confirm_it() -> None:
    seeds = (0, 7919, 15838, 23757)
    assert statistical(dict.fromkeys(seeds, ("o",))).check(Case()).keys == ("statistical:o",)
    assert statistical(dict.fromkeys(seeds[:3], ("o",))).check(Case()).keys == ()


def test_one_in_n_is_a_function_of_the_case_and_near_its_share() -> None:
    hits = sum(one_in(8, Case(seed=n), "repeat") for n in range(800))
    assert 70 < hits < 130
    assert one_in(8, CASE, "repeat") == one_in(8, replace(CASE), "repeat")


@pytest.mark.parametrize(
    ("target", "case"),
    [
        ("blockwise", Case(dtype="float16", Lq=64, Lk=8, bias="normal", bias_axes="q", requires_grad="b", seed=2)),
        ("sdpa_cpu_flash", Case(dtype="bfloat16", Lk=64, bias="large", requires_grad="v", grad="scaled", seed=1)),
    ],
    ids=["a bias summed over keys", "weights below the smallest normal number"],
)
def test_errors_that_rounding_explains_are_no_warning(target: str, case: Case) -> None:
    assert Judge(Runner(target)).check(case).findings == ()


def test_heads_rounded_one_by_one_before_their_sum_are_right_by_default() -> None:
    def repeated(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        groups = query.shape[1] // key.shape[1]
        k, v = (x.repeat_interleave(groups, 1).float() for x in (key, value))
        weights = torch.softmax(query.float() @ k.mT * query.shape[-1] ** -0.5, -1)
        return (weights @ v).to(query.dtype)

    for seed in range(5):
        case = Case(B=2, Hq=24, Hkv=2, Lq=5, Lk=9, D=8, Dv=8, dtype="bfloat16", seed=seed)
        assert Judge(Runner(repeated)).check(case).findings == ()
        strict = Judge(Runner(repeated), contract="gqa_u=0").check(case)
        assert set(strict.keys) <= {"value:dk", "value:dv", "statistical:dk", "statistical:dv"}


@pytest.mark.parametrize(
    ("case", "generic"),
    [
        (Case(D=16, Dv=16), True),
        (Case(D=16, Dv=16, grad="scaled", data="outlier"), True),
        (Case(D=16, Dv=16, scale=0.0), False),
        (Case(D=16, Dv=16, scale=1e-4), False),
        (Case(D=16, Dv=16, grad="ones"), False),
        (Case(D=16, Dv=16, data="ties"), False),
    ],
    ids=str,
)
def test_statistics_judge_only_what_has_no_ties_or_structure(case: Case, generic: bool) -> None:
    assert is_generic(case) is generic


LOOSE = """
import itertools
import flashproof

calls = itertools.count()

def attend(query, key, value, is_causal=False, scale=None):
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query = query * 1
    if query.requires_grad:
        query.register_hook(lambda g: g + g.abs().max() * 2.0**-22 * (next(calls) % 2))
    return ((query.double() @ key.double().mT * scale).softmax(-1) @ value.double()).to(query.dtype)

@flashproof.target(deterministic=("o", "dk", "dv"))
def loose(q, k, v, scale):
    return attend(q, k, v, scale=scale)

@flashproof.target()
def strict(q, k, v, scale):
    return attend(q, k, v, scale=scale)
"""


@pytest.mark.parametrize(
    ("name", "contract", "keys"),
    [
        ("attend", "u=1e-6,deterministic=o+dk+dv", ()),
        ("attend", "u=1e-6,deterministic=all", ("repeat:dq",)),
        ("loose", "", ()),
        ("strict", "", ("repeat:dq",)),
    ],
)
def test_only_the_tensors_that_are_promised_have_to_be_the_same_again(
    name: str, contract: str, keys: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "repeating.py").write_text(LOOSE)
    one = Judge(Runner(f"{tmp_path}/repeating.py:{name}", contract=contract), contract)
    case = Case(Lq=3, Lk=5, D=4, Dv=4, lse_grad=False)
    assert one.check(case, thorough=True).keys == keys
