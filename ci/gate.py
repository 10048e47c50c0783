"""The gate for kernel changes: saved cases first, then a fixed number of drawn ones, one table and one exit code.

With a base revision it tells what a change breaks from what was broken before, and holds the change to the base's rules.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from tabulate import tabulate

from ..fuzz.case import Case
from ..fuzz.commands import (
    BEYOND_WARM,
    COUNT,
    FILE,
    FOLDER,
    JOBS,
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
from ..fuzz.corpus import CORPUS, CorpusError, Record, load_all, save
from ..fuzz.execute import DeviceAbsent, present, region_from_json
from ..fuzz.found import MIN_CASES
from ..fuzz.hunting import Budget, hunted, rerun
from ..fuzz.ledger import Known
from ..fuzz.outcome import FailedCase, Outcome, write_json
from ..fuzz.sanitizing import available, sanitizer_option
from ..fuzz.session import Session, header, opened
from ..oracles.finding import Finding
from . import github
from .compare import Compared, withdrawn
from .policy import Held, Rules, bound, held, rules
from .revisions import Revisions, inside
from .sanitizing import Sanitized

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
    rules: Rules = field(default_factory=Rules)
    revisions: Revisions | None = None
    allow_lost: bool = False
    sanitizer: str | None = None

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self.end - time.monotonic()

    def lists(self, corpus: Path | None) -> Plan:
        """This plan with the saved cases of the folder, and those of it at the revision whose rules hold."""
        own = saved_cases(corpus)
        if self.revisions is None:
            return dataclasses.replace(self, corpus=own)
        place = self.revisions.repository.path(corpus or CORPUS)
        old = Path(self.revisions.policy.root, place) if place is not None else None
        kept = load_all(old) if old is not None and old.is_dir() else []
        names = {p.name for p, _ in own}
        return dataclasses.replace(self, corpus=own + [(p, r) for p, r in kept if p.name not in names])


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
@click.option("--base", default="", metavar="REV", help="Compare with this git revision: only what is new fails.")
@click.option(
    "--policy-from",
    default="",
    metavar="REV",
    help="Revision whose ledger, contracts, regions and saved cases hold (default: that of --base).",
)
@click.option(
    "--allow-lost", is_flag=True, help="What the base answers and the change refuses is told, and does not fail."
)
@click.option("--ledger", type=FILE, default=None, metavar="FILE", help="Known failures (flashproof-ledger.toml).")
@click.option(
    "--require-device",
    type=click.Choice(["cpu", "cuda"]),
    default=None,
    help="Run on this kind of device, or exit with 4.",
)
@click.option(
    "--summary", type=FILE, default=None, metavar="FILE", help="Write the table and the failures as Markdown."
)
@click.option("--comment", type=FILE, default=None, metavar="FILE", help="Write a comment of at most fifteen lines.")
@click.option("--junit", type=FILE, default=None, metavar="FILE", help="Write the result as JUnit XML.")
@click.option("--annotations", is_flag=True, help="Print the ten worst failures as annotations of a GitHub workflow.")
@JOBS
@BEYOND_WARM
@sanitizer_option("After the drawn cases,")
@SEED
@SAVE
@JSON
def gate(targets: tuple[str, ...], options: Options, **given: Any) -> Exit:
    """Replay saved cases on every TARGET, draw new ones, and say in one exit code whether all are right.

    With --base, only failures that the base revision has not, and cases that it answers and the change refuses, count.
    Codes: 0 right, 1 wrong, 2 usage, 4 too little was measured, 5 a worker was lost.

    Example: flashproof gate mykernels.attention:flash --base origin/main --examples 400 --max-seconds 300
    """
    options = required(options, given["require_device"])
    available(options, given["sanitizer"])
    end = time.monotonic() + given["max_seconds"]
    with ExitStack() as stack:
        revisions = _revisions(targets, options, given, stack)
        plan = Plan(options, [], given["examples"], given["min_cases"], given["seed"], given["save"], end,
                    rules(given["ledger"], revisions), revisions, given["allow_lost"], given["sanitizer"])  # fmt: skip
        try:
            plan = plan.lists(given["corpus"])
        except CorpusError as e:
            raise Stop(str(e)) from None
        return _all(targets, plan, given)


def required(options: Options, kind: str | None) -> Options:
    """The options with a device of the kind that is required; Stop with BLIND where it is not there, or another is asked for."""
    if kind is None:
        return options
    device = options.device or kind
    try:
        present(device)
    except (DeviceAbsent, ValueError) as e:
        raise Stop(f"--require-device {kind}: {e}", Exit.BLIND) from None
    if device.partition(":")[0] != kind:
        raise Stop(f"--require-device {kind}: the gate was told to run on --device {device}", Exit.BLIND)
    return dataclasses.replace(options, device=device)


def _revisions(targets: Sequence[str], options: Options, given: dict[str, Any], stack: ExitStack) -> Revisions | None:
    """The revisions to compare; None without --base. Stop for what has no revisions."""
    base, policy = given["base"] or given["policy_from"], given["policy_from"]
    if not base:
        return None
    if options.in_process:
        raise Stop("--in-process cannot be used with --base: two revisions of one module need two processes")
    revisions = stack.enter_context(Revisions.opened(base, policy))
    for target in targets:
        inside(revisions.repository, target, "--base")
    return revisions


def _all(targets: Sequence[str], plan: Plan, given: dict[str, Any]) -> Exit:
    """Every target in turn, then the reports."""
    outcomes: list[Outcome] = []
    if given["annotations"]:
        click.echo(github.quiet())
    for note in plan.rules.notes:
        click.echo(note)
    try:
        for target in targets:
            outcomes.append(gated(target, plan))
            if outcomes[-1].interrupted:
                break
    finally:
        write_json(given["json_file"], outcomes)
    click.echo("\n" + table(outcomes))
    top = plan.revisions.repository.top if plan.revisions else Path.cwd()
    github.write(outcomes, table(outcomes, "github"), plan.rules.notes, given, top)
    if given["annotations"]:
        click.echo("\n".join([github.loud(), *github.errors(outcomes, top)]))
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
    started = time.monotonic()
    try:
        with held(target, plan.options, plan.revisions) as rule:
            outcome = _judged(target, plan, rule)
    except Stop as e:
        e.show()
        click.echo()
        return Outcome(target, stop=e.code, problems=[e.message])
    outcome.seconds = time.monotonic() - started
    return outcome


def _judged(target: str, plan: Plan, rule: Held) -> Outcome:
    """The outcome of one target that is held to a rule: saved cases, drawn cases, what is known, what was there before."""
    options = dataclasses.replace(plan.options, contract=rule.contract)
    with opened(target, options, tree=plan.revisions.new if plan.revisions else None) as own:
        session = bound(own, rule)
        known, compared = sieves(session, plan, rule)
        click.echo("\n".join([*header(session), *(f"base      {note}" for note in rule.notes)]))
        replayed = replay(session, plan, known)
        if replayed.interrupted:
            outcome = Outcome(target, session)
        else:
            budget = Budget(plan.examples, max(plan.left, 0.001), plan.seed)
            there: Any = compared.after if compared else lambda _: False
            outcome = hunted(session, budget, plan.save, "gate", plan.min_cases, there)
        click.echo(f"\n{outcome.report}\n" if outcome.report else "")
        outcome = joined(replayed, outcome)
        outcome.problems += rule.problems
        promised(outcome, session, plan, rule)
        if plan.sanitizer and not outcome.interrupted:
            tool = Sanitized(plan.sanitizer, [r.case for _, r in plan.corpus], plan.seed, plan.save, plan.left)
            tool.joined(outcome, session, known, compared)
        ledgered(outcome, known, plan.rules)
        _documented(outcome, plan, rule, known, compared)
    return outcome


def sieves(session: Session, plan: Plan, rule: Held) -> tuple[Known, Compared | None]:
    """The ledger and the base revision at work on a session; the base's own worker is spared what is never launched."""
    known = Known.of(plan.rules.entries, session.target)
    session.judge.sieves = [known]
    if rule.old is None or plan.revisions is None:
        return known, None
    rule.old.judge.sieves = [Known.of(plan.rules.entries, session.target)]
    removed = Known.of(plan.rules.removed, session.target).entries
    compared = Compared(rule.old, plan.revisions.base.label, plan.allow_lost, removed)
    session.judge.sieves.append(compared)
    return known, compared


