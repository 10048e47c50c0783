"""The value verdict on one run of a case, and which single deviation of precision explains a failure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from .contract import Contract
from .diagnose import Deviation, diagnose
from .elements import ValueReport, judge_problem
from .exact import Problem
from .identities import judge_unknown_dropout

if TYPE_CHECKING:
    from ..fuzz.tensors import Inputs

__all__ = ["Deviation", "ValueReport", "diagnose", "judge_problem", "judge_values"]


def judge_values(
    inputs: Inputs, outputs: Mapping[str, Tensor], contract: Contract, *, generic: bool, dropout_known: bool = True
) -> ValueReport:
    """Judge what a target returned for `inputs`; keys of `outputs` among o, lse, dq, dk, dv, dbias, missing ones unjudged.

    `generic` data (no ties or structure) is judged by the statistical tier as well. With dropout whose keep mask is
    unknown only what holds for every mask is judged.
    """
    if inputs.case.dropout and not dropout_known:
        return judge_unknown_dropout(Problem.of(inputs, dropout_known=False), outputs, contract, inputs.case.dropout)
    return judge_problem(Problem.of(inputs), outputs, contract, generic=generic)
