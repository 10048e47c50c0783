"""Negative controls: answers that are no answers, and a measure of how far they are from one that does not use the limits.

A limit wide enough to accept zeros checks nothing. A control counts on a case where some element of it differs from the
float64 answer by more than 8 units times the absolute-value propagation: the sum of the absolute values of everything
that is added up, with scores counted as often as they enter an exponent. There it must be rejected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ..oracles.contract import ETA, U32, UNIT, contract_for
from ..oracles.elements import judge_problem
from ..oracles.exact import Array, Problem, Reference
from .draw import DTYPES, Drawn, draw, with_extras

UNITS = 8.0
CONTROLS = ("zeros", "constant", "shuffled rows", "mean of v", "previous result")


def propagation(r: Reference, eta: float, unit: float) -> dict[str, Array]:
    """Size of the absolute values behind each element, partial sums included, in multiples of `unit` roundings.

    What is summed or exponentiated is float32, so it counts U32 / unit per term; `eta` / unit stands for values so small
    that the format loses them. Infinite where a score is so large that its rounding changes the weight e-fold.
    """
    small, fine, size = eta / unit, U32 / unit, abs(r.scale)
    added = np.abs(r.s - r.s0 * r.kf) + (0.0 if r.alibi is None else np.abs(r.alibi))
    exponent = fine * (size * r.qk * (1 + r.D) + np.abs(r.s) + np.abs(r.m) + added)
    exponent = np.where((UNITS * unit * exponent > 1.0) & (r.p > 0), np.inf, exponent)
    z, row_depth, key_depth = r.kf if r.z is None else r.z * r.kf, 1 + fine * r.n, 1 + fine * r.nq
    weight = np.where(r.p > 0, r.p * (1.0 + exponent), 0.0)
    mass = weight.sum(-1, keepdims=True)
    if r.sinks is not None:
        far = np.abs(r.m) + np.abs(r.keys_m) + np.where(r.p_sink > 0, np.abs(r.sinks), 0.0)
        mass = mass + r.p_sink * (1.0 + fine * far)
    o = row_depth * ((weight * z) @ r.av + r.ao * mass) + small * (1.0 + z @ r.av)
    lse = fine * (row_depth + np.abs(r.m) + r.alse) + mass
    out = {"o": r.heads(o), "lse": r.heads(lse)[..., 0]}
    if r.problem.do is None:
        return out
    again = np.where(r.p > 0, r.p * (1.0 + exponent + lse), 0.0)
    delta = (r.ado * (o + r.ao)).sum(-1, keepdims=True) * (1 + fine * r.Dv)
    t = r.at + (0.0 if r.dlse is None else np.abs(r.dlse))
    ds = again * t + r.p * (r.dov * z * (1 + fine * r.Dv) + delta) + small * r.kf * (1.0 + t)
    own = ds
    if r.g is not None:
        own = ds * np.abs(r.g) + r.p * t * 2 * np.abs(r.s0 / r.softcap) * (
            1.0 + fine * size * r.qk * (1 + r.D) / r.softcap
        )
    reach = own * size + small * r.kf * max(1.0, size)
    out |= {
        "dq": r.heads(row_depth * (reach @ r.ak) + small),
        "dk": key_depth * (reach.swapaxes(-1, -2) @ r.aq) + small,
    }
    out["dv"] = key_depth * (((again + small * r.kf) * z).swapaxes(-1, -2) @ r.ado) + small
    if r.bias is not None:
        out["dbias"] = r.over_bias(ds) * (1 + fine * r.over_bias(r.kf)) + small
    if r.sinks is not None:
        rows = r.p_sink * (1.0 + lse) * (delta + (0.0 if r.dlse is None else np.abs(r.dlse)))
        out["dsinks"] = r.over_sinks(rows) * (1 + fine * r.B * r.Lq) + small
    return cast("dict[str, Array]", out)


def controls(
    problem: Problem, answer: dict[str, Tensor], previous: dict[str, Tensor]
) -> Iterator[tuple[str, str, Tensor]]:
    """(control, tensor, values): every output replaced by what a broken kernel might leave there."""
    for name, x in answer.items():
        yield "zeros", name, torch.zeros_like(x)
        yield "constant", name, torch.full_like(x, 0.75)
        axis = 2 if x.dim() > 2 else -1
        yield "shuffled rows", name, torch.roll(x, 1, axis)
        if name in previous and previous[name].shape == x.shape:
            yield "previous result", name, previous[name]
    if problem.k.shape[2]:
        groups = problem.q.shape[1] // problem.k.shape[1]
        mean = problem.v.double().mean(2, keepdim=True).repeat_interleave(groups, 1)
        yield "mean of v", "o", mean.expand_as(answer["o"]).clone()


def previous_problem(p: Problem) -> Problem:
    """The same shapes with other values: whose result a stale cache would return."""
    return replace(p, q=p.q.flip(0, 2), k=p.k.flip(2), v=p.v.neg())


def examine(drawn: Drawn) -> Iterator[tuple[str, str, bool, bool]]:
    """(control, tensor, differs, rejected) for every control of a case."""
    contract, p = contract_for("", drawn.dtype), drawn.problem
    with np.errstate(all="ignore"):
        r = Reference(p)
        answer, previous = r.outputs(), Reference(previous_problem(p)).outputs()
        size = propagation(r, ETA[drawn.dtype], UNIT[drawn.dtype])
    for control, name, values in controls(p, answer, previous):
        far = (values - answer[name]).abs() > UNITS * UNIT[drawn.dtype] * torch.from_numpy(
            np.array(size[name])
        ).nan_to_num(nan=np.inf)
        differs = bool((far & answer[name].isfinite()).any())
        rejected = name in judge_problem(p, {name: values}, contract).wrong if differs else False
        yield control, name, differs, rejected


def count(
    cases: int, first_seed: int = 9_000_000, report: Callable[[str], object] = lambda line: None
) -> Counter[tuple[str, str]]:
    """Per control: how often it was tried, differed, was rejected; every miss is reported."""
    seen: Counter[tuple[str, str]] = Counter()
    for index in range(cases):
        drawn = draw(first_seed + index, tuple(DTYPES)[index % 3])
        drawn = with_extras(drawn) if index % 2 else drawn
        for control, name, differs, rejected in examine(drawn):
            seen[control, "tried"] += 1
            seen[control, "differs"] += differs
            seen[control, "rejected"] += rejected
            if differs and not rejected:
                report(f"MISSED {control} as {name}: {drawn}")
    return seen
