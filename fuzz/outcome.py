"""What came of judging one target: counts, failures with their files, the exit code, and the JSON that says all of it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..oracles.finding import Finding
from .case import Case
from .commands import VERDICTS, Exit, Stop, worst
from .corpus import SCHEMA, Record, as_text, save, write_whole
from .judge import Verdict
from .session import Session, resolved

KNOWN_OF_TARGET = ("interpreted", "bound", "unbound", "required", "returns_lse", "adapter", "attr")
"""What a failure file keeps of how the target was called, for a script to be written without loading it."""


@dataclass(frozen=True)
class FailedCase:
    """A failing case, what is wrong with it, the file that holds it, and what is shown to a reader."""

    case: Case
    findings: tuple[Finding, ...]
    path: Path | None = None
    text: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The JSON object of a failure."""
        return {
            "case": self.case.to_json(),
            "findings": [f.to_json() for f in self.findings],
            "replay": replay_line(self.path) if self.path else "",
            **self.extra,
        }


@dataclass
class Outcome:
    """Counts and failures of one target.

    `problems` say why too little was measured, `lost` are cases lost by the harness, `stop` is why the target did not run.
    `report` shows the failures to a reader, `closing` the counts.
    """

    target: str
    session: Session | None = None
    cases: int = 0
    accepted: int = 0
    refused: int = 0
    inexpressible: int = 0
    lost: int = 0
    skipped: int = 0
    seconds: float = 0.0
    first_failure: float | None = None
    failures: list[FailedCase] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    stop: Exit | None = None
    interrupted: bool = False
    report: str = ""
    closing: str = ""

    @property
    def code(self) -> Exit:
        """The exit code of this target alone."""
        if self.stop is not None:
            return self.stop
        return worst(
            code
            for code, holds in (
                (Exit.WRONG, bool(self.failures)),
                (Exit.INFRASTRUCTURE, self.lost > 0),
                (Exit.BLIND, bool(self.problems) or self.accepted == 0),
            )
            if holds
        )

    def count(self, verdict: Verdict) -> None:
        """Add one case."""
        self.cases += 1
        match verdict.status:
            case "refused":
                self.refused += 1
            case "inexpressible":
                self.inexpressible += 1
            case "infrastructure":
                self.lost += 1
            case "skipped":
                self.skipped += 1
            case _:
                self.accepted += 1

    def document(self) -> dict[str, Any]:
        """The JSON object of this target."""
        s = self.session
        return {
            "schema": SCHEMA,
            "target": self.target,
            "dialect": s.info["dialect"] if s else "",
            "device": s.info["device"] if s else "",
            "contract": s.judge.spec if s else "",
            "arithmetic": resolved(s) if s else {},
            "supports": asdict(s.declared) if s and s.declared else None,
            "verdict": VERDICTS[self.code],
            "warnings": self.warnings,
            "problems": self.problems,
            "cases": self.cases,
            "accepted": self.accepted,
            "refused": self.refused,
            "inexpressible": self.inexpressible,
            "skipped": self.skipped,
            "seconds": round(self.seconds, 3),
            "seconds_to_first_failure": self.first_failure,
            "failures": [f.to_json() for f in self.failures],
            "environment": s.info["environment"] if s else {},
            **self.extra,
        }


def document(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The document of one target, or those of several under `targets` with the verdict over all."""
    documents = [o.document() for o in outcomes]
    verdict = VERDICTS[worst(o.code for o in outcomes)]
    return documents[0] if len(documents) == 1 else {"schema": SCHEMA, "verdict": verdict, "targets": documents}


def write_json(path: Path | None, outcomes: Sequence[Outcome]) -> None:
    """Write the document of one target or of several."""
    if path is None:
        return
    try:
        write_whole(path, as_text(document(outcomes)))
    except OSError as e:
        raise Stop(f"{path} could not be written: {e.strerror}", Exit.INFRASTRUCTURE) from None


def record(session: Session, case: Case, findings: Sequence[Finding], preceding: Sequence[Case] = ()) -> Record:
    """The failure as it is written to disk, with what a script needs to call the target without loading it first."""
    info = session.info
    how = {n: info[n] for n in KNOWN_OF_TARGET}
    return Record(
        target=session.target,
        case=case,
        dialect=info["dialect"],
        device=info["device"],
        contract=session.judge.spec,
        preceding=tuple(preceding),
        findings=tuple(findings),
        environment=info["environment"] | how,
    )


class Keeper:
    """Saves failures the moment they are found; a later, smaller case of the same finding replaces its file."""

    def __init__(self, session: Session, folder: Path) -> None:
        self.session, self.folder = session, folder
        self._files: dict[str, Path] = {}
        self._made: set[Path] = set()

    def file(self, key: str) -> Path | None:
        """The file of a failure; None before it is saved."""
        return self._files.get(key)

    def keep(self, key: str, case: Case, findings: Sequence[Finding], preceding: Sequence[Case] = ()) -> Path:
        """The file that now holds the failure `key`."""
        made = record(self.session, case, findings, preceding)
        new = not (self.folder / made.name).exists()
        path = save(made, self.folder)
        self._made |= {path} if new else set()
        old = self._files.get(key)
        self._files[key] = path
        if old in self._made and old not in self._files.values():
            old.unlink(missing_ok=True)  # files that an earlier run left are not ours to remove
        return path


def replay_line(path: Path) -> str:
    """The line to paste that runs a saved case again."""
    return f"flashproof replay {shlex.quote(str(path))}"
