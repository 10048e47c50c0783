"""Other conventions under which a wrong answer would be right: the likely cause of a target that fails everything.

The outputs of a failing case are judged again as if the target had been asked something slightly different, or had returned
its answer in another form. What then is right says which convention the target follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from ..oracles.contract import Contract
from ..oracles.elements import judge_problem
from ..oracles.exact import Problem
from .case import Case
from .judge import VALUE_ORACLES, Judge, Verdict
from .masks import Causal, Full, Not, Window
from .tensors import build

Outputs = dict[str, Tensor]
LN2 = math.log(2.0)


@dataclass(frozen=True)
class Alternative:
    """A convention: its name, what it says of the target, what to do, the case that it makes of one, the outputs of outputs.

    `case` gives None where the convention makes no difference.
    """

    name: str
    words: str
    advice: str
    case: Callable[[Case], Case | None] = lambda case: case
    outputs: Callable[[Case, Outputs], Outputs] = lambda _, outputs: outputs
    heads: Callable[[Case], list[int] | None] = lambda _: None  # order of the query heads


@dataclass(frozen=True)
class Cause:
    """An alternative that makes `explained` of the failing cases right that it speaks of, and of how many."""

    name: str
    words: str
    advice: str
    explained: int
    of: int

    def __str__(self) -> str:
        return f"right if {self.words}: {self.advice}"


def _realigned(case: Case) -> Case | None:
    if not isinstance(case.mask, Causal) or case.Lq == case.Lk:
        return None
    return case.but(mask=Causal("bottom_right" if case.mask.align == "top_left" else "top_left"))


def _noncausal(case: Case) -> Case | None:
    return case.but(mask=Full()) if isinstance(case.mask, Causal) else None


def _scaled(scale: Callable[[Case], float]) -> Callable[[Case], Case | None]:
    return lambda case: (
        case.but(scale=scale(case)) if case.scale is None and scale(case) != case.resolved_scale else None
    )


def _inverted(case: Case) -> Case | None:
    return case.but(mask=Not(case.mask)) if case.mask_form == "bool" else None


def _shorter(case: Case) -> Case | None:
    m = case.mask
    return case.but(mask=replace(m, left=m.left - 1)) if isinstance(m, Window) and m.left > 0 else None


def _interleaved(case: Case) -> list[int] | None:
    """Query head h reads key head h % Hkv: the order of heads in which the groups lie side by side."""
    same = case.G == 1 or case.Hkv == 1
    return None if same else [g * case.Hkv + kv for kv in range(case.Hkv) for g in range(case.G)]


def _base_2(_: Case, out: Outputs) -> Outputs:
    return out | {"lse": out["lse"] * LN2} if "lse" in out else {}


def _negated(_: Case, out: Outputs) -> Outputs:
    return out | {"lse": -out["lse"]} if "lse" in out else {}


def _unscaled(case: Case, out: Outputs) -> Outputs:
    grads = {n: (out[n].double() * case.resolved_scale).to(out[n].dtype) for n in ("dq", "dk") if n in out}
    return out | grads if grads else {}


ALTERNATIVES = (
    Alternative("lse_base_2", "lse were a binary logarithm", "multiply lse by ln 2, since it must be natural", outputs=_base_2),
    Alternative("lse_negated", "lse were negated", "return log sum exp with its own sign", outputs=_negated),
    Alternative(
        "causal_alignment", "causal were aligned at the {other} corner",
        "with Lq other than Lk the dialect aligns it {own}; change the kernel, or take a dense mask and pass no causal flag",
        _realigned,
    ),
    Alternative(
        "causal_ignored", "no pair were masked", "the causal keyword does nothing; use it, or leave it out of the signature",
        _noncausal,
    ),
    Alternative(
        "scale_missing", "scores were not scaled", "without an explicit scale the definition multiplies q.k by 1/sqrt(D)",
        _scaled(lambda case: 1.0),
    ),
    Alternative(
        "scale_twice", "scores were scaled by 1/D", "the scale 1/sqrt(D) is applied twice", _scaled(lambda case: 1.0 / case.D)
    ),
    Alternative(
        "mask_inverted", "True in a boolean mask meant masked out", "in this dialect True means attend; invert the mask",
        _inverted,
    ),
    Alternative(
        "window_exclusive", "the window counted the query's own key", "window_size counts the keys before the diagonal",
        _shorter,
    ),
    Alternative(
        "heads_interleaved", "query head h read key head h % Hkv", "query head h reads key head h // (Hq / Hkv)",
        heads=_interleaved,
    ),
    Alternative(
        "gradients_unscaled", "dq and dk lacked the factor scale", "multiply dq and dk by the scale in the backward pass",
        outputs=_unscaled,
    ),
)  # fmt: skip
"""Conventions that kernels differ in, the commoner ones first."""


def causes(judge: Judge, verdicts: Iterable[Verdict]) -> list[Cause]:
    """The alternatives that make failing answers right, those that explain most of them first; at most one for each case."""
    failing = [v for v in verdicts if _by_value(v)]
    found = [c for a in ALTERNATIVES if (c := _cause(a, judge, failing)) is not None]
    return sorted(found, key=lambda c: -c.explained)


def _by_value(verdict: Verdict) -> bool:
    """Whether what fails is a value, with all outputs there to be judged again."""
    seen = verdict.execution is not None and bool(verdict.execution.outputs)
    return seen and bool(verdict.failures) and any(f.oracle in VALUE_ORACLES for f in verdict.failures)


def _cause(alternative: Alternative, judge: Judge, failing: list[Verdict]) -> Cause | None:
    answers = [(v.case, _right(alternative, v, judge.contract(v.case.dtype))) for v in failing]
    spoken = [(case, right) for case, right in answers if right is not None]
    explained = [case for case, right in spoken if right]
    if not explained:
        return None
    mask = explained[0].mask
    own = mask.align if isinstance(mask, Causal) else "top_left"
    told = {"own": own.replace("_", "-"), "other": ("top-left", "bottom-right")[own == "top_left"]}
    return Cause(
        alternative.name,
        alternative.words.format(**told),
        alternative.advice.format(**told),
        len(explained),
        len(failing),
    )


def _right(alternative: Alternative, verdict: Verdict, contract: Contract) -> bool | None:
    """Whether the outputs are right under the alternative; None where it makes no difference."""
    assert verdict.execution is not None
    case = alternative.case(verdict.case)
    outputs = alternative.outputs(verdict.case, dict(verdict.execution.outputs))
    order = alternative.heads(verdict.case)
    changed = case is not verdict.case or order is not None or _changed(outputs, verdict.execution.outputs)
    if case is None or not outputs or not changed:
        return None
    problem = Problem.of(build(case))
    if order is not None:
        problem, outputs = _reordered(problem, outputs, order)
    try:
        return not any(f.severity == "fail" for f in judge_problem(problem, outputs, contract).findings)
    except ArithmeticError:  # of the oracle: nothing is said then
        return False


def _changed(new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> bool:
    return any(new[n] is not old[n] for n in new)


def _reordered(problem: Problem, outputs: Outputs, order: list[int]) -> tuple[Problem, Outputs]:
    """The problem and outputs with the query heads in another order."""
    do, dlse = (None if x is None else x[:, order] for x in (problem.do, problem.dlse))
    problem = replace(problem, q=problem.q[:, order], do=do, dlse=dlse)
    return problem, {n: x[:, order] if n in ("o", "lse", "dq") else x for n, x in outputs.items()}
