"""`flashproof teeth`: hunts every planted bug; what was caught, how soon, by which oracle, and how small the case became."""

from __future__ import annotations

import json
import multiprocessing
import statistics
import textwrap
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from tabulate import tabulate

from ..fuzz.case import SIZES, Case
from ..fuzz.commands import COUNT, JSON, SEED, Exit, Options, Stop, flashproof
from ..fuzz.engine import hunt
from ..fuzz.found import Campaign, Event, Failure, Policy
from ..fuzz.hunting import probed
from ..fuzz.ladders import EDGES
from ..fuzz.session import WIDTH, opened
from ..fuzz.words import sentence
from ..impls.planted import KINDS, PLANTED, Planted

SECONDS = 30.0
"""A bug that no case of this long a hunt shows has survived."""
SHRINK = Policy(distinct=4, shrink_seconds=60.0)
"""What is done about what a hunt found: a bug has one cause, so a few of its failures will do."""
QUICK = replace(SHRINK, more=(8, 200))
"""The same for --quick: fewer cases after the last new failure, which cost more than those before it."""
QUICK_ROWS = 2
"""Rows of each kind that --quick hunts."""
SIZES_OF_NOTE = sorted({0, *range(1, 9), *(n for edges in EDGES.values() for n in edges)})
"""Sizes beside the edges of tiles, where kernels go wrong."""


@dataclass(frozen=True)
class Hunted:
    """What the hunt of one planted bug came to; `case` is the smallest case of the expected failure, else of the first one.

    `cases` and `seconds` are counted to the first failure. `spoke` is the failure that came first, as oracle:tensor.
    """

    name: str
    kind: str
    cases: int | None = None
    seconds: float | None = None
    spoke: str = ""
    expected: bool = False
    case: Case | None = None
    before: tuple[Case, ...] = ()
    whole: float = 0.0
    trouble: str = ""

    @property
    def bug(self) -> Planted:
        """The row of the table."""
        return PLANTED[self.name]

    @property
    def larger(self) -> list[str]:
        """Sizes of the case that are more than one size of note above those of the pinned case."""
        return [] if self.case is None else grown(self.case, self.bug.minimal)

    @property
    def word(self) -> str:
        """killed, larger, survived or lost."""
        if self.trouble:
            return "lost"
        return "survived" if self.case is None else "larger" if self.larger else "killed"

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "name": self.name, "kind": self.kind, "verdict": self.word, "cases": self.cases, "seconds": self.seconds,
            "first": self.spoke, "expected": self.bug.key, "expected_seen": self.expected,
            "case": self.case and self.case.to_json(), "before": [c.to_json() for c in self.before],
            "pinned": self.bug.minimal.to_json(), "larger": self.larger, "whole_seconds": self.whole, "trouble": self.trouble,
        }  # fmt: skip


def grown(case: Case, pinned: Case) -> list[str]:
    """The sizes, as "Lk 33 for 17", that lie more than one size of note above the pinned ones."""

    def step(n: int) -> int:
        return bisect_left(SIZES_OF_NOTE, n)

    pairs = [(name, getattr(case, name), getattr(pinned, name)) for name in SIZES]
    return [f"{name} {got} for {want}" for name, got, want in pairs if step(got) > step(want) + 1]


def hunted(name: str, kind: str, seconds: float, seed: int, policy: Policy = SHRINK) -> Hunted:
    """The outcome of one bug's hunt with the default profile, in a worker of its own."""
    began = time.monotonic()
    spoke: list[str] = []

    def on_event(event: Event) -> None:
        if event.verdict is not None and not spoke:
            spoke.extend(event.verdict.keys[:1])

    bug = PLANTED[name]
    try:
        with opened(bug.target, Options()) as session:
            probes = probed(session)
            campaign = hunt(
                session.judge, session.region, seconds=seconds, seed=seed, on_event=on_event,
                policy=policy,
            )  # fmt: skip
    except Stop as e:
        return Hunted(name, kind, trouble=str(e), whole=time.monotonic() - began)
    failures = [*campaign.failures, *probes]
    best = next((f for f in failures if f.key == bug.key), failures[0] if failures else None)
    return _told(bug, kind, campaign, best, spoke, time.monotonic() - began)


def _told(bug: Planted, kind: str, c: Campaign, best: Failure | None, spoke: Sequence[str], whole: float) -> Hunted:
    """The row of a campaign whose most telling failure is `best`."""
    if best is None:
        return Hunted(bug.name, kind, whole=whole, trouble=c.trouble if c.stopped == "infrastructure" else "")
    first = spoke[0] if spoke else best.key
    return Hunted(
        bug.name, kind, c.cases_to_first_failure, c.seconds_to_first_failure, first, best.key == bug.key,
        best.case, best.preceding, whole,
    )  # fmt: skip