def replay(session: Session, plan: Plan, known: Known) -> Outcome:
    """The saved cases on a target and those that its ledger names, each with the cases that have to come before it."""
    outcome = Outcome(session.target, session)
    named = [(Path(e.case), e.record) for e in known.entries if e.record is not None]
    corpus = [*plan.corpus, *named]
    try:
        _replay_all(session, plan, corpus, outcome)
    except KeyboardInterrupt:
        outcome.interrupted = True
        outcome.problems.append(f"interrupted after {outcome.cases} of {len(corpus)} saved cases")
    return outcome


def _replay_all(session: Session, plan: Plan, corpus: Corpus, outcome: Outcome) -> None:
    for path, record in corpus:
        if plan.left <= 0:
            outcome.problems.append(
                f"{outcome.cases} of {len(corpus)} saved cases were replayed before the time was over"
            )
            break
        verdict = rerun(session, record)
        outcome.count(verdict)
        if verdict.failures:
            lasting = path if path.exists() and not _temporary(path, plan) else save(record, plan.save)
            outcome.failures.append(FailedCase(record.case, verdict.failures, lasting))
            click.echo(f"  {lasting}: {verdict.failures[0]}")


def _temporary(path: Path, plan: Plan) -> bool:
    """Whether a file lies in a checked out revision, which goes when the gate ends."""
    return plan.revisions is not None and path.is_relative_to(plan.revisions.policy.root)


