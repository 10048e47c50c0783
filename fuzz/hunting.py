"""A hunt on one target as the commands run it: progress while it runs, failures saved when found, an outcome at the end."""

from __future__ import annotations

import gc
import os
import shlex
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from ..oracles.finding import Finding
from .allowance import default_seconds
from .buckets import VARIANTS
from .case import Case, case_from_json
from .commands import Stop
from .corpus import CorpusError, Record
from .engine import hunt
from .found import MIN_CASES, Campaign, Event, Failure, Policy, blind_because
from .judge import Verdict
from .outcome import FailedCase, Keeper, Outcome, replay_line
from .progress import Progress
from .report import failure_json, failure_text, failures_text, labelled, summary
from .session import WIDTH, Session
from .warmed import Warmed, found, identity, lists

COMPILING_SECONDS = 60.0
COMPILING = Policy(variants=VARIANTS, shrink_seconds=COMPILING_SECONDS)
"""Where a target may compile: a step of a shrink can cost seconds."""


@dataclass(frozen=True)
class Budget:
    """When a hunt ends: after so many cases or seconds, whichever comes first."""

    examples: int | None = None
    seconds: float | None = None
    seed: int = 0


def policy(session: Session, budget: Budget) -> Policy:
    """How much to spend on what is found: on a device, where a step may compile, more."""
    base = Policy() if session.info["device"] == "cpu" else COMPILING
    seconds = max(default_seconds(budget.seconds), COMPILING_SECONDS * bool(base.variants))
    return replace(base, shrink_seconds=session.options.shrink_seconds or seconds)


def hunted(
    session: Session,
    budget: Budget,
    folder: Path,
    command: str = "fuzz",
    min_cases: int = MIN_CASES,
    known: Callable[[Failure], bool] = lambda _: False,
) -> Outcome:
    """The outcome of one hunt; what it finds is in `folder` from the moment it is found. `known` failures are left out."""
    keeper, progress = Keeper(session, folder), Progress()

    def on_event(event: Event) -> None:
        saved(keeper, event)
        progress(event)

    warmed, note = listed(session)
    if note:
        click.echo("\n".join(textwrap.wrap(f"warm      {note}", WIDTH, subsequent_indent=" " * 10)))
    ignored = probed(session)
    probing = (len(session.runner.compiled.variants), session.runner.compiled.built)
    gc.freeze()  # what is imported by now stays: searching it for garbage takes a tenth of a hunt
    with session.workers():
        campaign = hunt(
            session.judge,
            session.region,
            examples=budget.examples,
            seconds=budget.seconds,
            seed=budget.seed,
            on_event=on_event,
            policy=policy(session, budget),
            warmed=warmed,
        )
    campaign.failures[:] = [f for f in (*ignored, *campaign.failures) if not known(f)]
    outcome = summed(session, campaign, keeper, command, min_cases)
    outcome.extra["warm"] = {"note": note, "listed": warmed.variants if warmed else None, "while_probing": probing[1]}
    outcome.report = failures_text(campaign, lambda f: replay_line(kept(keeper, f)))
    outcome.closing = "\n".join([*unfinished(campaign, keeper), summary(campaign, command, min_cases)])
    return outcome


def saved(keeper: Keeper, event: Event) -> None:
    """Write down what an event found: the first case of a failure at once, its smaller ones in its place."""
    for key in event.verdict.keys if event.verdict is not None else ():
        if event.verdict is not None and keeper.file(key) is None:
            keeper.keep(key, event.verdict.case, ordered(event.verdict, key))
    if event.failure is not None:
        f = event.failure
        keeper.keep(f.key, f.case, ordered(f.verdict, f.key), f.preceding)


def ordered(verdict: Verdict, key: str) -> list[Finding]:
    """What fails, the finding of that key first."""
    return sorted(verdict.failures, key=lambda f: f.key != key)


def kept(keeper: Keeper, failure: Failure) -> Path:
    """The file of a failure, with its smallest case."""
    return keeper.keep(failure.key, failure.case, ordered(failure.verdict, failure.key), failure.preceding)


def probed(session: Session) -> list[Failure]:
    """Keywords that the target accepts and ignores, as failures."""
    out = []
    for finding in session.runner.probe()[1]:
        case = case_from_json(finding.details["case"]) if "case" in finding.details else Case()
        verdict = session.judge.sifted(Verdict(case, "fail", (finding,)))
        if verdict.failures:
            out.append(Failure(finding.key, case, case, verdict, shrunk=True))
    return out


