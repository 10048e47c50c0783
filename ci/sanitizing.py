"""`gate --sanitizer TOOL`: what the tool finds after the drawn cases, held to the ledger and to the base revision as they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import click

from ..fuzz.case import Case
from ..fuzz.judge import Verdict
from ..fuzz.ledger import Known
from ..fuzz.outcome import FailedCase, Outcome
from ..fuzz.sanitizer import SECONDS
from ..fuzz.sanitizing import checked, told
from ..fuzz.session import Session
from .compare import Compared


@dataclass
class Sanitized:
    """A tool's run within a gate: `seconds` is what the gate has left for it."""

    tool: str
    corpus: Iterable[Case]
    seed: int
    save: Path
    seconds: float

    def joined(self, outcome: Outcome, session: Session, known: Known, compared: Compared | None) -> None:
        """Add to a target's outcome what the tool finds of it."""
        if self.seconds <= 0:
            outcome.problems.append(f"the time was over before compute-sanitizer's {self.tool} ran")
            return
        seconds = min(self.seconds, SECONDS)
        run = checked(session, self.tool, self.corpus, self.seed, self.save, seconds)
        late = run.lost > 0 and seconds < SECONDS and any(f"not done within {seconds:g} s" in p for p in run.problems)
        outcome.lost += 0 if late else run.lost
        outcome.problems += run.problems
        outcome.problems += [f"{self.tool}: none of the {run.cases} cases was accepted"] * (run.accepted == 0)
        outcome.warnings += run.warnings
        outcome.extra |= run.extra
        failures = [f for f in run.failures if _unknown(f, known)]
        outcome.failures += self._new(failures, compared) if compared and failures else failures

    def _new(self, failures: list[FailedCase], compared: Compared) -> list[FailedCase]:
        """The failures that the tool does not report of the base revision on the same cases."""
        cases = list({f.case.key: f.case for f in failures}.values())
        before = told(compared.old, self.tool, cases, SECONDS)
        compared.unknown += bool(before.lost)
        keys = {f.key for found in before.findings.values() for f in found}
        for failed in failures:
            for finding in failed.findings:
                if finding.key in keys:
                    compared.shared(failed.case, finding)
        return [f for f in failures if not {x.key for x in f.findings} <= keys]


def _unknown(failed: FailedCase, known: Known) -> bool:
    """Whether the ledger does not excuse a failure."""
    verdict = known.sift(Verdict(failed.case, "fail", failed.findings))
    if not verdict.failures:
        click.echo(f"known: {failed.findings[0]}")
    return bool(verdict.failures)
