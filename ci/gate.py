"""The gate for kernel changes: saved cases first, then a fixed number of drawn ones, one table and one exit code."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from tabulate import tabulate

from ..fuzz.commands import (
    COUNT,
    FILE,
    FOLDER,
    JSON,
    SAVE,
    SEED,
    VERDICTS,
    Exit,
    Options,
    Seconds,
    Stop,
    flashproof,
    takes_options,
    worst,
)
from ..fuzz.corpus import CORPUS, CorpusError, Record, load_all, write_whole
from ..fuzz.found import MIN_CASES
from ..fuzz.hunting import Budget, hunted, rerun
from ..fuzz.outcome import FailedCase, Outcome, replay_line, write_json
from ..fuzz.session import Session, header, opened

EXAMPLES, MAX_SECONDS = 400, 600.0
Corpus = list[tuple[Path, Record]]


@dataclass(frozen=True)
class Plan:
    """What every target of a gate has to do: `end` is the time.monotonic() at which the whole gate stops."""

    options: Options
    corpus: Corpus
    examples: int
    min_cases: int
    seed: int
    save: Path
    end: float

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self.end - time.monotonic()


@flashproof.command()
@click.argument("targets", metavar="TARGET...", nargs=-1, required=True)
@takes_options
@click.option(
    "--examples", type=COUNT, default=EXAMPLES, show_default=True, metavar="N", help="Cases to draw for each target."
)
@click.option(
    "--max-seconds",
    type=Seconds(),
    default=MAX_SECONDS,
    show_default=True,
    metavar="S",
    help="Time for all of it; reached first, exit code 4.",
)
@click.option(
    "--min-cases",
    type=COUNT,
    default=MIN_CASES,
    show_default=True,
    metavar="N",
    help="Fewer accepted cases are exit code 4.",
)
@click.option(
    "--corpus",
    type=FOLDER,
    default=None,
    metavar="DIR",
    help=f"Saved cases to replay first (default {CORPUS}/ where it exists).",
)
@click.option(
    "--summary", type=FILE, default=None, metavar="FILE", help="Write the table and the failures as Markdown."
)
@SEED
@SAVE
@JSON
def gate(
    targets: tuple[str, ...], options: Options, examples: int, max_seconds: float, min_cases: int, corpus: Path | None,
    summary: Path | None, seed: int, save: Path, json_file: Path | None,
) -> Exit:  # fmt: skip
    """Replay saved cases on every TARGET, draw new ones, and say in one exit code whether all are right.

    Codes: 0 right, 1 wrong, 2 usage, 4 too little was measured, 5 a worker was lost.

    Example: flashproof gate mykernels.attention:flash --examples 400 --max-seconds 300
    """
    plan = Plan(options, saved_cases(corpus), examples, min_cases, seed, save, time.monotonic() + max_seconds)
    outcomes: list[Outcome] = []
    try:
        for target in targets:
            outcomes.append(gated(target, plan))
            if outcomes[-1].interrupted:
                break
    finally:
        write_json(json_file, outcomes)
    click.echo("\n" + table(outcomes))
    if summary:
        write_whole(summary, markdown(outcomes))
    return worst(o.code for o in outcomes)


def saved_cases(folder: Path | None) -> Corpus:
    """The records of a corpus folder; of the default one if it exists."""
    if folder is None and not CORPUS.is_dir():
        return []
    if folder is not None and not folder.is_dir():
        raise Stop(f"--corpus must be a folder of case files, but there is no {folder}")
    try:
        return load_all(folder or CORPUS)
    except CorpusError as e:
        raise Stop(str(e)) from None


def gated(target: str, plan: Plan) -> Outcome:
    """The outcome of one target; one that cannot be run is told and does not keep the others from running."""
    try:
        with opened(target, plan.options) as session:
            click.echo("\n".join(header(session)))
            replayed = replay(session, plan)
            outcome = (
                Outcome(target, session)
                if replayed.interrupted
                else hunted(
                    session, Budget(plan.examples, max(plan.left, 0.001), plan.seed), plan.save, "gate", plan.min_cases
                )
            )
    except Stop as e:
        e.show()
        click.echo()
        return Outcome(target, stop=e.code, problems=[e.message])
    click.echo(f"\n{outcome.report}\n" if outcome.report else "")
    return joined(replayed, outcome)


def replay(session: Session, plan: Plan) -> Outcome:
    """The saved cases on a target, each with the cases that have to come before it."""
    outcome = Outcome(session.target, session)
    try:
        _replay_all(session, plan, outcome)
    except KeyboardInterrupt:
        outcome.interrupted = True
        outcome.problems.append(f"interrupted after {outcome.cases} of {len(plan.corpus)} saved cases")
    return outcome


def _replay_all(session: Session, plan: Plan, outcome: Outcome) -> None:
    for path, record in plan.corpus:
        if plan.left <= 0:
            outcome.problems.append(
                f"{outcome.cases} of {len(plan.corpus)} saved cases were replayed before the time was over"
            )
            break
        verdict = rerun(session, record)
        outcome.count(verdict)
        if verdict.failures:
            outcome.failures.append(FailedCase(record.case, verdict.failures, path))
            click.echo(f"  {path}: {verdict.failures[0]}")


def joined(replayed: Outcome, outcome: Outcome) -> Outcome:
    """The outcome of a target with its saved cases: their failures come first, their number is told apart."""
    outcome.failures = replayed.failures + outcome.failures
    outcome.problems = replayed.problems + outcome.problems
    outcome.lost += replayed.lost
    outcome.interrupted |= replayed.interrupted
    outcome.extra["corpus"] = {
        "cases": replayed.cases,
        "accepted": replayed.accepted,
        "failures": len(replayed.failures),
    }
    return outcome


COLUMNS = ("target", "saved cases", "cases", "accepted", "failures", "warnings", "seconds", "verdict")


def row(outcome: Outcome) -> tuple[str, ...]:
    """The outcome's line of the table."""
    corpus = outcome.extra.get("corpus", {"cases": 0, "failures": 0})
    numbers = (corpus["cases"], outcome.cases, outcome.accepted, len(outcome.failures), len(outcome.warnings))
    return (outcome.target, *map(str, numbers), f"{outcome.seconds:.1f}", VERDICTS[outcome.code].upper())


def table(outcomes: Sequence[Outcome], style: str = "simple") -> str:
    """One line for each target, then why one is blind or in error."""
    text = tabulate([row(o) for o in outcomes], headers=COLUMNS, tablefmt=style, disable_numparse=True)
    why = [f"{o.target}: {p}" for o in outcomes if o.code not in (Exit.RIGHT, Exit.WRONG) for p in o.problems]
    return "\n".join([text, *([""] if why else []), *why])


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The table and every failure, for a pull request."""
    parts = [f"## flashproof: {VERDICTS[worst(o.code for o in outcomes)]}", table(outcomes, "github")]
    for outcome in outcomes:
        for failed in outcome.failures:
            found = "\n".join(map(str, failed.findings))
            line = replay_line(failed.path) if failed.path and not failed.text else ""
            parts.append(f"### {outcome.target}\n\n```\n{failed.text or found}\n{line}\n```")
    return "\n\n".join(parts) + "\n"
