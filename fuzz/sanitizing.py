"""`fuzz --sanitizer TOOL`: the list of cases, what the tool said of each, the files and the exit code."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import click

from .case import Case
from .commands import Exit, Options, Stop
from .corpus import CORPUS, CorpusError, load_all
from .outcome import FailedCase, Keeper, Outcome, replay_line, write_json
from .sanitizer import AT_MOST, Checked, SanitizerAbsent, found_sanitizer, sanitized, short_list
from .session import Session, header, opened
from .worker import Worker

KINDS = ("cuda",)
"""Devices whose kernels a sanitizer sees."""


def sanitized_run(target: str, options: Options, tool: str, seed: int, save: Path, json_file: Path | None) -> Exit:
    """The exit code of a target whose cases ran under a tool of compute-sanitizer: 1 if it reports an error."""
    try:
        found_sanitizer()
    except SanitizerAbsent as e:
        raise Stop(str(e), Exit.BLIND) from None
    if (options.device or "cpu").partition(":")[0] not in KINDS:
        raise Stop("--sanitizer sees what runs on a GPU: --device must be cuda or cuda:N", Exit.BLIND)
    if options.in_process:
        raise Stop("--in-process cannot be used with --sanitizer: the sanitizer starts a process of its own")
    with opened(target, options) as session:
        click.echo("\n".join(header(session)))
        outcome = _checked(session, tool, seed, save)
    write_json(json_file, [outcome])
    return outcome.code


def _corpus() -> Iterable[Case]:
    """The cases of the corpus, where there is one."""
    try:
        return [record.case for _, record in load_all(CORPUS)] if CORPUS.is_dir() else []
    except CorpusError as e:
        raise Stop(str(e)) from None


def _checked(session: Session, tool: str, seed: int, save: Path) -> Outcome:
    """The outcome of the list of cases."""
    cases = short_list(_corpus(), session.region, seed)
    worker = session.runner
    if not isinstance(worker, Worker):
        raise TypeError("a sanitized session has a worker")
    worker.restart()  # its process holds memory of the device
    click.echo(f"sanitizer {tool} on {len(cases)} cases (at most {AT_MOST}), in one process\n")
    outcome, started = Outcome(session.target, session), time.monotonic()
    checked = sanitized(tool, {n: v for n, v in worker.arguments.items() if n != "arch"}, cases)
    outcome.seconds = time.monotonic() - started
    _count(outcome, checked, len(cases))
    _fail(outcome, checked, cases, Keeper(session, save))
    outcome.extra["sanitizer"] = {"tool": tool, "told": {str(n): text for n, text in checked.told.items()}}
    click.echo(
        f"  cases    {outcome.cases}: {outcome.accepted} accepted, {outcome.refused} refused; {outcome.seconds:.1f} s"
    )
    for problem in outcome.problems:
        click.echo(f"  {problem}")
    return outcome


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
