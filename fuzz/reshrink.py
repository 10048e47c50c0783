"""`flashproof shrink FILE...`: goes on with what a hunt did not shrink or study to the end."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import click

from .book import Book
from .cli import records
from .commands import JSON, Exit, Options, Seconds, flashproof, takes_options, worst
from .corpus import Record
from .found import Campaign, Event, Failure, Policy
from .hunting import failed, kept, rerun, saved
from .outcome import Keeper, Outcome, replay_line, write_json
from .progress import Progress
from .report import failures_text
from .session import Session, opened
from .study import Study

RUNS = 100_000
"""Runs for one failure: time is what bounds a shrink here."""


@flashproof.command()
@click.argument("paths", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--seconds", type=Seconds(), default=60.0, show_default=True, metavar="S", help="Time for all that FILE shows."
)
@takes_options
@JSON
def shrink(paths: tuple[Path, ...], options: Options, seconds: float, json_file: Path | None) -> Exit:
    """Make the failing case in each FILE smaller and say more of it; the smaller case is written beside FILE.

    Example: flashproof shrink failures/3f2a91bc.json --seconds 120
    """
    outcomes = []
    for target, own, path, record in records(paths, "", options):
        outcome = Outcome(target)
        outcomes.append(outcome)
        with opened(target, own) as session:
            outcome.session = session
            _shrunk(outcome, path, record, seconds)
        if outcome.interrupted:
            break
    write_json(json_file, outcomes)
    return worst(o.code for o in outcomes)


def _shrunk(outcome: Outcome, path: Path, record: Record, seconds: float) -> None:
    """Shrink one saved failure, print what is known of it then, and add it to the outcome."""
    session, began = outcome.session, time.monotonic()
    assert session is not None
    click.echo(f"{path}: shrinking for at most {seconds:g} s")
    verdict = rerun(session, record)
    outcome.count(verdict)
    if not verdict.keys:
        outcome.problems = [] if verdict.status == "pass" else [f"{path}: the case was {verdict.status}"]
        click.echo(f"  {path}: {'right now: nothing to shrink' if verdict.status == 'pass' else verdict.status}")
        return
    keeper = Keeper(session, path.parent)
    campaign = studied(session, record, seconds, keeper)
    outcome.interrupted = campaign.stopped == "interrupted"
    outcome.failures = [failed(f, keeper) for f in campaign.failures]
    outcome.seconds = time.monotonic() - began
    click.echo(f"\n{failures_text(campaign, lambda f: replay_line(kept(keeper, f)))}\n")
    files = {f.path for f in outcome.failures}
    stays = "it is as small as it gets" if path.resolve() in {p.resolve() for p in files if p} else f"{path} stays"
    click.echo(f"  {outcome.seconds:.1f} s of at most {seconds:g}; {stays}")


def studied(session: Session, record: Record, seconds: float, keeper: Keeper) -> Campaign:
    """A campaign of one case and what it shows, shrunk and studied; with the calls before it where it needs those."""
    progress = Progress()
    campaign = Campaign(info=session.info, declared=session.declared)

    def emit(kind: str, **details: object) -> None:
        event = Event(kind, campaign, **details)  # type: ignore[arg-type]
        saved(keeper, event)
        progress(event)

    book = Book(session.judge)
    study = Study(book, campaign, Policy(shrink_seconds=seconds, probes=RUNS), emit, time.monotonic)
    try:
        if record.preceding:
            study.with_calls(_as_saved(session, record))
        else:
            book.check(record.case, thorough=True)
            study.run()
    except KeyboardInterrupt:
        campaign.stopped = "interrupted"
    study.rest()
    progress.clear()
    return campaign


def _as_saved(session: Session, record: Record) -> Failure:
    """The failure of a file that names calls before its case, run once more."""
    verdict = rerun(session, record)
    wanted = record.findings[0].key if record.findings else ""
    key = wanted if wanted in verdict.keys else (*verdict.keys, wanted)[0]
    failure = Failure(key, record.case, record.case, verdict, preceding=record.preceding)
    return replace(failure, fresh=False)
