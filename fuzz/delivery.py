"""Verdicts as messages between a process that judges and the one that asked it: JSON and raw tensors, as in `wire`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..oracles.finding import Finding
from ..oracles.value import ValueReport
from .case import Case
from .compiling import Compiled
from .execute import Execution
from .judge import Verdict

Message = tuple[dict[str, Any], dict[str, Tensor]]
MEASURES = ("budget", "zrms", "zmax")


@dataclass(frozen=True)
class Judged:
    """A verdict, how long it took, what was compiled for it, and why the judge's worker can run no further case (or "")."""

    verdict: Verdict
    seconds: float = 0.0
    compiled: Mapping[str, Any] | None = None
    unusable: str = ""


def packed(verdict: Verdict, seconds: float, compiled: Compiled, unusable: str) -> Message:
    """The message of a verdict on a case that the other side knows. The tensors of one that passed stay behind."""
    execution, report, kept = verdict.execution, verdict.report, verdict.status != "pass"
    tensors: dict[str, Tensor] = {}
    if execution is not None and kept:
        tensors |= {f"outputs.{n}": x for n, x in execution.outputs.items()}
        tensors |= {f"exact.{n}": x for n, x in (execution.exact or {}).items()}
    if report is not None:
        tensors |= {f"wrong.{n}": x for n, x in report.wrong.items()}
    message = {
        "status": verdict.status,
        "findings": [f.to_json() for f in verdict.findings],
        "execution": None if execution is None else execution.to_json(),
        "exact": execution is not None and execution.exact is not None and kept,
        "report": None if report is None else {n: getattr(report, n) for n in MEASURES},
        "reported": [] if report is None else [f.to_json() for f in report.findings],
        "seconds": seconds,
        "compiled": {
            "variants": sorted(compiled.variants),
            "built": compiled.built,
            "seconds": compiled.seconds,
            "configs": compiled.configs,
        },
        "unusable": unusable,
    }
    return message, tensors


def unpacked(case: Case, message: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Judged:
    """What `packed` made a message of."""
    groups: dict[str, dict[str, Tensor]] = {"outputs": {}, "exact": {}, "wrong": {}}
    for name, x in tensors.items():
        group, _, tensor = name.partition(".")
        groups[group][tensor] = x
    execution = report = None
    if message["execution"] is not None:
        exact = groups["exact"] if message["exact"] else None
        execution = Execution.from_json(message["execution"], groups["outputs"], exact)
    if message["report"] is not None:
        reported = [Finding.from_json(f) for f in message["reported"]]
        report = ValueReport(reported, **message["report"], wrong=groups["wrong"])
    findings = tuple(Finding.from_json(f) for f in message["findings"])
    verdict = Verdict(case, message["status"], findings, report, execution)
    return Judged(verdict, message["seconds"], message["compiled"], message["unusable"])
