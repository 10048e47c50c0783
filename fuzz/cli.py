"""Commands about one target or its cases: fuzz, replay, repro, list."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import click

from .answers import kept_answer
from .commands import (
    BEYOND_WARM,
    COUNT,
    JOBS,
    JSON,
    SAVE,
    SEED,
    SHRINK_SECONDS,
    Exit,
    Options,
    Seconds,
    Stop,
    flashproof,
    takes_options,
    worst,
)
from .corpus import CorpusError, Record, files, judgeable
from .dialects import Binding, Inexpressible
from .hunting import Budget, hunted, rerun
from .inspecting import counts, told
from .judge import Verdict
from .ledger import LEDGER, Entry, Known, LedgerError
from .ledger import load as load_ledger
from .listing import TABLES, table
from .outcome import KNOWN_OF_TARGET, Outcome, write_json
from .repro import Script, script
from .repro_adapted import AdaptedScript
from .sanitizing import sanitized_run, sanitizer_option
from .session import Session, header, opened
from .stored import answer_file

DEFAULT_SECONDS = 60.0


SAVE_TENSORS = click.option(
    "--save-tensors",
    is_flag=True,
    help="Write got, want and limit of wrong tensors beside the case file, as safetensors.",
)


@flashproof.command()
@click.argument("target")
@takes_options
@click.option("--examples", type=COUNT, default=None, metavar="N", help="Cases to run.")
@click.option(
    "--seconds",
    type=Seconds(),
    default=None,
    metavar="S",
    help=f"Time to run (default {DEFAULT_SECONDS:g} without --examples).",
)
@click.option(
    "--ledger",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    metavar="FILE",
    help=f"Known failures, told apart (default {LEDGER} where it exists).",
)
@SHRINK_SECONDS
@JOBS
@BEYOND_WARM
@sanitizer_option("Instead of hunting,")
@SEED
@SAVE
@SAVE_TENSORS
@JSON
def fuzz(
    target: str,
    options: Options,
    examples: int | None,
    seconds: float | None,
    ledger: Path | None,
    sanitizer: str | None,
    seed: int,
    save: Path,
    save_tensors: bool,
    json_file: Path | None,
) -> Exit:
    """Hunt for cases that TARGET gets wrong; print the smallest of each kind and the line that replays it.

    Example: flashproof fuzz path/to/file.py:my_attention --seconds 60
    """
    if sanitizer is not None:
        return sanitized_run(target, options, sanitizer, seed, save, json_file)
    if examples is None and seconds is None:
        seconds = DEFAULT_SECONDS
    known = Known.of(_ledger(ledger), target)
    with opened(target, options) as session:
        _say(header(session))
        session.judge.sieves = [known]
        outcome = hunted(session, Budget(examples, seconds, seed), save)
        if save_tensors:
            for failed in outcome.failures:
                _answer(session, session.judge.check(failed.case, thorough=True, explain=False), failed.path)
    outcome.extra["known"] = known.document()
    _say(f"\n{text}" for text in (outcome.report, outcome.closing) if text)
    _say(f"  {line}" for line in known.lines())
    _say(f"  known: {e.words()} ended on {e.expires}" for e in known.expired())
    _say(f"  known: {e.words()} is right now" for e in known.passing())
    write_json(json_file, [outcome])
    return outcome.code


def _ledger(path: Path | None) -> tuple[Entry, ...]:
    """The entries of a ledger; of the default one if it exists."""
    if path is None and not LEDGER.exists():
        return ()
    try:
        return load_ledger(path or LEDGER)
    except LedgerError as e:
        raise Stop(str(e)) from None


@flashproof.command()
@click.argument("paths", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--target", default="", metavar="TARGET", help="Run the cases on this target instead of the one that failed."
)
@takes_options
@SAVE_TENSORS
@JSON
def replay(paths: tuple[Path, ...], target: str, options: Options, save_tensors: bool, json_file: Path | None) -> Exit:
    """Run saved cases again; FILE is a case file or a folder of them.

    Example: flashproof replay failures/3f2a91bc.json --target other:attention
    """
    outcomes = []
    for (name, how), group in groupby(records(paths, target, options), key=lambda r: r[:2]):
        outcomes.append(_replayed(name, how, [r[2:] for r in group], save_tensors))
        click.echo(f"{counts(outcomes[-1])}\n")
        if outcomes[-1].interrupted:
            break
    write_json(json_file, outcomes)
    return worst(o.code for o in outcomes)


def _replayed(
    target: str, options: Options, saved: Sequence[tuple[Path, Record]], save_tensors: bool = False
) -> Outcome:
    """Run saved cases on one target, a line each; Ctrl-C ends it with what was seen so far."""
    outcome, started = Outcome(target), time.monotonic()
    with opened(target, options) as session:
        outcome.session = session
        _say(header(session))
        try:
            for path, record in saved:
                click.echo(str(path))
                verdict = rerun(session, record)
                told(outcome, verdict, path)
                if save_tensors:
                    _answer(session, verdict, path, record.tensors)
        except KeyboardInterrupt:
            outcome.interrupted = True
            outcome.problems.append(f"interrupted after {outcome.cases} of {len(saved)} cases")
            click.echo(outcome.problems[-1], err=True)
    outcome.seconds = time.monotonic() - started
    return outcome


def _answer(session: Session, verdict: Verdict, path: Path | None, tensors: Path | None = None) -> None:
    """Write what a failing target answered beside its case file, and say where."""
    try:
        written = kept_answer(session, verdict, path, tensors) if path and verdict.failures else None
    except OSError as e:
        raise Stop(f"{answer_file(path or Path())} could not be written: {e.strerror}", Exit.INFRASTRUCTURE) from None
    if written:
        click.echo(f"    tensors  {written}")


def records(paths: Sequence[Path], target: str, options: Options) -> list[tuple[str, Options, Path, Record]]:
    """(target, options, file, record) of every file, those of one target side by side."""
    found = []
    for path in [f for p in paths for f in _files(p)]:
        record = read(path)
        own = (
            options.over("", record.device, "")
            if target
            else options.over(record.dialect, record.device, record.contract)
        )
        if record.configuration is not None and not own.configs:
            own = replace(own, configs="each")
        found.append((target or record.target, own, path, record))
    return sorted(found, key=lambda r: (r[0], repr(r[1])))


def _files(path: Path) -> list[Path]:
    found = files(path)
    if not found:
        raise Stop(f"{path} must hold case files (*.json), but there is none")
    return found


def read(path: Path) -> Record:
    """The record of a case file; Stop says what is wrong with it."""
    try:
        return judgeable(path)
    except CorpusError as e:
        raise Stop(str(e)) from None


@flashproof.command()
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--target", default="", metavar="TARGET", help="Call this target instead of the one that failed.")
def repro(path: Path, target: str) -> Exit:
    """Print a script that shows the failure in FILE with torch and the target alone.

    Example: flashproof repro failures/3f2a91bc.json > repro.py
    """
    record = read(path)
    unnamed = record.target.endswith(".py") and not record.environment.get(
        "attr"
    )  # an old file: which callable was meant?
    if target or unnamed or "bound" not in record.environment:
        record = _asked(record, target)
    try:
        click.echo(script(record, _binding(record), AdaptedScript if record.dialect == "adapter" else Script), nl=False)
    except (Inexpressible, CorpusError) as e:
        raise Stop(f"{path}: {e}") from None
    return Exit.RIGHT


def _asked(record: Record, target: str) -> Record:
    """The record for a target that is loaded to see how it is called."""
    options = Options(dialect="" if target else record.dialect, device=record.device, contract=record.contract)
    with opened(target or record.target, options) as session:
        info = session.info
        stored = record.environment | {n: info[n] for n in KNOWN_OF_TARGET}
        return replace(record, target=session.target, dialect=info["dialect"], environment=stored)


def _binding(record: Record) -> Binding:
    """How the record's target is called, as the record says."""
    known = record.environment
    try:
        bound, unbound, required = (tuple(known[n]) for n in ("bound", "unbound", "required"))
        return Binding(record.dialect, bound, unbound, bool(known["returns_lse"]), required)
    except (KeyError, TypeError) as e:
        raise CorpusError(
            f"environment must say how the target is called: {', '.join(KNOWN_OF_TARGET)} ({e})"
        ) from None


@flashproof.command("list")
@click.argument("names", metavar="[NAME]...", nargs=-1, type=click.Choice(sorted(TABLES)))
def list_(names: tuple[str, ...]) -> Exit:
    """Show what there is: implementations, planted bugs, dialects, masks, oracles, contracts, data regimes.

    Example: flashproof list implementations
    """
    for name in names or TABLES:
        click.echo(f"{name.capitalize()}\n\n{table(name)}\n")
    return Exit.RIGHT


def _say(lines: Iterator[str] | Sequence[str]) -> None:
    for line in lines:
        click.echo(line)
