"""The command `inspect`: what was understood of a target, what it serves, how it rounds, and what to run next."""

from __future__ import annotations

import shlex
import textwrap
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from ..oracles.fitted import Fit
from .binding import DIALECTS
from .case import Case
from .characterising import CASES, characterised, fit_lines
from .commands import JSON, Exit, Options, flashproof, takes_options
from .compiling import UNSEEN
from .generate import drawn
from .judge import Verdict
from .learn import Learner, declaration, differences, kinds
from .likely import likely
from .masks import Causal
from .outcome import FailedCase, Outcome, write_json
from .region import Region
from .session import WIDTH, Session, header, opened, resolved_lines, short
from .strategies import cases as all_cases
from .words import sentence

SMOKE = 5
PROBES, PROBE_SECONDS, PROBE_LENGTH = 60, 15.0, 64
SOON, LEAST = 20.0, 3.0
"""Seconds after which an inspection should be done, and that a probe gets though they are over."""
DEADLINE = 20.0
"""A case of a smoke test or a probe that takes longer is a hang, on a CPU."""
SUSPECTED = 3
"""Refusals without an acceptance by which a kind is told as not served, though fewer than narrow the region."""
MOSTLY = 0.8
WORDS = {
    "pass": "pass",
    "fail": "FAIL",
    "refused": "refused",
    "inexpressible": "inexpressible",
    "infrastructure": "LOST",
}


@flashproof.command()
@click.argument("target")
@takes_options
@click.option(
    "--characterise",
    is_flag=True,
    help=f"Fit the contract to {CASES} seeded cases: the fewest roundings that explain them.",
)
@JSON
def inspect(target: str, options: Options, characterise: bool, json_file: Path | None) -> Exit:
    """Say what was understood of TARGET, learn what it serves, probe its keywords, run five cases.

    Example: flashproof inspect mykernels.attention:flash
    """
    outcome, started = Outcome(target), time.monotonic()
    with opened(target, options) as session:
        outcome.session = session
        if session.info["device"] == "cpu" and not options.in_process:
            session.runner.deadline = DEADLINE  # type: ignore[union-attr]
        _say(header(session, whole=True))
        seen = _inspected(session, outcome, started)
        fitted = _fitted(session) if characterise else None
        _section("next", seen.next_steps(session, fitted))
    outcome.seconds = time.monotonic() - started
    outcome.extra = seen.to_json(session) | ({"characterised": fitted.to_json()} if fitted else {})
    write_json(json_file, [outcome])
    click.echo(f"\n{counts(outcome)} in {outcome.seconds:.0f} s")
    return outcome.code


@dataclass
class Probe:
    """What became of the cases from which a region is learnt."""

    learner: Learner
    planned: int = PROBES
    statuses: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def wrong(self) -> list[Verdict]:
        """The cases that it got wrong."""
        return [v for v in self.verdicts if v.status == "fail"]

    @property
    def run(self) -> int:
        """Cases that were run."""
        return self.statuses.total()

    @property
    def suspected(self) -> list[str]:
        """Kinds that were refused whenever they came up, too seldom to narrow the region."""
        never = {k.name for k in self.learner.unserved()}
        rows = self.learner.by_kind.items()
        return [n for n, c in rows if c.refused >= SUSPECTED and not c.accepted and n not in never]

    @property
    def refused_most(self) -> bool:
        """Whether nearly everything was refused."""
        return self.run > 0 and self.statuses["refused"] >= MOSTLY * (self.run - self.statuses["inexpressible"])


@dataclass
class Inspected:
    """All that `inspect` found out."""

    keywords: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    probe: Probe | None = None
    compiled: dict[str, Any] = field(default_factory=dict)
    causes: list[str] = field(default_factory=list)

    def to_json(self, session: Session) -> dict[str, Any]:
        """What goes into the document of the target beside its counts."""
        info, probe = session.info, self.probe
        binding = {n: info[n] for n in ("dialect", "bound", "unbound", "required", "returns_lse", "interpreted")}
        region = probe.learner.region if probe else session.region
        learnt = {"run": probe.run, "planned": probe.planned, "statuses": dict(probe.statuses),
                  "refusals": dict(probe.refusals), "suspected": probe.suspected,
                  "by_kind": {n: asdict(c) for n, c in probe.learner.by_kind.items()}} if probe else None  # fmt: skip
        return {
            "binding": binding, "region": asdict(region), "declared": session.declared is not None, "probe": learnt,
            "keywords": self.keywords, "ignored": self.ignored, "compiled": self.compiled, "causes": self.causes,
            "smoke": [{"case": v.case.to_json(), "status": v.status, "findings": [f.to_json() for f in v.findings],
                       "deviations": [asdict(d) for d in v.deviations]} for v in self.verdicts],
            "next": self.next_steps(session, None),
        }  # fmt: skip

    def next_steps(self, session: Session, fitted: Fit | None) -> list[str]:
        """Lines to paste or to act on, the most urgent first."""
        name = shlex.quote(session.target)
        how = _repeated(session.options)
        wrong = (
            any(v.status == "fail" for v in self.verdicts)
            or bool(self.probe and self.probe.wrong)
            or bool(self.ignored)
        )
        steps = []
        if wrong:
            steps.append(
                f"flashproof fuzz {name}{how} --seconds 60   # the smallest failing case of each kind, and its replay line"
            )
        else:
            steps.append(f"flashproof fuzz {name}{how} --seconds 60")
            steps.append(f"flashproof gate {name}{how}   # for CI: one table, one exit code")
        if fitted is None and not wrong:
            steps.append(f"flashproof inspect {name}{how} --characterise   # the contract that fits its roundings")
        if fitted is not None and fitted.traits and fitted.spec:
            steps.append(
                f"flashproof gate {name}{_repeated(replace(session.options, contract=fitted.preset or fitted.spec))}"
            )
        return steps