def summed(session: Session, campaign: Campaign, keeper: Keeper, command: str, min_cases: int) -> Outcome:
    """The outcome of a campaign."""
    c = campaign
    outcome = Outcome(session.target, session, c.cases, c.accepted, c.refused, c.inexpressible)
    outcome.skipped = c.skipped
    outcome.lost = c.infrastructure if c.stopped == "infrastructure" else 0
    outcome.seconds, outcome.first_failure = c.seconds, c.seconds_to_first_failure
    outcome.warnings = [f"{what} ({n})" for what, n in c.warnings.most_common()]
    outcome.problems = blind_because(c, command, min_cases)
    outcome.interrupted = c.stopped == "interrupted"
    outcome.failures = [*(failed(f, keeper) for f in c.failures), *unshrunk(c, keeper)]
    outcome.extra = {
        "compiled": c.compiled.to_json() | while_shrinking(c),
        "seed": c.seed,
        "stopped": c.stopped,
        "because": c.because,
        "shrink_seconds": c.shrink_seconds,
        "studied": round(c.studied, 3),
        "by_kind": {name: asdict(count) for name, count in c.by_kind.items()},
        "budget": {tensor: used for tensor, (used, _) in c.budget.items()},
        "learnt": asdict(c.learnt) if c.declared is None else None,
    }
    return outcome


def while_shrinking(c: Campaign) -> dict[str, Any]:
    """The variants that were met, and built, after the search: by shrinking and studying what it found."""
    variants, built = c.searched or (len(c.compiled.variants), c.compiled.built)
    later = {"variants": len(c.compiled.variants) - variants, "built": c.compiled.built - built}
    return {"while_shrinking": later}


def cache_folder() -> Path:
    """Triton's cache on disk."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def listed(session: Session) -> tuple[Warmed | None, str]:
    """The list of `warm` that a hunt on a device keeps to, and the sentence about it; (None, "") where there is none."""
    folder = cache_folder()
    if session.info["device"] == "cpu" or session.options.beyond_warm or not lists(folder):
        return None, ""  # without a list the target's source need not be read
    warmed, why = found(folder, identity(session.info, session.options.configs or "tuned"))
    if warmed is None:
        return None, why
    return warmed, f"{warmed.variants} variants from warm: nothing else is compiled (--beyond-warm hunts beyond it)"


def failed(failure: Failure, keeper: Keeper) -> FailedCase:
    """A failure of a campaign with its file and its report."""
    path = kept(keeper, failure)
    line = replay_line(path)
    findings = tuple(ordered(failure.verdict, failure.key))
    return FailedCase(failure.case, findings, path, failure_text(failure, line), failure_json(failure, line))


def unshrunk(campaign: Campaign, keeper: Keeper) -> list[FailedCase]:
    """The failures beyond those that were shrunk, as they were found."""
    out = []
    for key, case in campaign.unshrunk.items():
        oracle, _, tensor = key.partition(":")
        finding = Finding(oracle, tensor, "a further failure, not shrunk")
        path = keeper.file(key) or keeper.keep(key, case, [finding])
        told = f"{finding}\n{replay_line(path)}"
        out.append(FailedCase(case, (finding,), path, told, {"key": key, "reason": campaign.unshrunk_because}))
    return out


def unfinished(campaign: Campaign, keeper: Keeper) -> list[str]:
    """The line that goes on with those failures that were not shrunk at all, or not to the end and told in a line only."""
    keys = [*(f.key for f in campaign.failures if f.behind and not f.shrunk), *campaign.unshrunk]
    paths = dict.fromkeys(str(path) for key in keys if (path := keeper.file(key)) is not None)
    return [labelled("continue", f"flashproof shrink {shlex.join(paths)}")] if paths else []


def _judged(session: Session, record: Record) -> Verdict:
    """The verdict on a saved case, on its stored tensors where it has some."""
    if record.tensors is None:
        return session.judge.check(record.case, thorough=True)
    try:
        return session.judge.sifted(session.judge.check_stored(record.case, record.tensors))
    except CorpusError as e:
        raise Stop(str(e)) from None


def rerun(session: Session, record: Record) -> Verdict:
    """The verdict on a saved case, in a fresh process after the cases that have to come before it.

    A keyword that was ignored is probed again: on the case alone its absence may be no mistake.
    The configuration of autotuned kernels that failed is launched first.
    """
    session.judge.config = record.configuration or 0
    if record.preceding:
        session.judge.restart()
        for case in record.preceding:
            if not session.judge.skips(case):
                session.runner.run(case)
    verdict = _judged(session, record)
    ignored = {f.key for f in record.findings if f.oracle == "ignored-keyword"}
    again = tuple(f for f in session.runner.probe()[1] if f.key in ignored) if ignored else ()
    if not again:
        return verdict
    return session.judge.sifted(replace(verdict, status="fail", findings=(*verdict.findings, *again)))
