"""Commands about one target or its cases: inspect, fuzz, replay, repro, list."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import click

from .hunting import Budget, hunted
from .case import Case
from .commands import COUNT, JSON, SAVE, SEED, Exit, Options, Seconds, Stop, flashproof, takes_options, worst
from .corpus import CorpusError, Record, files, load
from .dialects import Binding, Inexpressible
from .judge import Verdict
from .listing import TABLES, table
from .masks import Causal
from .outcome import FailedCase, Outcome, write_json
from .repro import script
from .session import Session, header, opened

DEFAULT_SECONDS = 60.0


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
        rows, ignored = session.runner.probe()
        click.echo("\nkeywords")
        _say(f"  {name:18} {seen}" for name, seen in rows.items())
        click.echo("\ncases")
        for case in smoke(session):
            _judged(session, outcome, case)
        if ignored:
            outcome.failures.append(FailedCase(Case(), tuple(ignored)))
            _say([f"FAIL {finding}" for finding in ignored])
    outcome.seconds = time.monotonic() - started
    write_json(json_file, [outcome])
    click.echo(f"\n{_counts(outcome)}")
    return outcome.code


def smoke(session: Session, count: int = 5) -> list[Case]:
    """Five small cases inside the target's region, each with something more in it than the one before."""
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
    return [c for c in tries if not region.refuses(c)][:count]


def _judged(session: Session, outcome: Outcome, case: Case) -> Verdict:
    """Run a case, count it, print a line."""
    verdict = session.judge.check(case, thorough=True)
    outcome.count(verdict)
    if verdict.failures:
        outcome.failures.append(FailedCase(case, verdict.failures))
    said = verdict.execution.message if verdict.execution and verdict.status not in ("pass", "fail") else ""
    click.echo(f"  {WORDS[verdict.status]:14} {said or described(case)}")
    _say(f"    {f}" for f in verdict.findings)
    return verdict


WORDS = {"pass": "pass", "fail": "FAIL", "refused": "refused", "inexpressible": "inexpressible", "infrastructure": "LOST"}


def described(case: Case) -> str:
    """A case on one line: sizes, then what differs from the simplest case."""
    plain = {k: v for k, v in case.to_json().items() if k not in ("schema", "B", "Hq", "Hkv", "Lq", "Lk", "D", "Dv", "dtype", "mask")}
    mask = f", mask {case.mask}" if case != case.but(mask=Case().mask) else ""
    rest = "".join(f", {k}={v}" for k, v in plain.items() if k != "seed" or v)
    return f"{case.dtype} B={case.B} H={case.Hq}/{case.Hkv} L={case.Lq}x{case.Lk} D={case.D}/{case.Dv}{mask}{rest}"


@flashproof.command()
@click.argument("target")
@takes_options
@click.option("--examples", type=COUNT, default=None, metavar="N", help="Cases to run.")
@click.option("--seconds", type=Seconds(), default=None, metavar="S", help=f"Time to run (default {DEFAULT_SECONDS:g} without --examples).")
@SEED
@SAVE
@JSON
def fuzz(target: str, options: Options, examples: int | None, seconds: float | None, seed: int, save: Path, json_file: Path | None) -> Exit:
    """Hunt for cases that TARGET gets wrong; print the smallest of each kind and the line that replays it.

    Example: flashproof fuzz path/to/file.py:my_attention --seconds 60
    """
    if examples is None and seconds is None:
        seconds = DEFAULT_SECONDS
    with opened(target, options) as session:
        _say(header(session))
        outcome = hunted(session, Budget(examples, seconds, seed), save)
        write_json(json_file, [outcome])
        click.echo(closing(outcome))
    return outcome.code


@flashproof.command()
@click.argument("paths", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--target", default="", metavar="TARGET", help="Run the cases on this target instead of the one that failed.")
@takes_options
@JSON
def replay(paths: tuple[Path, ...], target: str, options: Options, json_file: Path | None) -> Exit:
    """Run saved cases again; FILE is a case file or a folder of them.

    Example: flashproof replay failures/3f2a91bc.json --target other:attention
    """
    outcomes = []
    for (name, how), group in groupby(_records(paths, target, options), key=lambda r: r[:2]):
        outcome = Outcome(name)
        started = time.monotonic()
        with opened(name, how) as session:
            outcome.session = session
            _say(header(session))
            for _, _, path, record in group:
                _replayed(session, outcome, path, record)
        outcome.seconds = time.monotonic() - started
        outcomes.append(outcome)
        click.echo(f"{_counts(outcome)}\n")
    write_json(json_file, outcomes)
    return worst(o.code for o in outcomes)


def _records(paths: Sequence[Path], target: str, options: Options) -> list[tuple[str, Options, Path, Record]]:
    """(target, options, file, record) of every file, those of one target side by side."""
    found = []
    for path in [f for p in paths for f in _files(p)]:
        record = read(path)
        own = options.over("", record.device, "") if target else options.over(record.dialect, record.device, record.contract)
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
        return load(path)
    except CorpusError as e:
        raise Stop(str(e)) from None


def _replayed(session: Session, outcome: Outcome, path: Path, record: Record) -> None:
    """Run the cases that came before in a fresh process, then the case."""
    click.echo(str(path))
    if record.preceding:
        session.judge.restart()
        for case in record.preceding:
            session.runner.run(case)
    before = len(outcome.failures)
    _judged(session, outcome, record.case)
    outcome.failures[before:] = [replace(f, path=path) for f in outcome.failures[before:]]


def _counts(outcome: Outcome) -> str:
    parts = [f"{outcome.cases} cases", f"{len(outcome.failures)} wrong", f"{outcome.accepted - len(outcome.failures)} right"]
    parts += [f"{n} {word}" for n, word in ((outcome.refused, "refused"), (outcome.inexpressible, "inexpressible"), (outcome.lost, "lost")) if n]
    return ", ".join(parts)


@flashproof.command()
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--target", default="", metavar="TARGET", help="Call this target instead of the one that failed.")
def repro(path: Path, target: str) -> Exit:
    """Print a script that shows the failure in FILE with torch and the target alone.

    Example: flashproof repro failures/3f2a91bc.json > repro.py
    """
    record = read(path)
    stored = record.environment
    if target or "bound" not in stored:
        options = Options(dialect="" if target else record.dialect, device=record.device, contract=record.contract)
        with opened(target or record.target, options) as session:
            stored = stored | session.info
            record = replace(record, target=target or record.target, dialect=session.info["dialect"], environment=stored)
    binding = Binding(record.dialect, *(tuple(stored.get(n, ())) for n in ("bound", "unbound")), stored["returns_lse"], tuple(stored.get("required", ())))
    try:
        click.echo(script(record, binding), nl=False)
    except Inexpressible as e:
        raise Stop(f"{path}: {e}") from None
    except CorpusError as e:
        raise Stop(str(e)) from None
    return Exit.RIGHT


@flashproof.command("list")
@click.argument("names", metavar="[NAME]...", nargs=-1, type=click.Choice(sorted(TABLES)))
def list_(names: tuple[str, ...]) -> Exit:
    """Show what there is: implementations, dialects, masks, oracles, contracts, data regimes.

    Example: flashproof list implementations
    """
    for name in names or TABLES:
        click.echo(f"{name.capitalize()}\n\n{table(name)}\n")
    return Exit.RIGHT


def _say(lines: Iterator[str] | Sequence[str]) -> None:
    for line in lines:
        click.echo(line)
