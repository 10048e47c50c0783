"""What holds whatever elements dropout kept: judgement when the generator of the keep mask is unknown.

lse does not see dropout. Every element of o, dq, dk, dv lies in the range that keep masks span. And with S the scores,
P' = keep * P / (1 - p) and any keep mask at all (docs/limits.md has the two-line proofs):

    <dV, V> = <dO, O>        (both are sum_ij P'_ij dO_i . V_j)
    <dQ, Q> = <dK, K>        (both are sum_ij dz_ij z_ij, z = scale q.k; softcap and bias come after z)
    sum(dBias) = sum(dlse)   (each row of dS sums to delta - delta + dlse; with sinks, their dS is in that sum)

The first two hold for every batch entry and key head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from .contract import Contract
from .elements import ValueReport, check_numbers, excess, judge_problem
from .exact import Array, Bools, Problem, Reference, doubles
from .finding import Finding
from .limits import Limits, limits
from .taint import Taint, separate
from .wording import element_finding, pair, shape_finding, short


def judge_unknown_dropout(
    problem: Problem, outputs: Mapping[str, Tensor], contract: Contract, rate: float
) -> ValueReport:
    """Judge outputs that were computed with dropout of probability `rate` and an unknown keep mask."""
    lse = outputs.get("lse")
    if contract.sink_lse == "without" and problem.sinks is not None and problem.dlse is not None:
        outputs = {n: x for n, x in outputs.items() if n in ("o", "lse")}  # gradients through another lse
    report = judge_problem(problem, {} if lse is None else {"lse": lse}, contract)
    with np.errstate(all="ignore"):
        clean, taint = separate(problem, contract)
        r, largest = Reference(clean), 1.0 / (1.0 - rate)
        bounds = envelope(clean, largest)
        allowed = limits(bounds, contract, backward=problem.do is not None, centred=False)
        check_numbers(bounds, allowed)
        given: dict[str, Array] = {}
        for name, t in outputs.items():
            if name == "lse" or t is None or name not in bounds.arrays:
                continue
            if tuple(t.shape) != bounds.arrays[name].shape:
                report.findings.append(shape_finding(name, tuple(t.shape), bounds.arrays[name].shape))
                continue
            given[name] = doubles(t)
            _within(report, r, bounds, largest, name, given[name], allowed, taint, contract)
        if taint is None and not allowed.loose:
            _equalities(report, problem, given, allowed)
    return report


def envelope(problem: Problem, largest: float) -> Reference:
    """A reference every intermediate of which bounds that of the problem from above, for any multipliers in [0, largest].

    The scores are the problem's own; v, do and dlse are replaced by their absolute values, and q and k once the scores
    are known; dP - delta + dlse becomes the sum of the three.
    """
    B, Hq, _, Lq, Lk, _, _ = problem.sizes
    constant = torch.full((1, 1, 1, 1), largest, dtype=torch.float64).expand(B, Hq, Lq, Lk)

    def positive(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.abs()

    do, dlse = positive(problem.do), positive(problem.dlse)
    r = Reference(replace(problem, v=problem.v.abs(), do=do, dlse=dlse, dropout=constant))
    r.q, r.k = r.aq, r.ak
    if do is not None:
        r.t = r.dp + r.delta * r.kf + (0.0 if r.dlse is None else r.dlse * r.kf)
        r.t_sink = r.delta if r.dlse is None else r.delta + r.dlse
    return r


def _range(r: Reference, bounds: Reference, largest: float, name: str) -> tuple[Array, Array]:
    """The least and the greatest value that a keep mask can give."""
    p = r.p * largest
    if name == "o":
        low, high = p @ np.minimum(r.v, 0.0), p @ np.maximum(r.v, 0.0)
        return r.heads(low), r.heads(high)
    if name == "dv":
        pt = p.swapaxes(-1, -2)
        return cast("tuple[Array, Array]", (pt @ np.minimum(r.do, 0.0), pt @ np.maximum(r.do, 0.0)))
    size = np.abs(bounds.arrays[name])
    return -size, size


def _within(
    report: ValueReport, r: Reference, bounds: Reference, largest: float, name: str, x: Array,
    allowed: Limits, taint: Taint | None, contract: Contract,
) -> None:  # fmt: skip
    """A finding if an element lies outside what any keep mask could give."""
    low, high = _range(r, bounds, largest, name)
    nearest = np.clip(np.where(np.isnan(x), 0.0, x), low, high)
    ratio = excess(x, nearest, allowed.b[name])
    free: Bools | bool = allowed.loose.get(name, False)
    if taint is not None:
        free = free | taint.cones[name]
    if contract.dead_rows != "zero" and r.dead.any():
        free = True  # what such rows give, and what they add to dk and dv, is the implementation's own
    overflow = np.isinf(x) & (np.maximum(np.abs(low), np.abs(high)) + allowed.b[name] >= contract.out_max)
    ratio = np.where(free | overflow, 0.0, ratio)
    report.budget[name] = float(ratio.max(initial=0.0))
    if report.budget[name] > 1.0:
        report.wrong[name] = torch.from_numpy(ratio > 1.0)
        oracle = "value" if np.isfinite(x[ratio > 1.0]).all() else "nonfinite"
        report.findings.append(
            element_finding(oracle, name, x, nearest, allowed.b[name], np.where(ratio > 1.0, ratio, -1.0), None)
        )


def _equalities(report: ValueReport, problem: Problem, given: dict[str, Array], allowed: Limits) -> None:
    """Findings for the inner products that must agree, per batch entry and key head."""
    B, _, Hkv, *_ = problem.sizes

    def inner(a: Array, b: Array) -> Array:
        """Sum of a * b over each batch entry and key head."""
        rows = (a * b).sum((-2, -1))  # (B, heads)
        return cast(Array, rows.reshape(B, Hkv, rows.shape[1] // Hkv).sum(-1))

    for name, left, right in (("dv", ("dv", "v"), ("do", "o")), ("dk", ("dk", "k"), ("dq", "q"))):
        pairs = []
        for a, b in (left, right):
            computed, other = (a, b) if a in given else (b, a)
            if computed not in given:
                break
            x, y = given[computed], problem.array(other)
            pairs.append((inner(x, y), inner(allowed.b[computed], np.abs(y)), inner(np.abs(x), np.abs(y))))
        if len(pairs) == 2:
            _equal(report, name, f"<{left[0]}, {left[1]}> must equal <{right[0]}, {right[1]}>", *pairs)
    if "dbias" in given and problem.sinks is None:
        total, limit = given["dbias"].sum(), allowed.b["dbias"].sum()
        want = 0.0 if problem.dlse is None else _live_sum(problem)
        sides = [(np.array([[x]]), np.array([[b]]), np.array([[abs(x)]])) for x, b in ((total, limit), (want, 0.0))]
        _equal(report, "dbias", "sum(dbias) must equal sum(dlse)", *sides)


def _live_sum(problem: Problem) -> float:
    r = Reference(problem)
    return 0.0 if r.dlse is None else float(r.dlse.sum())


def _equal(report: ValueReport, name: str, rule: str, left: tuple[Array, ...], right: tuple[Array, ...]) -> None:
    error = np.abs(left[0] - right[0])
    limit = left[1] + right[1] + 2.0**-44 * (left[2] + right[2])
    finite = np.isfinite(limit)  # an element that is not finite was judged by itself
    ratio = np.where(finite, excess(error, np.zeros_like(error), limit), 0.0)
    if not ratio.size or not (ratio > 1.0).any():
        return
    at = tuple(int(i) for i in np.unravel_index(int(ratio.argmax()), ratio.shape))
    got, want = float(left[0][at]), float(right[0][at])
    texts = pair(got, want)
    where = "" if name == "dbias" else f" at batch {at[0]}, key head {at[1]}"
    message = f"{rule}: {texts[0]} and {texts[1]} differ by more than {short(float(limit[at]))}{where}"
    report.findings.append(Finding("identity", name, message, at, float(error[at]), float(limit[at]), got, want))