def _inspected(session: Session, outcome: Outcome, started: float) -> Inspected:
    """Every part that is probed or run, each printed as soon as it is known."""
    seen = Inspected()
    _section("contract, beyond IEEE float32 arithmetic", resolved_lines(session))
    seen.keywords, findings = session.runner.probe()
    seen.ignored = [f.tensor for f in findings]
    width = max([18, *map(len, seen.keywords)])
    rows = [f"{name:{width}} {text.upper() if text == 'ignored' else text}" for name, text in seen.keywords.items()]
    _section("keywords", rows or ["none to probe"])
    if findings:
        outcome.failures.append(FailedCase(Case(), tuple(findings)))
        _say(f"  FAIL {f}" for f in findings)
    click.echo("\ncases")
    for case in smoke(session, _base(session)):
        if outcome.accepted + outcome.lost < SMOKE:
            seen.verdicts.append(session.judge.check(case, thorough=True))
            told(outcome, seen.verdicts[-1])
    if session.declared is None:
        seen.probe = probed(session, SOON - (time.monotonic() - started))
        for v in seen.probe.verdicts:
            outcome.count(v)
        outcome.failures += [FailedCase(v.case, v.failures) for v in seen.probe.wrong]
        _section("region, learnt", region_lines(session, seen.probe))
    seen.compiled = session.runner.compiled.to_json()
    interpreted = "Triton kernels are interpreted, nothing compiled"
    nothing = interpreted if session.info["interpreted"] else UNSEEN
    _section("compiled", [str(session.runner.compiled) or nothing])
    seen.causes = likely(session, [*seen.verdicts, *(seen.probe.wrong if seen.probe else [])])
    if seen.causes:
        _section("likely cause", seen.causes)
    return seen


def _base(session: Session) -> Case:
    """A small case that the target serves, the simplest first: some serve only causal, 16-bit types or whole tiles."""
    first = _simplest(session.region)
    masks, sizes = (first.mask, Causal()), ((first.Lq, first.D), (128, 64))
    tries = [first.but(mask=mask, dtype=dtype, Lq=L, Lk=L, D=D, Dv=D)
             for L, D in sizes for dtype in dict.fromkeys((first.dtype, *session.region.dtypes)) for mask in masks]  # fmt: skip
    for case in tries:
        if not session.region.refuses(case) and session.runner.run(case).status not in ("refused", "inexpressible"):
            return case
    return first


def _simplest(region: Region) -> Case:
    """The simplest case of a region."""
    D = region.head_dims[0] if region.head_dims else min(16, region.max_head_dim)
    L = max(16, region.min_len)
    grads = "qkv" if region.backward else ""
    return Case(dtype=region.dtypes[0], Hq=2, Hkv=2, D=D, Dv=D, Lq=L, Lk=L, requires_grad=grads)


def smoke(session: Session, base: Case) -> list[Case]:
    """Cases like one that is served, each with something more in it; they are run until SMOKE of them were answered."""
    region, L = session.region, base.Lq
    align = DIALECTS[session.info["dialect"]].align if session.info["dialect"] in DIALECTS else "top_left"
    tries = (
        base,
        base.but(B=2, dtype=region.dtypes[-1], Lk=L if not region.lq_differs else 2 * L + 5),
        base.but(mask=Causal(align), Lk=2 * L + 1),
        base.but(mask=Causal(align), Lq=2 * L + 1, Lk=2 * L + 1),
        base.but(Hq=6, Hkv=2, Lk=65),
        base.but(Lq=130, Lk=130, data="outlier"),
        base.but(Lq=3 * L, Lk=3 * L, layout_q="blhd", layout_k="blhd", layout_v="blhd"),
        base.but(seed=1),
        base.but(seed=2),
        base.but(seed=3),
    )
    return [c for c in tries if not region.refuses(c)]


def told(outcome: Outcome, verdict: Verdict, path: Path | None = None) -> None:
    """Count a verdict and print its lines."""
    outcome.count(verdict)
    if verdict.failures:
        outcome.failures.append(FailedCase(verdict.case, verdict.failures, path))
    said = verdict.execution.message if verdict.execution and verdict.status not in ("pass", "fail") else ""
    click.echo(f"  {WORDS[verdict.status]:14} {said or sentence(verdict.case)}")
    failing = {f.tensor for f in verdict.failures}
    _say(f"    {f}" for f in verdict.findings if f.severity == "fail" or f.tensor not in failing)