def joined(replayed: Outcome, outcome: Outcome) -> Outcome:
    """The outcome of a target with its saved cases: their failures come first, their number is told apart."""
    outcome.failures = replayed.failures + outcome.failures
    outcome.problems = replayed.problems + outcome.problems
    outcome.lost += replayed.lost
    outcome.skipped += replayed.skipped
    outcome.interrupted |= replayed.interrupted
    outcome.extra["corpus"] = {
        "cases": replayed.cases,
        "accepted": replayed.accepted,
        "failures": len(replayed.failures),
    }
    return outcome


def promised(outcome: Outcome, session: Session, plan: Plan, rule: Held) -> None:
    """Add what the change no longer promises: a failure each, or a warning where that is allowed."""
    if rule.old is None:
        return
    now = region_from_json(session.info["supports"])
    for text in withdrawn(rule.old.info, session.info, rule.region or rule.old.declared, now):
        if plan.allow_lost:
            outcome.warnings.append(f"coverage: {text}")
        else:
            click.echo(f"lost: {text}")
            outcome.failures.append(FailedCase(Case(), (Finding("coverage", "promise", text),), text=f"lost: {text}"))


def ledgered(outcome: Outcome, known: Known, rules: Rules) -> None:
    """Add a failure for every entry of the ledger whose day is over, or that excuses what is right now."""
    told = [
        (e, f"the ledger's entry for {e.words()} ended on {e.expires}: fix the failure, or look again and move the day")
        for e in known.expired()
        if e.same not in rules.renewed
    ]
    told += [
        (e, f"the ledger's entry for {e.words()} excuses what is right now: take the entry out")
        for e in known.passing()
    ]
    for entry, text in told:
        click.echo(text)
        case = entry.record.case if entry.record is not None else Case()
        outcome.failures.append(FailedCase(case, (Finding("ledger", entry.finding or entry.kind, text),), text=text))


def _documented(outcome: Outcome, plan: Plan, rule: Held, known: Known, compared: Compared | None) -> None:
    """Say and keep what is known, what was there before, and what is gained."""
    lines = [*known.lines(), *(compared.lines() if compared else [])]
    click.echo("\n".join([*lines, ""]) if lines else "", nl=False)
    outcome.extra |= {"known": known.document(), "notes": rule.notes, "base": None}
    if plan.revisions is not None:
        r = plan.revisions
        outcome.extra["base"] = {"revision": r.base.label, "policy": r.policy.label, "change": r.new.label} | (
            compared.document() if compared else {"existing": [], "gained": None, "not_compared": 0}
        )
    outcome.failures = [
        dataclasses.replace(f, extra=f.extra | {"class": github.sort(f, compared is not None)})
        for f in outcome.failures
    ]


COLUMNS = ("target", "saved cases", "cases", "accepted", "failures", "lost", "known", "warnings", "seconds", "verdict")


def row(outcome: Outcome) -> tuple[str, ...]:
    """The outcome's line of the table."""
    corpus = outcome.extra.get("corpus", {"cases": 0, "failures": 0})
    lost = sum(f.extra.get("class") == "lost" for f in outcome.failures)
    before = (outcome.extra.get("base") or {}).get("existing", [])
    known = len(before) + len(outcome.extra.get("known", []))
    numbers = (
        corpus["cases"], outcome.cases, outcome.accepted, len(outcome.failures) - lost, lost, known, len(outcome.warnings)
    )  # fmt: skip
    return (outcome.target, *map(str, numbers), f"{outcome.seconds:.1f}", VERDICTS[outcome.code].upper())


def table(outcomes: Sequence[Outcome], style: str = "simple") -> str:
    """One line for each target, then why one is blind or in error, and what it lost with leave (--allow-lost)."""
    text = tabulate([row(o) for o in outcomes], headers=COLUMNS, tablefmt=style, disable_numparse=True)
    untold = (o for o in outcomes if o.code not in (Exit.RIGHT, Exit.WRONG) and o.problems)
    why = [f"{o.target}: {'; '.join(o.problems)}" for o in untold]
    why += [f"{o.target}: allowed: {w}" for o in outcomes for w in o.warnings if w.startswith("coverage")]
    return "\n".join([text, *([""] if why else []), *why])
