"""Every element against float64 within its limit, non-finite entries, rows with no allowed key, error statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from .contract import TENSORS, Contract
from .exact import Array, Bools, Problem, Reference, doubles
from .finding import Finding
from .limits import Limits, limits
from .limits_forward import lowest_lse
from .spread import sigmas
from .taint import Taint, separate
from .wording import element_finding, shape_finding, statistical_finding

ZRMS, ZMAX, FEWEST = 2.0, 8.0, 64
"""The statistical tier warns above these, on generic data and tensors with at least FEWEST elements. Of 43,975 tensors of
conforming runs on normal data none had a root mean square above 1.38 or a largest value above 5.4."""


@dataclass
class ValueReport:
    """Findings of one run, and how close it came.

    `budget` is max |error| / limit, `zrms` and `zmax` the error over its expected scale. `wrong` holds a boolean mask of the
    wrong elements for the tensors that have some.
    """

    findings: list[Finding] = field(default_factory=list)
    budget: dict[str, float] = field(default_factory=dict)
    zrms: dict[str, float] = field(default_factory=dict)
    zmax: dict[str, float] = field(default_factory=dict)
    wrong: dict[str, Tensor] = field(default_factory=dict)


def judge_problem(
    problem: Problem, outputs: Mapping[str, Tensor], contract: Contract, *, generic: bool = False
) -> ValueReport:
    """Judge what a target returned for a problem; keys of `outputs` among TENSORS, missing ones unjudged.

    `generic` data (no ties or structure) is judged by the statistical tier as well. ArithmeticError where the answer or a
    limit is NaN, which is a fault of the oracle: nothing is said of the target then.
    """
    if contract.sink_lse == "without" and problem.sinks is not None:
        return _keys_lse(problem, outputs, contract, generic)
    report = ValueReport()
    names = [n for n in TENSORS if outputs.get(n) is not None]
    with np.errstate(all="ignore"):
        clean, taint = separate(problem, contract)
        r = Reference(clean)
        backward = any(n not in ("o", "lse") for n in names)
        allowed = limits(r, contract, backward=backward)
        check_numbers(r, allowed)
        generic = generic and (contract.dead_rows == "zero" or bool(r.n.all()))  # else some rows answer what they like
        enough = generic and taint is None and max((outputs[n].numel() for n in names), default=0) >= FEWEST
        spread = sigmas(r, contract, backward=backward) if enough else {}
        judge = _Judge(r, contract, allowed, taint, report)
        for name in names:
            if name in r.arrays:
                judge.tensor(name, outputs[name])
                if name in spread:
                    judge.statistics(name, outputs[name], spread[name])
    return report


def _keys_lse(problem: Problem, outputs: Mapping[str, Tensor], contract: Contract, generic: bool) -> ValueReport:
    """The report where lse leaves the sink out: it is that of the keys alone. Gradients through it are not judged."""
    keys = replace(problem, sinks=None, do=None, dlse=None)
    rest = {n: x for n, x in outputs.items() if n == "o" or (n != "lse" and problem.dlse is None)}
    parts = [
        judge_problem(keys, {n: x for n, x in outputs.items() if n == "lse"}, contract, generic=generic),
        judge_problem(problem, rest, contract.but(sink_lse="with"), generic=generic),
    ]
    whole = ValueReport([f for part in parts for f in part.findings])
    for part in parts:
        for name in ("budget", "zrms", "zmax", "wrong"):
            getattr(whole, name).update(getattr(part, name))
    return whole


def check_numbers(r: Reference, allowed: Limits) -> None:
    """ArithmeticError that names a tensor whose answer or limit is NaN."""
    for name, limit in allowed.b.items():
        for what, x in (("answer", r.arrays[name]), ("limit", limit)):
            if np.isnan(x).any():
                raise ArithmeticError(f"the oracle's own {what} for {name} is NaN")


@dataclass(frozen=True)
class _Judge:
    """One run against one reference."""

    r: Reference
    contract: Contract
    limits: Limits
    taint: Taint | None
    report: ValueReport

    def tensor(self, name: str, got: Tensor) -> None:
        """Add the findings of one tensor."""
        want = self.r.arrays[name]
        if tuple(got.shape) != want.shape:
            self.report.findings.append(shape_finding(name, tuple(got.shape), want.shape))
            return
        x = doubles(got)
        want, limit, free, broken = self._expect(name, x)
        ratio = excess(x, want, limit)
        if free is not None:
            ratio = np.where(free, 0.0, ratio)
        if not np.isfinite(x).all():
            ratio = np.where(self._overflowed(name, x, want, limit), 0.0, ratio)
        ratio = ratio if broken is None else np.where(broken, np.inf, ratio)
        self.report.budget[name] = float(ratio.max(initial=0.0))
        if self.report.budget[name] > 1.0:
            self._wrong(name, x, want, limit, ratio)

    def statistics(self, name: str, got: Tensor, sigma: Array) -> None:
        """Error over its expected scale: a warning when it is larger than independent roundings explain."""
        want = self.r.arrays[name]
        if tuple(got.shape) != want.shape:
            return
        z = (doubles(got) - want) / sigma
        ok = np.isfinite(z) & (sigma > 0)
        if name in self.limits.loose:
            ok &= ~self.limits.loose[name]
        count = int(ok.sum())
        if not count:
            return
        z = np.where(ok, z, 0.0)
        rms, largest = float(np.sqrt((z * z).sum() / count)), float(np.abs(z).max())
        self.report.zrms[name], self.report.zmax[name] = rms, largest
        if count >= FEWEST and (rms > ZRMS or largest > ZMAX):
            self.report.findings.append(statistical_finding(name, rms, largest, count, ZRMS, ZMAX))

    def _expect(self, name: str, x: Array) -> tuple[Array, Array, Bools | None, Bools | None]:
        """want, limit, where nothing is asked, where a rule that is not a limit is broken."""
        want, limit = self.r.arrays[name], self.limits.b[name]
        free: Bools | None = self.limits.loose.get(name)
        broken: Bools | None = None
        if self.r.dead.any():
            want, limit, free, broken = self._dead_rows(name, x, want, limit, free)
        if self.taint is not None:
            cone = self.taint.cones[name]
            free = cone if free is None else free | cone
            if name == "o" and self.contract.nonfinite == "propagate":
                swallowed = self.taint.must & np.isfinite(x)
                broken = swallowed if broken is None else broken | swallowed
        return want, limit, free, broken

    def _dead_rows(
        self, name: str, x: Array, want: Array, limit: Array, free: Bools | None
    ) -> tuple[Array, Array, Bools | None, Bools | None]:
        """Rows with no allowed key, by the declared policy. Without one they are 0 and lse -inf like any other answer."""
        r, policy = self.r, self.contract.dead_rows
        rows = self._dead(name, want.shape)
        if name == "lse":
            if self.contract.dead_lse == "any":
                return want, limit, _or(free, rows), None
            return (np.where(rows, np.inf, want) if self.contract.dead_lse == "+inf" else want), limit, free, None
        if policy == "zero":
            return want, limit, free, None
        if name == "o" and policy == "nan":
            return want, limit, _or(free, rows), rows & ~np.isnan(x)
        if name == "o" and policy == "mean" and r.Lk:
            mean = r.at_rows.full_rows(r.v.mean(-2, keepdims=True))
            size = r.at_rows.full_rows(np.abs(r.v).mean(-2, keepdims=True))
            c = self.contract
            close = (
                size * (c.p_u + c.dot_u + c.acc_k * c.acc_u * r.Lk + 8 * c.u + c.exp_u)
                + c.out_u * np.abs(mean) * 1.01
                + c.out_eta
            )
            return np.where(rows, mean, want), np.where(rows, close, limit), free, None
        return want, limit, _or(free, rows), None

    def _dead(self, name: str, shape: tuple[int, ...]) -> Bools:
        """Elements that belong to rows with no allowed key; for dk, dv and dbias the heads that have such rows."""
        r = self.r
        dead = r.heads(np.broadcast_to(r.dead, (r.B, r.Hkv, r.at_rows.R, 1)))
        if name == "lse":
            return dead[..., 0]
        if name in ("o", "dq"):
            return np.broadcast_to(dead, shape)
        if name in ("dbias", "dsinks"):
            return np.broadcast_to(dead.any(), shape)
        heads = np.broadcast_to(r.dead, (r.B, r.Hkv, r.at_rows.R, 1)).any(-2, keepdims=True)
        return np.broadcast_to(heads, shape)

    def _overflowed(self, name: str, x: Array, want: Array, limit: Array) -> Bools:
        """Infinities of the right sign where the answer plus its limit leaves the format; equal infinities."""
        largest = lowest_lse(self.contract) if name == "lse" else self.contract.out_max
        return cast(Bools, np.isinf(x) & (np.sign(x) == np.sign(want)) & (np.abs(want) + limit >= largest))

    def _wrong(self, name: str, x: Array, want: Array, limit: Array, ratio: Array) -> None:
        """Findings of the wrong elements: rows with no allowed key, non-finite entries and values apart."""
        wrong = ratio > 1.0
        self.report.wrong[name] = torch.from_numpy(wrong)
        dead = (
            wrong & self._dead(name, wrong.shape)
            if name in ("o", "lse", "dq") and self.r.dead.any()
            else np.zeros_like(wrong)
        )
        rest = wrong & ~dead
        finite = np.isfinite(x) & np.isfinite(want)
        if self.taint is not None and name == "o":
            finite &= ~self.taint.must
        parts = (("dead-row", dead), ("nonfinite", rest & ~finite), ("value", rest & finite))
        for oracle, part in parts:
            if part.any():
                must = self.taint.must if self.taint is not None and name == "o" else None
                self.report.findings.append(
                    element_finding(oracle, name, x, want, limit, np.where(part, ratio, -1.0), must)
                )


def excess(x: Array, want: Array, limit: Array) -> Array:
    """|x - want| / limit; 0 where equal (equal infinities too), inf where x is NaN or an infinity that `want` is not."""
    error = np.abs(x - want)
    same = x == want
    with np.errstate(all="ignore"):  # 0 / 0, inf / inf
        ratio = error / limit
    return cast(Array, np.where(same, 0.0, np.where(np.isnan(ratio), np.inf, ratio)))


def _or(a: Bools | None, b: Bools) -> Bools:
    return b if a is None else a | b