def counts(outcome: Outcome) -> str:
    """How many cases there were, and what became of them."""
    ignored = sum(f.oracle == "ignored-keyword" for failed in outcome.failures for f in failed.findings)
    wrong = sum(any(f.oracle != "ignored-keyword" for f in failed.findings) for failed in outcome.failures)
    parts = [
        f"{outcome.cases} case{'s' * (outcome.cases != 1)}",
        f"{wrong} wrong",
        f"{max(0, outcome.accepted - wrong)} right",
    ]
    parts += [f"{ignored} keyword{'s' * (ignored != 1)} ignored"] * bool(ignored)
    parts += [
        f"{n} {word}"
        for n, word in ((outcome.refused, "refused"), (outcome.inexpressible, "inexpressible"), (outcome.lost, "lost"))
        if n
    ]
    return ", ".join(parts)


def probed(session: Session, seconds: float = PROBE_SECONDS) -> Probe:
    """What became of PROBES seeded small cases, or of those that fit in so many seconds; a hang ends it."""
    until, region = time.monotonic() + min(PROBE_SECONDS, max(LEAST, seconds)), session.region
    probe = Probe(Learner(region), PROBES)
    for case in drawn(all_cases(region, max_len=max(PROBE_LENGTH, region.min_len)), PROBES, 0):
        if time.monotonic() > until:
            break
        verdict = session.judge.check(case, explain=False)
        status = verdict.status if verdict.status in ("refused", "inexpressible", "infrastructure") else "accepted"
        probe.statuses["wrong" if verdict.status == "fail" else status] += 1
        if status != "infrastructure":
            probe.learner.add(case, status)
        if verdict.execution is not None and status == "refused":
            probe.refusals[verdict.execution.message] += 1
        probe.verdicts.append(verdict)
        if verdict.execution is not None and verdict.execution.status == "hung":
            break
    return probe


def region_lines(session: Session, probe: Probe) -> list[str]:
    """The learnt region, how sure it is, and what to declare."""
    s, region = probe.statuses, probe.learner.region
    few = "" if probe.run == probe.planned else f" of {probe.planned} (time is up)"
    parts = [f"{n} {word}" for word, n in (("right", s["accepted"]), ("wrong", s["wrong"]), ("refused, which is allowed", s["refused"]),
             ("inexpressible", s["inexpressible"]), ("lost", s["infrastructure"])) if n]  # fmt: skip
    lines = [f"from {probe.run}{few} small cases: {', '.join(parts)}", short(region)]
    learnt = differences(region, session.region)
    if learnt:
        lines.append(f"refused: {'; '.join(learnt)}")
    if probe.suspected:
        lines.append(f"refused whenever seen, too seldom to be sure: {', '.join(probe.suspected)}")
    lines += [f"says {n} times: {message}" for message, n in probe.refusals.most_common(3)]
    if probe.refused_most:
        lines.append(
            "Nearly everything was refused. Declare what the target serves, so that cases are drawn inside it: an "
            f"Implementation with supports={declaration(_served(probe, region))}"
        )
    elif learnt:
        lines.append(f"to declare it: supports={declaration(region)}")
    if probe.wrong:
        tally = Counter(key for v in probe.wrong for key in v.keys)
        lines.append("wrong: " + ", ".join(f"{key} ({n})" for key, n in tally.most_common(4)))
    return lines


def _served(probe: Probe, region: Region) -> Region:
    """The region without the kinds that were never accepted, where anything was."""
    for kind in kinds():
        count = probe.learner.by_kind.get(kind.name)
        if probe.statuses["accepted"] and count and count.refused and not count.accepted and kind.served(region):
            smaller = kind.without(region)
            region = smaller if smaller.dtypes and smaller.masks else region
    return region


def _fitted(session: Session) -> Fit:
    """The fitted contract, printed."""
    click.echo("\ncharacterise")
    fitted = characterised(session)
    _say(_wrapped(fit_lines(fitted)))
    return fitted


def _repeated(options: Options) -> str:
    """The options to repeat in a next step."""
    named = (("dialect", options.dialect), ("device", options.device), ("contract", options.contract))
    return "".join(f" --{n} {shlex.quote(v)}" for n, v in named if v) + "".join(f" --dtype {d}" for d in options.dtypes)


def _section(title: str, lines: Iterable[str]) -> None:
    click.echo(f"\n{title}")
    _say(_wrapped(lines) if title != "next" else [f"  {line}" for line in lines])


def _wrapped(lines: Iterable[str]) -> list[str]:
    """Lines indented by two, long ones with a hanging indent."""
    out = []
    for line in lines:
        text = line.strip()
        indent = " " * max(2, len(line) - len(line.lstrip()) + (0 if line.startswith("  ") and text else 2))
        out += textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", drop_whitespace=True,
                             break_on_hyphens=False, break_long_words=False, replace_whitespace=False)  # fmt: skip
    return out


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line)
