"""Modes: autocast is judged in its own dtype, a compiled graph and an operator's registration are checked, others are not asked."""

from __future__ import annotations

import inspect
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flashproof.fuzz.case import MODES, Case
from flashproof.fuzz.commands import Options
from flashproof.fuzz.execute import Runner
from flashproof.fuzz.judge import Judge, Verdict
from flashproof.fuzz.masks import Causal
from flashproof.fuzz.modes import entered, seen
from flashproof.fuzz.region import Region
from flashproof.fuzz.session import narrowed
from flashproof.fuzz.strategies import CHOICES, FEATURES, decode, menu_of
from flashproof.fuzz.tensors import build
from flashproof.impls import Implementation
from flashproof.impls.loading import signature

CASE = Case(Lq=9, Lk=17, D=16, Dv=16, mask=Causal())
FORWARD = CASE.but(requires_grad="", mask=CASE.varied().mask)


def sdpa(query, key, value, attn_mask=None, is_causal=False, scale=None):  # type: ignore[no-untyped-def]
    return scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale)


def narrower(query, key, value, attn_mask=None, is_causal=False, scale=None):  # type: ignore[no-untyped-def]
    if torch.is_autocast_enabled("cpu"):
        key = key.to(torch.float8_e4m3fn).to(key.dtype)
    return sdpa(query, key, value, attn_mask, is_causal, scale)


def untouched(query, key, value, attn_mask=None, is_causal=False, scale=None):  # type: ignore[no-untyped-def]
    with torch.autocast("cpu", enabled=False):
        return sdpa(query, key, value, attn_mask, is_causal, scale)


def half(query, key, value, attn_mask=None, is_causal=False, scale=None):  # type: ignore[no-untyped-def]
    o = sdpa(query, key, value, attn_mask, is_causal, scale)
    return o.half() if torch.is_autocast_enabled("cpu") else o


def miscompiled(query, key, value, attn_mask=None, is_causal=False, scale=None):  # type: ignore[no-untyped-def]
    o = sdpa(query, key, value, attn_mask, is_causal, scale)
    return 1.5 * o if torch.compiler.is_compiling() else o


def verdict(call: Any, case: Case, contract: str = "torch-cpu-math") -> Verdict:
    return Judge(Runner(call), contract).check(case, explain=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_a_target_under_autocast_is_judged_in_the_dtype_it_computed_in(dtype: str) -> None:
    got = verdict(sdpa, CASE.but(mode="autocast", dtype=dtype))
    assert got.status == "pass", got.failures
    assert got.report is not None
    assert {"o", "dq", "dk", "dv"} <= set(got.report.budget)
    if dtype in ("float32", "bfloat16"):
        assert got.report.budget["o"] > 0.05  # rounded to bfloat16, and held to that


def test_the_inputs_are_judged_as_autocast_rounds_them() -> None:
    inputs = build(CASE.but(mode="autocast", bias="normal"))
    rounded = seen(inputs, {"o": torch.zeros(1, dtype=torch.bfloat16)})
    assert all(getattr(rounded, n).dtype == torch.bfloat16 for n in ("q", "k", "v", "do", "bias"))
    assert seen(inputs, {"o": torch.zeros(1)}) is inputs


def test_a_target_that_is_narrower_under_autocast_only_is_found() -> None:
    assert verdict(narrower, CASE).status == "pass"
    assert "value:o" in verdict(narrower, CASE.but(mode="autocast")).keys


def test_a_target_that_autocast_does_not_reach_is_held_to_its_own_dtype() -> None:
    got = verdict(untouched, CASE.but(mode="autocast"))
    assert got.status == "pass"
    assert got.report is not None
    assert got.report.budget["o"] < 1.0


def test_an_output_of_a_third_dtype_is_a_finding() -> None:
    assert verdict(half, CASE.but(mode="autocast")).keys == ("dtype:o",)


def test_autocast_is_on_during_the_call_alone() -> None:
    states: list[bool] = []

    def note() -> None:
        states.append(torch.is_autocast_enabled("cpu"))

    entered(note, CASE.but(mode="autocast"), "cpu")()
    note()
    assert states == [True, False]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_a_compiled_target_is_judged_on_two_shapes_and_a_wrong_graph_is_found() -> None:
    for case in (CASE, CASE.but(Lk=24)):
        got = verdict(sdpa, case.but(mode="compile"))
        assert got.status == "pass", got.failures
    assert verdict(miscompiled, CASE).status == "pass"
    assert "value:o" in verdict(miscompiled, CASE.but(mode="compile")).keys


def operator(name: str, fake_dtype: torch.dtype | None = None) -> Any:
    """A torch.library operator; its fake version may claim another dtype."""

    @torch.library.custom_op(f"flashproof_tests::{name}", mutates_args=())
    def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale).contiguous()

    @attend.register_fake
    def _(q, k, v, is_causal=False, scale=None):  # type: ignore[no-untyped-def]
        return q.new_empty(*q.shape[:3], v.shape[3], dtype=fake_dtype or q.dtype)

    return attend


@pytest.fixture(scope="module")
def right() -> Any:
    return operator("right")


def test_the_signature_of_an_operator_is_its_schema(right: Any) -> None:
    for call in (right, right._opoverload):
        sig = signature(call)
        assert sig is not None
        assert list(sig.parameters) == ["q", "k", "v", "is_causal", "scale"]
        assert sig.parameters["is_causal"].default is False
        assert sig.parameters["q"].default is inspect.Parameter.empty


def test_an_operator_is_drawn_with_opcheck_and_passes(right: Any) -> None:
    runner = Runner(Implementation("right", right), contract="torch-cpu-math,forward_only=true")
    assert runner.info["expressible"]["modes"] == ("opcheck",)
    got = Judge(runner).check(FORWARD.but(mode="opcheck"))
    assert got.status == "pass", got.failures


def test_a_fake_kernel_that_claims_another_dtype_is_found() -> None:
    wrong = Implementation("wrong", operator("wrong", torch.float64))
    runner = Runner(wrong, contract="torch-cpu-math,forward_only=true")
    assert Judge(runner).check(FORWARD).status == "pass"
    keys = Judge(runner).check(FORWARD.but(mode="opcheck")).keys
    assert "opcheck:faketensor" in keys


def test_opcheck_on_an_ordinary_function_is_inexpressible() -> None:
    got = verdict(sdpa, CASE.but(mode="opcheck"))
    assert got.status == "inexpressible"
    assert got.execution is not None
    assert "no torch.library operator" in got.execution.message


def test_modes_are_off_unless_declared_or_asked_for() -> None:
    assert Region().modes == ()
    assert "mode autocast" in Region().refuses(CASE.but(mode="autocast"))
    assert Region(modes=("autocast",)).refuses(CASE.but(mode="autocast")) == ""
    assert narrowed(Region(), None, Options(modes=("compile", "autocast"))).modes == ("compile", "autocast")


def test_a_mode_is_drawn_rarely_and_only_where_the_region_names_it() -> None:
    def decoded(region: Region) -> list[Case]:
        menu, bytes_of = menu_of(region, 300, FEATURES), random.Random(0).randbytes  # noqa: S311 (no secrets)
        return [decode(menu, bytes_of(len(CHOICES))) for _ in range(2000)]

    some = decoded(Region(modes=MODES[1:]))
    assert {c.mode for c in some} == set(MODES)
    assert 0.01 < sum(c.mode != "" for c in some) / len(some) < 0.06
    assert not any(c.mode for c in decoded(Region()))
