"""What a failing target answered, written beside the case file: got, want and limit of every wrong tensor."""

from __future__ import annotations

from pathlib import Path

from .judge import Verdict
from .session import Session
from .stored import inputs, save_answer
from .tensors import build


def kept_answer(session: Session, verdict: Verdict, path: Path, tensors: Path | None = None) -> Path | None:
    """The file with the wrong tensors of a verdict; None where it has none that can be compared element by element."""
    case, execution = verdict.case, verdict.execution
    if execution is None or (case.dropout and not session.judge.dropout_known):
        return None
    made = inputs(case, tensors) if tensors else build(case)
    wrong = {f.tensor for f in verdict.failures}
    return save_answer(path, made, execution.outputs, wrong, session.judge.contract(case.dtype))