def chosen(only: Sequence[str], quick: bool) -> list[tuple[str, str]]:
    """(name, kind) of the bugs to hunt, those of `only` always; Stop where a word of it is neither a kind nor a name."""
    words = [w for text in only for w in text.split(",")]
    unknown = [w for w in words if w not in KINDS and w not in PLANTED]
    if unknown:
        raise Stop(
            f"--only must name planted bugs or kinds of them ({', '.join(KINDS)}), got {unknown[0]!r}; `flashproof list` names the bugs"
        )
    few = {bug.name for bugs in KINDS.values() for bug in (bugs[:QUICK_ROWS] if quick else bugs)}
    rows = [(bug.name, kind) for kind, bugs in KINDS.items() for bug in bugs]
    return [(n, k) for n, k in rows if n in words or (n in few and (not words or k in words))]


def all_hunted(
    rows: Sequence[tuple[str, str]], seconds: float, seed: int, jobs: int, policy: Policy = SHRINK
) -> Iterator[Hunted]:
    """The outcomes as they come, `jobs` hunts at a time, each in a process of its own."""
    with ProcessPoolExecutor(min(jobs, len(rows)) or 1, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(hunted, name, kind, seconds, seed, policy): (name, kind) for name, kind in rows}
        try:
            for future in as_completed(waiting):
                try:
                    yield future.result()
                except Exception as e:  # noqa: BLE001 (a fault of ours in one hunt must not lose the others)
                    yield Hunted(*waiting[future], trouble=f"{type(e).__name__}: {e}")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # interrupted: what was not begun is left


HEAD = ("bug", "verdict", "cases", "s", "first", "shrunk to", "pinned")


def line(h: Hunted) -> list[str]:
    """One row of the table."""
    shown = "" if h.case is None else sentence(h.case)
    shown += "".join(f"; after {sentence(c)}" for c in h.before)
    same = h.case == h.bug.minimal
    return [
        h.name, h.word, "" if h.cases is None else str(h.cases), "" if h.seconds is None else f"{h.seconds:.1f}",
        h.spoke, shown, "the same" if same else sentence(h.bug.minimal),
    ]  # fmt: skip


def summary(done: Sequence[Hunted], wall: float, left: int = 0) -> str:
    """Killed of all, the median of the first failures, and what is wrong; `left` bugs were not hunted."""
    times = [h.seconds for h in done if h.seconds is not None]
    killed = sum(h.case is not None and not h.trouble for h in done)
    median = (
        f"; first failure after {statistics.median(times):.1f} s (median), {max(times):.1f} s at most" if times else ""
    )
    bad = [
        f"{h.name} {h.word}{': ' + (h.trouble or ', '.join(h.larger)) if h.word != 'survived' else ''}"
        for h in done
        if h.word != "killed"
    ]
    unhunted = f"; {left} not hunted" if left else ""
    return f"killed {killed} of {len(done)} planted bugs in {wall:.0f} s{median}{unhunted}" + "".join(
        f"\n  {text}" for text in bad
    )


def code(done: Sequence[Hunted], left: int = 0) -> Exit:
    """1 if a bug survived or its case stayed large, 5 if a hunt was lost, 4 if some were left, 0 otherwise."""
    words = {h.word for h in done}
    if words & {"survived", "larger"}:
        return Exit.WRONG
    if "lost" in words:
        return Exit.INFRASTRUCTURE
    return Exit.BLIND if left else Exit.RIGHT


@flashproof.command()
@click.option("--only", multiple=True, metavar="NAME|KIND", help="Only these bugs or kinds; may be repeated.")
@click.option("--quick", is_flag=True, help="Two bugs of each kind, and a shorter search after the first failure.")
@click.option(
    "--seconds", type=float, default=SECONDS, show_default=True, metavar="S", help="How long a bug is hunted at most."
)
@click.option("--jobs", type=COUNT, default=1, show_default=True, metavar="N", help="Hunts at a time.")
@SEED
@JSON
def teeth(only: tuple[str, ...], quick: bool, seconds: float, jobs: int, seed: int, json_file: Path | None) -> Exit:
    """Hunt every planted bug: which are caught, how soon, by which oracle, and how small the case became.

    Exit code 1 if a bug survives, or shrinks to a case that is more than one size of note larger than its pinned one.

    Example: flashproof teeth --jobs 2
    """
    rows = chosen(only, quick)
    began, done = time.monotonic(), []
    with suppress(KeyboardInterrupt):  # what was hunted until then is told
        for h in all_hunted(rows, seconds, seed, jobs, QUICK if quick else SHRINK):
            done.append(h)
            soon = "" if h.seconds is None else f" by {h.spoke} after {h.seconds:.1f} s"
            click.echo(f"{len(done):3} of {len(rows)}  {h.name}: {h.word}{soon}", err=True)
    order = [name for name, _ in rows]
    done.sort(key=lambda h: order.index(h.name))
    wall, left = time.monotonic() - began, len(rows) - len(done)
    table = [[textwrap.fill(cell, WIDTH // 3) for cell in line(h)] for h in done]
    click.echo(tabulate(table, headers=HEAD, tablefmt="simple", disable_numparse=True))
    click.echo(f"\n{summary(done, wall, left)}")
    if json_file is not None:
        document = {
            "seed": seed,
            "seconds": seconds,
            "jobs": jobs,
            "wall_seconds": wall,
            "bugs": [h.to_json() for h in done],
        }
        json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return code(done, left)
