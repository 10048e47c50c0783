"""Commands about one target or its cases: inspect, fuzz, replay, repro, list."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import click

from .answers import kept_answer
from .case import Case
from .commands import COUNT, JSON, SAVE, SEED, Exit, Options, Seconds, Stop, flashproof, takes_options, worst
from .corpus import CorpusError, Record, files, load
from .dialects import Binding, Inexpressible
from .hunting import Budget, hunted, rerun
from .judge import Verdict
from .listing import TABLES, table
from .masks import Causal
from .outcome import KNOWN_OF_TARGET, FailedCase, Outcome, write_json
from .repro import script
from .session import Session, header, opened, resolved_lines
from .stored import answer_file
from .tensors import MAX_ORACLE_BYTES, oracle_bytes
from .words import sentence

DEFAULT_SECONDS = 60.0
SMOKE = 5


@flashproof.command()
@click.argument("target")
@takes_options
@JSON
def inspect(target: str, options: Options, json_file: Path | None) -> Exit:
    """Say what was understood of TARGET, probe its keywords and run five cases.

    Example: flashproof inspect mykernels.attention:flash
    """
    outcome = Outcome(target)
    started = time.monotonic()
    with opened(target, options) as session:
        outcome.session = session
        _say(header(session))
        click.echo("\ncontract, beyond IEEE float32 arithmetic")
        _say(resolved_lines(session))
        rows, ignored = session.runner.probe()
        click.echo("\nkeywords")
        _say(f"  {name:18} {seen}" for name, seen in rows.items())
        click.echo("\ncases")
        for case in smoke(session):
            if outcome.accepted + outcome.refused + outcome.lost < SMOKE:
                _told(outcome, session.judge.check(case, thorough=True))
        if ignored:
            outcome.failures.append(FailedCase(Case(), tuple(ignored)))
            _say([f"FAIL {finding}" for finding in ignored])
    outcome.seconds = time.monotonic() - started
    write_json(json_file, [outcome])
    click.echo(f"\n{_counts(outcome)}")
    return outcome.code


def smoke(session: Session) -> list[Case]:
    """Small cases inside the target's region, each with something more in it; SMOKE of those that it can be told are run."""
    region = session.region
    D = region.head_dims[0] if region.head_dims else min(16, region.max_head_dim)
    L = max(16, region.min_len)
    grads = "qkv" if region.backward else ""
    base = Case(dtype=region.dtypes[0], D=D, Dv=D, Lq=L, Lk=L, requires_grad=grads)
    tries = (
        base,
        base.but(Hq=2, Hkv=2, B=2, dtype=region.dtypes[-1]),
        base.but(mask=Causal(), Lq=2 * L + 1, Lk=2 * L + 1),
        base.but(Hq=4, Hkv=2, Lk=65),
        base.but(mask=Causal("bottom_right"), Lq=L, Lk=4 * L + 1),
        base.but(Lq=130, Lk=130, data="outlier"),
        base.but(Lq=3 * L, Lk=3 * L, layout_q="blhd", layout_k="blhd", layout_v="blhd"),
        base.but(seed=1),
        base.but(seed=2),
    )
    return [c for c in tries if not region.refuses(c)]


def _told(outcome: Outcome, verdict: Verdict, path: Path | None = None) -> None:
    """Count a verdict and print its lines."""
    outcome.count(verdict)
    if verdict.failures:
        outcome.failures.append(FailedCase(verdict.case, verdict.failures, path))
    said = verdict.execution.message if verdict.execution and verdict.status not in ("pass", "fail") else ""
    click.echo(f"  {WORDS[verdict.status]:14} {said or sentence(verdict.case)}")
    failing = {f.tensor for f in verdict.failures}
    _say(f"    {f}" for f in verdict.findings if f.severity == "fail" or f.tensor not in failing)


WORDS = {
    "pass": "pass",
    "fail": "FAIL",
    "refused": "refused",
    "inexpressible": "inexpressible",
    "infrastructure": "LOST",
}


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
@SEED
@SAVE
@SAVE_TENSORS
@JSON
def fuzz(
    target: str,
    options: Options,
    examples: int | None,
    seconds: float | None,
    seed: int,
    save: Path,
    save_tensors: bool,
    json_file: Path | None,
) -> Exit:
    """Hunt for cases that TARGET gets wrong; print the smallest of each kind and the line that replays it.

    Example: flashproof fuzz path/to/file.py:my_attention --seconds 60
    """
    if examples is None and seconds is None:
        seconds = DEFAULT_SECONDS
    with opened(target, options) as session:
        _say(header(session))
        outcome = hunted(session, Budget(examples, seconds, seed), save)
        if save_tensors:
            for failed in outcome.failures:
                _answer(session, session.judge.check(failed.case, thorough=True, explain=False), failed.path)
    _say(f"\n{text}" for text in (outcome.report, outcome.closing) if text)
    write_json(json_file, [outcome])
    return outcome.code


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
    for (name, how), group in groupby(_records(paths, target, options), key=lambda r: r[:2]):
        outcomes.append(_replayed(name, how, [r[2:] for r in group], save_tensors))
        click.echo(f"{_counts(outcomes[-1])}\n")
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
                _told(outcome, verdict, path)
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


def _records(paths: Sequence[Path], target: str, options: Options) -> list[tuple[str, Options, Path, Record]]:
    """(target, options, file, record) of every file, those of one target side by side."""
    found = []
    for path in [f for p in paths for f in _files(p)]:
        record = read(path)
        own = (
            options.over("", record.device, "")
            if target
            else options.over(record.dialect, record.device, record.contract)
        )
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
        record = load(path)
    except CorpusError as e:
        raise Stop(str(e)) from None
    needed = max(oracle_bytes(c) for c in (record.case, *record.preceding))
    if needed > MAX_ORACLE_BYTES:
        raise Stop(f"{path}: a case must need at most {MAX_ORACLE_BYTES} bytes to judge, got one that needs {needed}")
    return record


def _counts(outcome: Outcome) -> str:
    parts = [
        f"{outcome.cases} case{'s' * (outcome.cases != 1)}",
        f"{len(outcome.failures)} wrong",
        f"{outcome.accepted - len(outcome.failures)} right",
    ]
    parts += [
        f"{n} {word}"
        for n, word in ((outcome.refused, "refused"), (outcome.inexpressible, "inexpressible"), (outcome.lost, "lost"))
        if n
    ]
    return ", ".join(parts)


@flashproof.command()
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--target", default="", metavar="TARGET", help="Call this target instead of the one that failed.")
def repro(path: Path, target: str) -> Exit:
    """Print a script that shows the failure in FILE with torch and the target alone.

    Example: flashproof repro failures/3f2a91bc.json > repro.py
    """
    record = read(path)
    if target or "bound" not in record.environment:
        record = _asked(record, target)
    try:
        click.echo(script(record, _binding(record)), nl=False)
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
