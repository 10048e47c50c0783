"""The verdict's own numbers: median tightness and kill rates stay where they were recorded."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from flashproof.ci.calibrate import Tally, main, tightness
from flashproof.ci.draw import DTYPES, draw
from flashproof.ci.kill_rates import BY_NAME, CLOSE, FAULTS, kill_rate
from flashproof.impls.emulation import Arithmetic, run
from flashproof.oracles.contract import TENSORS, contract_for
from flashproof.oracles.elements import judge_problem

MEDIANS = {
    "float32": (0.041, 0.054, 0.017, 0.007, 0.017),
    "bfloat16": (0.416, 0.049, 0.281, 0.128, 0.499),
    "float16": (0.451, 0.054, 0.274, 0.133, 0.518),
}
"""Medians of max |error| / limit per case, o, lse, dq, dk, dv, over 8,000 cases of each dtype: flash with 16 x 16 tiles."""

SUBSET = {
    "drop_one": "bfloat16", "exp_poly3": "float16", "lse_bwd_bf16": "bfloat16", "p_rz": "bfloat16", "l_rounded": "bfloat16",
    "delta_bf16": "float16", "no_dtanh": "bfloat16", "gqa_lowp": "float32", "tf32": "float32",
}  # fmt: skip


def medians(dtype: str, cases: int) -> list[float]:
    contract = contract_for("kv_tile=16,gqa_u=0", dtype)
    budgets: dict[str, list[float]] = {name: [] for name in TENSORS}
    for seed in range(cases):
        p = draw(2_000_000 + 3 * seed + list(DTYPES).index(dtype), dtype).problem
        for name, budget in judge_problem(p, run(p, Arithmetic()), contract).budget.items():
            budgets[name].append(budget)
    return [sorted(budgets[name])[len(budgets[name]) // 2] for name in TENSORS[:5]]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_median_tightness_is_within_five_points_of_the_recorded(dtype: str) -> None:
    for name, mine, recorded in zip(TENSORS, medians(dtype, 200), MEDIANS[dtype], strict=False):
        assert abs(mine - recorded) < 0.05, name


@pytest.mark.slow
@pytest.mark.parametrize("name", SUBSET)
def test_kill_rate_is_not_five_points_below_the_recorded(name: str) -> None:
    recorded = BY_NAME[name].expected("normal", SUBSET[name])
    assert recorded is not None
    assert kill_rate(BY_NAME[name], SUBSET[name]).percent >= recorded - CLOSE


def test_conforming_controls_are_never_rejected() -> None:
    for arithmetic in (Arithmetic(delta="do.o32"), Arithmetic(order="reverse"), Arithmetic(q_tile=8, kv_tile=32)):
        for seed in range(20):
            drawn = draw(7_000_000 + 131 * seed, ("float32", "bfloat16", "float16")[seed % 3])
            report = judge_problem(
                drawn.problem,
                run(drawn.problem, arithmetic),
                contract_for("delta=do.o,kv_tile=16,gqa_u=0", drawn.dtype),
            )
            assert not report.findings, str(drawn)


@pytest.mark.slow
def test_every_fault_changes_a_result() -> None:
    for fault in FAULTS:
        dtype = next(d for d in ("float32", "bfloat16", "float16") if fault.expected("normal", d) is not None)
        assert kill_rate(fault, dtype, active=1).active == 1, fault.name


def lines(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> tuple[int, list[str]]:
    code = main(arguments)
    return code, capsys.readouterr().out.splitlines()


def test_the_campaign_prints_a_table_and_a_summary_and_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = lines(capsys, ["--cases", "9"])
    assert code == 0
    assert any(line.startswith("| flash 16x16 | bfloat16 | ") for line in out)
    assert out[-1].startswith("9 cases, ")
    assert ", 0 violations, " in out[-1]


def test_the_campaign_exits_1_on_a_violation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashproof.ci.calibrate.run", lambda p, a: {"o": run(p, a)["o"] + 1})
    code, out = lines(capsys, ["--cases", "3"])
    assert code == 1
    assert any(line.startswith("VIOLATION flash 16x16: seed 2000000 float32") for line in out)


def test_the_kill_rate_table_names_the_recorded_rates(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = lines(capsys, ["--kill-rates", "--active", "2", "--only", "miss_last_key"])
    assert code == 0
    assert "| 100 of 2 | 100 of 2 | 100 of 2 | 100/100/100 |" in out[2]


def test_an_empty_tally_has_a_table_without_rows() -> None:
    assert len(tightness(Tally()).splitlines()) == 2
