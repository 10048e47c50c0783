"""`--sanitizer TOOL` of fuzz and gate: the list of cases, what the tool said of each, the files and the exit code."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from .case import Case
from .commands import Exit, Options, Stop
from .corpus import CORPUS, CorpusError, load_all
from .outcome import FailedCase, Keeper, Outcome, replay_line, write_json
from .sanitizer import AT_MOST, SECONDS, TOOLS, Checked, SanitizerAbsent, found_sanitizer, sanitized, short_list
from .session import Session, header, opened
from .worker import Worker

KINDS = ("cuda",)
"""Devices whose kernels a sanitizer sees."""


def sanitizer_option(when: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option --sanitizer of a command; `when` says how it stands to what the command does otherwise."""
    text = f"{when} run at most {AT_MOST} cases under this tool of compute-sanitizer."
    return click.option("--sanitizer", type=click.Choice(TOOLS), default=None, help=text)


def sanitized_run(target: str, options: Options, tool: str, seed: int, save: Path, json_file: Path | None) -> Exit:
    """The exit code of a target whose cases ran under a tool of compute-sanitizer: 1 if it reports an error."""
    available(options, tool)
    with opened(target, options) as session:
        click.echo("\n".join(header(session)))
        outcome = checked(session, tool, _corpus(), seed, save)
    write_json(json_file, [outcome])
    return outcome.code


def available(options: Options, tool: str | None) -> None:
    """Stop where a sanitizer is asked for and cannot run: it is not here, it does not see the device, or has no process of its own."""
    if tool is None:
        return
    try:
        found_sanitizer()
    except SanitizerAbsent as e:
        raise Stop(str(e), Exit.BLIND) from None
    if (options.device or "cpu").partition(":")[0] not in KINDS:
        raise Stop("--sanitizer sees what runs on a GPU: --device must be cuda or cuda:N", Exit.BLIND)
    if options.in_process:
        raise Stop("--in-process cannot be used with --sanitizer: the sanitizer starts a process of its own")


def _corpus() -> Iterable[Case]:
    """The cases of the corpus, where there is one."""
    try:
        return [record.case for _, record in load_all(CORPUS)] if CORPUS.is_dir() else []
    except CorpusError as e:
        raise Stop(str(e)) from None


def checked(
    session: Session, tool: str, corpus: Iterable[Case], seed: int, save: Path, seconds: float = SECONDS
) -> Outcome:
    """The outcome of the list of cases; cases that a sieve of the judge leaves out are not launched."""
    cases = short_list((c for c in corpus if not session.judge.skips(c)), session.region, seed)
    cases = [c for c in cases if not session.judge.skips(c)]
    click.echo(f"sanitizer {tool} on {len(cases)} cases (at most {AT_MOST}), in one process\n")
    outcome, started = Outcome(session.target, session), time.monotonic()
    said = told(session, tool, cases, seconds)
    outcome.seconds = time.monotonic() - started
    _count(outcome, said, len(cases))
    _fail(outcome, said, cases, Keeper(session, save))
    outcome.extra["sanitizer"] = {"tool": tool, "told": {str(n): text for n, text in said.told.items()}}
    click.echo(
        f"  cases    {outcome.cases}: {outcome.accepted} accepted, {outcome.refused} refused; {outcome.seconds:.1f} s"
    )
    for problem in outcome.problems:
        click.echo(f"  {problem}")
    return outcome


def told(session: Session, tool: str, cases: list[Case], seconds: float = SECONDS) -> Checked:
    """What the tool says of a session's target on these cases."""
    worker = session.runner
    if not isinstance(worker, Worker):
        raise TypeError("a sanitized session has a worker")
    worker.restart()  # its process holds memory of the device
    return sanitized(tool, {n: v for n, v in worker.arguments.items() if n != "arch"}, cases, seconds)


def _count(outcome: Outcome, checked: Checked, count: int) -> None:
    """Enter how the cases ended; one that has findings was accepted, whatever became of it."""
    raised: list[str] = []
    for number in range(count):
        status, _, said = checked.told.get(number, "").partition(" ")
        if not status and number not in checked.findings:
            continue
        outcome.cases += 1
        if status in ("refused", "inexpressible") and number not in checked.findings:
            setattr(outcome, status, getattr(outcome, status) + 1)
        else:
            outcome.accepted += 1
        if status not in ("", "ok", "refused", "inexpressible") and number not in checked.findings:
            raised.append(f"case {number} {status}, and the sanitizer says nothing of it: {said}")
    outcome.warnings += raised
    outcome.problems += raised[:3]
    if checked.lost:
        outcome.problems.append(checked.lost)
        outcome.lost += 1


def _fail(outcome: Outcome, checked: Checked, cases: list[Case], keeper: Keeper) -> None:
    """Enter, save and tell what was found: one failure for each kernel, with its first case."""
    told: set[str] = set()
    for number, findings in sorted(checked.findings.items()):
        for finding in findings:
            if finding.key in told or number >= len(cases):
                continue
            told.add(finding.key)
            path = keeper.keep(finding.key, cases[number], [finding])
            outcome.failures.append(FailedCase(cases[number], (finding,), path, str(finding)))
            click.echo(f"FAIL {finding}\n  case {number}: {cases[number].key}\n  {replay_line(path)}\n")
