"""Which share of faulty runs the limits reject: one switch of the emulation at a time, on cases where it changes the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..impls.emulation import Arithmetic, run
from ..oracles.contract import contract_for
from ..oracles.elements import judge_problem
from .draw import Drawn, draw

CONTRACT = "delta=do.o,kv_tile=16,gqa_u=0"
FIRST_SEED, SEED_STEP, NORMAL_OFFSET = 7_000_000, 131, 500_000
UNJUDGED = ("dbias", "dsinks")
CLOSE = 5.0
"""Percentage points by which a rate may fall below the recorded one."""


@dataclass(frozen=True)
class Fault:
    """One switch, and the recorded rates of rejection in percent.

    For float32, bfloat16, float16, on normal data and on the mixture of fourteen regimes. None: the switch changes nothing
    there, or the contract allows it.
    """

    name: str
    story: str
    normal: tuple[int | None, int | None, int | None]
    mixture: tuple[int | None, int | None, int | None]
    kind: str = ""  # of mask that the switch needs
    group: int = 0  # query heads per key head that it needs
    arithmetic: Arithmetic | None = None  # a whole arithmetic instead of a switch

    def expected(self, data: str, dtype: str) -> int | None:
        rates = self.normal if data == "normal" else self.mixture
        return rates[("float32", "bfloat16", "float16").index(dtype)]

    def applied(self, diagonal: int | None) -> Arithmetic:
        if self.arithmetic is not None:
            return self.arithmetic
        return Arithmetic(faults=frozenset([self.name]), diagonal=diagonal)


# fmt: off
FAULTS = (
    Fault("acc_bf16", "O accumulator kept in bf16", (100, 8, 100), (95, 20, 90)),
    Fault("acc_fp16", "O accumulator kept in fp16", (100, 0, None), (95, 2, None)),
    Fault("acc_norescale_last", "O not rescaled in last KV tile", (100, 100, 100), (83, 73, 93)),
    Fault("l_norescale_last", "l not rescaled in last tile", (100, 100, 100), (95, 97, 98)),
    Fault("miss_last_key", "last key of the tail tile missing", (100, 100, 100), (100, 100, 100)),
    Fault("causal_plus1", "causal off by one (j<=i+1)", (100, 100, 100), (100, 100, 100), kind="causal"),
    Fault("causal_minus1", "causal strict (j<i)", (100, 100, 100), (100, 100, 100), kind="causal"),
    Fault("causal_tl", "causal aligned top-left instead of bottom-right", (100, 100, 100), (100, 100, 100), kind="causal"),
    Fault("causal_tile_edge", "diagonal key missed on first row of each q tile", (100, 100, 100), (100, 100, 100), kind="causal"),
    Fault("drop_one", "one key lost for one query row", (95, 98, 98), (95, 100, 100)),
    Fault("exp_fp16", "exp in fp16", (100, 100, 100), (98, 88, 92)),
    Fault("exp_poly3", "exp2 cubic polynomial (9e-5) under a 2^-22 contract", (100, 100, 98), (90, 88, 85)),
    Fault("exp_poly2", "exp2 quadratic polynomial (1.7e-3)", (100, 100, 100), (97, 87, 95)),
    Fault("lse_ln2", "lse: log2 not converted when >1 tile", (100, 100, 100), (98, 100, 98)),
    Fault("lse_bf16", "lse stored bf16", (100, 100, 100), (100, 100, 100)),
    Fault("lse_fp16", "lse stored fp16", (100, 100, 100), (100, 100, 100)),
    Fault("lse_bwd_bf16", "backward reads lse as bf16", (100, 85, 100), (97, 68, 97)),
    Fault("scale_bf16const", "softmax scale constant rounded to bf16", (100, 100, 100), (93, 95, 95)),
    Fault("q_prescale", "q*scale rounded to io dtype (bf16 for fp32)", (100, 100, 90), (95, 100, 92)),
    Fault("s_lowp", "S stored bf16", (100, 100, 100), (97, 97, 97)),
    Fault("bias_log2", "bias not multiplied by log2e", (100, 100, 100), (100, 100, 100), kind="bias"),
    Fault("mask_finite", "mask = -1e4 instead of -inf", (100, 100, 100), (100, 100, 100), kind="random"),
    Fault("tail_pad", "padded keys of tail tile not masked", (100, 100, 100), (100, 97, 97)),
    Fault("p_rz", "P truncated instead of rounded", (None, 15, 12), (None, 23, 13)),
    Fault("p_e4m3", "P cast to fp8 e4m3", (100, 100, 100), (87, 85, 100)),
    Fault("p_bf16", "P cast to bf16", (100, None, 100), (93, None, 92)),
    Fault("l_rounded", "l from rounded P", (None, 100, 100), (None, 98, 93)),
    Fault("o_norm_lowp", "1/l rounded to io", (100, 5, 0), (93, 0, 2)),
    Fault("o_rz", "O truncated instead of rounded", (None, 5, 12), (None, 7, 3)),
    Fault("no_delta", "delta omitted", (100, 100, 100), (98, 98, 100)),
    Fault("delta_bf16", "delta stored bf16", (100, 0, 42), (98, 0, 72)),
    Fault("dp_bf16", "dP stored bf16", (100, 5, 100), (98, 23, 87)),
    Fault("ds_bf16", "dS cast to bf16", (100, None, 100), (92, None, 67)),
    Fault("ds_rz", "dS truncated", (None, 5, 0), (None, 2, 3)),
    Fault("ds_from_pc", "dS uses rounded P", (None, 0, 0), (None, 0, 10)),
    Fault("dk_noscale_tile", "dK scale missing for one tile", (100, 100, 100), (92, 82, 92)),
    Fault("dk_miss_qtile", "dK misses last q tile", (100, 100, 100), (92, 78, 93)),
    Fault("dv_miss_row", "dV misses last q row", (100, 100, 100), (97, 97, 100)),
    Fault("dq_race", "dQ loses one tile update", (100, 100, 100), (90, 93, 98)),
    Fault("dq_bf16acc", "dQ accumulator bf16", (100, 0, 100), (90, 0, 60)),
    Fault("dv_bf16acc", "dV accumulator bf16", (100, 10, 100), (95, 8, 95)),
    Fault("no_dtanh", "softcap derivative missing", (100, 60, 92), (90, 65, 77), kind="softcap"),
    Fault("gqa_map", "GQA head map h%Hk", (100, 100, 100), (100, 100, 100), group=2),
    Fault("gqa_lowp", "dK/dV rounded per head before group sum", (100, 2, 2), (97, 3, 10), group=3),
    Fault("gqa_first", "dK/dV of first group head only", (100, 100, 100), (97, 97, 100), group=2),
    Fault("sink_scaled", "sinks multiplied by the scale", (100, 100, 100), (98, 98, 98), kind="sinks"),
    Fault("sink_not_in_lse", "lse without the sink", (100, 100, 100), (98, 98, 98), kind="sinks"),
    Fault("sink_per_tile", "the sink is added once per key tile", (100, 100, 100), (98, 98, 98), kind="sinks"),
    Fault("alibi_signed", "slopes times i - j instead of its size", (100, 100, 100), (100, 100, 100), kind="alibi"),
    Fault("alibi_top_left", "slopes times the distance of i from j", (100, 100, 100), (100, 100, 100), kind="alibi"),
    Fault("alibi_kv_head", "slopes of the key head", (100, 100, 100), (100, 100, 100), kind="alibi", group=2),
    Fault("alibi_before_softcap", "slopes added before the softcap", (100, 100, 100), (100, 100, 100), kind="alibi_softcap"),
    Fault("alibi_bf16", "slopes rounded to bf16", (100, 100, 100), (100, 100, 100), kind="alibi"),
    Fault("tf32", "TF32 under an IEEE contract", (100, None, None), (100, None, None)),
    Fault("tc13", "13-bit accumulator (FP8 mode) in all dots", (100, 100, 100), (100, 80, 85), arithmetic=Arithmetic(fused_bits=13)),
    Fault("tc10rz", "truncated TF32 under IEEE", (100, None, None), (100, None, None), arithmetic=Arithmetic(dots="tf32_rz")),
    Fault("bf16dot", "bf16 operands under IEEE fp32", (100, None, None), (100, None, None), arithmetic=Arithmetic(dots="bf16")),
)
# fmt: on
BY_NAME = {fault.name: fault for fault in FAULTS}


@dataclass(frozen=True)
class Rate:
    """Active cases (the switch changed the result), how many of them were rejected, and the budgets."""

    active: int
    killed: int

    @property
    def percent(self) -> float:
        return 100.0 * self.killed / max(1, self.active)


def active_runs(fault: Fault, dtype: str, data: str, wanted: int) -> Iterator[tuple[Drawn, dict[str, Tensor]]]:
    """Cases on which the fault changes the result, with that result; gives up after four times as many draws."""
    found = 0
    for attempt in range(1, 4 * wanted + 1):
        seed = FIRST_SEED + attempt * SEED_STEP + (NORMAL_OFFSET if data == "normal" else 0)
        drawn = draw(
            seed, dtype, data="normal" if data == "normal" else "", kind=fault.kind, group=fault.group, shortest=17
        )
        faulty, right = run(drawn.problem, fault.applied(drawn.diagonal)), run(drawn.problem, Arithmetic())
        if all(
            torch.equal(faulty[n].float().nan_to_num(), right[n].float().nan_to_num())
            for n in faulty
            if n not in UNJUDGED
        ):
            continue
        found += 1
        yield drawn, faulty
        if found == wanted:
            return


def kill_rate(fault: Fault, dtype: str, data: str = "normal", active: int = 40) -> Rate:
    """The share of active cases on which o, lse, dq, dk or dv leaves its limit."""
    contract, killed, count = contract_for(CONTRACT, dtype), 0, 0
    for drawn, outputs in active_runs(fault, dtype, data, active):
        judged = {n: x for n, x in outputs.items() if n not in UNJUDGED}
        report = judge_problem(replace(drawn.problem), judged, contract)
        count, killed = count + 1, killed + any(f.severity == "fail" for f in report.findings)
    return Rate(count, killed)


def table(active: int, data: str, only: Sequence[str] | None = None) -> int:
    """Print the rates beside the recorded ones; 1 if one fell more than CLOSE points below, else 0."""
    dtypes, fell = ("float32", "bfloat16", "float16"), 0
    print(f"| fault | {' | '.join(dtypes)} | recorded |\n|---|---|---|---|---|")
    for fault in FAULTS:
        if only and fault.name not in only:
            continue
        cells = []
        for dtype in dtypes:
            expected = fault.expected(data, dtype)
            rate = None if expected is None else kill_rate(fault, dtype, data, active)
            low = rate is not None and expected is not None and rate.percent < expected - CLOSE
            fell += low
            cells.append("-" if rate is None else f"{rate.percent:.0f} of {rate.active}{' FELL' if low else ''}")
        recorded = "/".join("-" if (e := fault.expected(data, d)) is None else str(e) for d in dtypes)
        print(f"| `{fault.name}` {fault.story} | {' | '.join(cells)} | {recorded} |", flush=True)
    print(f"{fell} rates fell more than {CLOSE:g} points below the recorded ones")
    return 1 if fell else 0
