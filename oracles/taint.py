"""Where NaN and Inf in the inputs may, and must, show in the outputs.

A problem with non-finite inputs is judged as the same problem with zeros in their place, except inside the cones that
those inputs reach. One key that no row of its head sees reaches nothing, unless the contract says that it may leak. A
key that some rows see reaches all of them: 0 * NaN in P V is what a tile does for the rows that mask it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from .contract import Contract
from .exact import Bools, Problem, Rows, any_of


@dataclass(frozen=True)
class Taint:
    """`cones`: per tensor, the elements that non-finite inputs may reach. `must`: those of o that cannot be finite."""

    cones: dict[str, Bools]
    must: Bools


def separate(problem: Problem, contract: Contract) -> tuple[Problem, Taint | None]:
    """The problem with zeros for its non-finite inputs, and what those reach; the problem itself when all are finite."""
    names = [n for n in ("q", "k", "v", "do", "dlse", "bias") if getattr(problem, n) is not None]
    wrong = {n: _wrong(problem, n) for n in names}
    if not any(w.any() for w in wrong.values()):
        return problem, None
    clean: dict[str, Any] = {n: _zeroed(getattr(problem, n), w) for n, w in wrong.items() if w.any()}
    return replace(problem, **clean), _taint(problem, contract, wrong)


def _wrong(problem: Problem, name: str) -> Bools:
    """Where the tensor is not finite; a bias of -inf is a mask."""
    x = problem.array(name)
    return cast(Bools, np.isnan(x) | np.isposinf(x)) if name == "bias" else ~np.isfinite(x)


def _zeroed(t: Tensor, where: Bools) -> Tensor:
    return torch.where(torch.from_numpy(where), torch.zeros((), dtype=t.dtype), t)


def _taint(problem: Problem, contract: Contract, wrong: dict[str, Bools]) -> Taint:
    at = Rows(*problem.sizes)
    live = np.broadcast_to(at.live(problem), (at.B, at.Hkv, at.R, at.Lk))
    everywhere = contract.masked_nonfinite == "may_leak"
    see = (
        np.ones((at.B, at.Hkv, at.Lk, 1), bool) if everywhere else any_of(live, -2).swapaxes(-1, -2)
    )  # keys that a row may touch
    q = any_of(at.rows(wrong["q"]), -1)
    k = any_of(see & any_of(wrong["k"], -1), -2)
    bias = _pairs(at, live, wrong.get("bias"))
    softmax = np.broadcast_to(q | k | any_of(bias, -1), (at.B, at.Hkv, at.R, 1))
    o = softmax | any_of(see & wrong["v"], -2)
    cones = {"o": at.heads(o), "lse": at.heads(softmax)[..., 0]}
    if problem.do is not None:
        cones |= _gradient_cones(problem, at, wrong, softmax, o)
    if contract.nonfinite == "any":
        cones = {name: np.ones_like(cone) for name, cone in cones.items()}
    return Taint(cones, at.heads(_must(problem, at, live, wrong)))


def _pairs(at: Rows, live: Bools, bias: Bools | None) -> Bools:
    """Live pairs whose bias is NaN or +inf."""
    return np.zeros((1, 1, 1, 1), bool) if bias is None else live & at.pairs(bias)


def _gradient_cones(problem: Problem, at: Rows, wrong: dict[str, Bools], softmax: Bools, o: Bools) -> dict[str, Bools]:
    """delta and dS are per row, so any taint of a row of o or do taints its dS, masked pairs included; dk and dv gather rows."""
    do = at.rows(wrong["do"])
    row = softmax | any_of(o, -1) | any_of(do, -1)
    if "dlse" in wrong:
        row = row | at.rows(wrong["dlse"][..., None])
    column = any_of(row, -2)
    cones = {
        "dq": np.broadcast_to(at.heads(row), problem.q.shape),
        "dk": np.broadcast_to(column, problem.k.shape),
        "dv": np.broadcast_to(any_of(softmax | do, -2), problem.v.shape),
    }
    if problem.bias is not None:
        full = at.full(np.broadcast_to(row, (*row.shape[:3], at.Lk)))
        axes = tuple(i for i, n in enumerate(problem.bias.shape) if n == 1)
        cones["dbias"] = cast(Bools, full.any(axes, keepdims=True)) if axes else full
    if problem.sinks is not None:
        cones["dsinks"] = cast(Bools, at.heads(np.broadcast_to(row, (at.B, at.Hkv, at.R, 1))).any((0, 2, 3)))
    return cones


def _must(problem: Problem, at: Rows, live: Bools, wrong: dict[str, Bools]) -> Bools:
    """Elements of o that are not finite by IEEE arithmetic whatever the formula.

    A NaN score makes its whole row NaN; a non-finite v_j times any weight, 0 included, is Inf or NaN. What an infinite
    score does depends on the formula, so it promises nothing; nor does a dropped key.
    """
    used = live if problem.dropout is None else live & (at.rows(problem.array("dropout")) != 0)
    nan_q = any_of(at.rows(np.isnan(problem.array("q"))), -1)
    nan_k = any_of(np.isnan(problem.array("k")), -1).swapaxes(-1, -2)
    scores = live & (nan_q | nan_k)
    if problem.bias is not None:
        scores = scores | (live & at.pairs(np.isnan(problem.array("bias"))))
    through_v = (used.astype(np.float64) @ wrong["v"].astype(np.float64)) > 0
    return cast(Bools, any_of(scores, -1) | through_v)
