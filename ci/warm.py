"""`flashproof warm`: what a hunt on a GPU would compile, compiled on a machine without one into Triton's cache on disk."""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ..fuzz.buckets import RESERVE, drawn_bytes
from ..fuzz.case import Case
from ..fuzz.commands import COUNT, FOLDER, JSON, SEED, Exit, Options, Stop, flashproof, takes_options
from ..fuzz.compiling import Compiled
from ..fuzz.engine import hunt
from ..fuzz.hunting import COMPILING, cache_folder
from ..fuzz.judge import Verdict
from ..fuzz.offline import ARCHITECTURES
from ..fuzz.outcome import Outcome, write_json
from ..fuzz.region import Region
from ..fuzz.session import WIDTH, Session, opened
from ..fuzz.warmed import Warmed, WarmedDraw, cases_class, identity, resized

EXAMPLES = 400
"""Cases after which a hunt has nothing left to compile: the limit of variants is reached before."""


REHEARSED = 96
"""Cases that are drawn from the list before it is kept, as a hunt with another seed draws them."""
NOT_FUNCTIONS = (
    "{} variants were compiled for cases that differ in seed and data alone: a hunt may have to compile more"
)


@flashproof.command()
@click.argument("target")
@click.option(
    "--arch", type=click.Choice(list(ARCHITECTURES)), required=True, help="The GPU's architecture, as in sm_90."
)
@click.option(
    "--cache",
    type=FOLDER,
    default=None,
    metavar="DIR",
    help="Triton's cache (default: TRITON_CACHE_DIR or Triton's own).",
)
@click.option(
    "--examples", type=COUNT, default=EXAMPLES, show_default=True, metavar="N", help="Cases whose kernels are compiled."
)
@SEED
@takes_options
@JSON
def warm(
    target: str, arch: str, cache: Path | None, examples: int, seed: int, options: Options, json_file: Path | None
) -> Exit:
    """Compile what a hunt on TARGET with this seed needs, without a GPU, into a cache for the machine that has one.

    Example: flashproof warm triton_flash --arch sm_90 --cache triton-cache
    """
    if options.device or options.in_process:
        raise Stop("warm pretends a device of --arch in a process of its own: leave out --device and --in-process")
    folder = cache or cache_folder()
    os.environ["TRITON_CACHE_DIR"] = str(folder.resolve())
    with opened(target, replace(options, device="cuda"), arch=arch) as session:
        compiler = _Compiler(session)
        session.runner.probe()
        campaign = hunt(compiler, session.region, examples=examples, seed=seed, policy=COMPILING)
        warmed, anew = kept(session, compiler, seed, examples)
        if campaign.compiled.variants and warmed.cases:
            warmed.save(folder)
    outcome = Outcome(target, session, campaign.cases, campaign.accepted, campaign.refused, campaign.inexpressible)
    outcome.seconds, outcome.lost = campaign.seconds, campaign.infrastructure
    outcome.warnings = [f"{what} ({n})" for what, n in compiler.raised.most_common()]
    outcome.warnings += [NOT_FUNCTIONS.format(anew)] if anew else []
    if not campaign.compiled.variants:
        outcome.problems.append(f"{target} compiled nothing that can be kept: it launched no Triton kernel")
    outcome.extra = {"arch": arch, "cache": str(folder), "seed": seed, "compiled": campaign.compiled.to_json()}
    outcome.extra["listed"] = {"cases": len(warmed.cases), "sizes_free": warmed.sizes_free, "anew": anew}
    _say(outcome, campaign.compiled, arch, folder)
    write_json(json_file, [outcome])
    return outcome.code


def widen(session: Session, compiler: _Compiler, seed: int, examples: int) -> None:
    """Run structures that ran with many more sizes, until too much is compiled for them: what ran is listed."""
    ran, compiled = list(compiler.ran.values()), session.runner.compiled
    most = len(compiled.variants) + RESERVE
    for n, data in enumerate(drawn_bytes(16, examples if ran else 0, seed + (1 << 41))):
        case = resized(ran[n % len(ran)], ran[data[9] % len(ran)], data)
        if case is not None and not session.region.refuses(case) and len(compiled.variants) < most:
            compiler.check(case)


def kept(session: Session, compiler: _Compiler, seed: int, examples: int) -> tuple[Warmed, int]:
    """The list of what was compiled, and how many of its variants only its rehearsal met.

    Rehearsed are hunts with other seeds. Where sizes of a class compile anew, the list keeps to the very sizes that ran.
    """
    compiled = session.runner.compiled
    widen(session, compiler, seed, examples)
    warmed = Warmed(identity(session.info, session.options.configs or "tuned"), list(compiler.ran.values()), 0)
    for free in (True, False):
        warmed.sizes_free, before = free, len(compiled.variants)
        draw = WarmedDraw(seed + REHEARSED, warmed)
        for number in range(REHEARSED // 32):
            for case in draw.round(session.region, 32, number):
                compiler.check(case)
        anew = len(compiled.variants) - before
        if not anew:
            break
    warmed.variants = len(compiled.variants)
    return warmed, anew


class _Compiler:
    """In a judge's place: it runs every case once for what it compiles. `raised` counts what kernels that do nothing led to."""

    def __init__(self, session: Session) -> None:
        self.runner: Any = session.runner
        self.region: Region | None = session.declared
        self.raised: Counter[str] = Counter()
        self.ran: dict[Any, Case] = {}

    def check(self, case: Case, thorough: bool = False, *, explain: bool = True) -> Verdict:  # noqa: ARG002
        """Whether the case was taken: refused counts as it would in a hunt."""
        out = self.runner.run(case)
        wrongly = self.region is not None and not self.region.refuses(case)
        if out.status in ("raised", "crashed", "hung"):
            self.raised[f"{out.status}: {out.message}"] += 1
        if out.status == "ok":
            self.ran.setdefault(cases_class(case), case)
        apart = out.status in ("inexpressible", "infrastructure") or (out.status == "refused" and not wrongly)
        return Verdict(case, out.status if apart else "pass", execution=out)

    def again(self, case: Case, thorough: bool = True) -> Verdict:
        """The same."""
        return self.check(case, thorough)

    def restart(self) -> None:
        """Nothing: what is compiled lies on disk."""


def _say(outcome: Outcome, compiled: Compiled, arch: str, folder: Path) -> None:
    told = compiled.to_json()
    kernels = ", ".join(f"{name} {n}" for name, n in told["kernels"].items())
    rows = (
        ("target", f"{outcome.target} for {arch}, {outcome.cases} cases, {outcome.refused} refused"),
        (
            "compiled",
            f"{told['variants']} variants, {told['built']} of them new, in {told['seconds']:.1f} s: {kernels}",
        ),
        ("cache", str(folder)),
        *(("warning", text) for text in outcome.warnings[:4]),
        *(("problem", text) for text in outcome.problems),
    )
    for name, text in rows:
        click.echo("\n".join(textwrap.wrap(f"{name:9} {text}", WIDTH, subsequent_indent=" " * 10)))
