"""What a hunt found, as data: counts, failures, and whether enough was measured to call it a pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .case import Case
from .commands import VERDICTS, Exit, worst
from .compiling import Compiled
from .judge import Verdict
from .learn import Count, unmeasured
from .nearest import Neighbour
from .region import Region

MIN_CASES = 200


@dataclass(frozen=True)
class Failure:
    """One distinct failure: its smallest case, and what was learnt about it.

    `preceding` cases must run before it in the same process for it to show. `reproduced` is (n, m): n of m further runs
    failed; `fresh` says whether a new process fails too (None: not tried), `varies` whether the
    first call of one new process answered otherwise than that of another. `behind` names an earlier failure that the
    same case shows, of which this one may be a consequence. `shrunk` says whether shrinking came to its end, `reason` why it
    did not; `left_out` is what was not looked at, for want of time.
    """

    key: str
    case: Case
    original: Case
    verdict: Verdict
    count: int = 1
    preceding: tuple[Case, ...] = ()
    reproduced: tuple[int, int] = (0, 0)
    fresh: bool | None = None
    varies: bool = False
    nearest: tuple[Neighbour, ...] = ()
    pattern: str = ""
    original_pattern: str = ""
    behind: str = ""
    shrunk: bool = False
    probes: int = 0
    seconds: float = 0.0
    reason: str = ""
    left_out: tuple[str, ...] = ()


@dataclass
class Campaign:
    """What a hunt did. `declared` is the region drawn from if the target declares one, `learnt` what its answers leave.

    `stopped` says why it ended: examples, seconds, failure, interrupted, infrastructure or exhausted. `unshrunk` counts
    further distinct failures beyond those that were shrunk. `budget` is the largest |error| / limit of right answers.
    """

    info: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    examples: int | None = None
    declared: Region | None = None
    drawn: Region = field(default_factory=Region)
    learnt: Region = field(default_factory=Region)
    cases: int = 0
    accepted: int = 0
    refused: int = 0
    inexpressible: int = 0
    infrastructure: int = 0
    skipped: int = 0
    outside: int = 0
    seconds: float = 0.0
    seconds_to_first_failure: float | None = None
    cases_to_first_failure: int | None = None
    failures: list[Failure] = field(default_factory=list)
    unshrunk: dict[str, Case] = field(default_factory=dict)
    unshrunk_because: str = ""
    shrink_seconds: float = 0.0  # the bound on studying what was found
    studied: float = 0.0  # seconds that it took
    slowest_right: float = 0.0  # seconds of the slowest case that was answered rightly
    because: str = ""  # why it stopped, where that is no limit that was asked for
    caused: dict[str, str] = field(default_factory=dict)  # of unshrunk: the failure that every case of it shows too
    by_kind: dict[str, Count] = field(default_factory=dict)
    table: list[tuple[str, int, int, int]] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    warnings: Counter[str] = field(default_factory=Counter)
    budget: dict[str, tuple[float, Case]] = field(default_factory=dict)
    slowest: tuple[float, Case] | None = None
    searched: tuple[int, int] | None = None  # variants and built ones when the search ended, before anything was shrunk
    stopped: str = ""
    trouble: str = ""
    compiled: Compiled = field(default_factory=Compiled)

    @property
    def expressible(self) -> int:
        """Cases drawn inside the region that the dialect could say and the worker could run."""
        return self.accepted + self.refused - self.outside


@dataclass(frozen=True)
class Policy:
    """How much to spend on what was found.

    After a failure the search goes on until as many cases again, within the bounds of `more`, brought no other failure,
    or `more_seconds` did (only where the hunt itself is limited by time, so that `examples` stays reproducible).
    """

    more: tuple[int, int] = (25, 200)
    more_seconds: float = 10.0
    distinct: int = 8
    shrink_seconds: float = 20.0  # for all that is done about all failures
    probes: int = 600
    slow_probes: int = 12  # of a hang: runs that hang, each of which lasts as long as the deadline
    behind_probes: int = 120  # of a failure that was never seen without an earlier one
    again: int = 2
    variants: int = 0  # compiled at most, from buckets; 0: cases are drawn one by one and may compile what they will


@dataclass(frozen=True)
class Event:
    """Something that happened; `campaign` is as of now.

    kind: case (one was judged), found (`text` is a key not seen before), shrinking (a probe), shrunk (`failure` has its
    smallest case), studied (`failure` is complete), done.
    """

    kind: str
    campaign: Campaign
    text: str = ""
    case: Case | None = None
    verdict: Verdict | None = None
    failure: Failure | None = None


def blind_because(campaign: Campaign, command: str = "fuzz", min_cases: int = MIN_CASES) -> list[str]:
    """Why a campaign without failures proves nothing; empty when it measured enough.

    `fuzz` asks for one accepted case. `gate` asks for `min_cases`, for half of those that the dialect can say, for every
    structural kind of a declared region, and for the examples it was to run.
    """
    c = campaign
    if c.accepted == 0:
        return [f"none of {c.cases} cases was accepted"]
    if command != "gate":
        return [f"interrupted after {c.cases} cases"] if c.stopped == "interrupted" else []
    out = []
    if c.accepted < min_cases:
        out.append(f"{c.accepted} cases were accepted, fewer than {min_cases}")
    if 2 * c.accepted < c.expressible:
        out.append(f"{c.accepted} of {c.expressible} cases were accepted, under half")
    if c.declared is not None:
        out += [
            f"no case with {name} was accepted, though the region declares it"
            for name in unmeasured(c.by_kind, c.declared)
        ]
    if c.examples is not None and c.cases < c.examples and c.stopped in ("seconds", "interrupted"):
        out.append(f"{c.cases} of {c.examples} examples were run before the time was over")
    return out


def verdict_and_exit_code(campaign: Campaign, command: str = "fuzz", min_cases: int = MIN_CASES) -> tuple[str, int]:
    """("pass" | "fail" | "blind" | "error", exit code): wrong before infrastructure before blind."""
    holds = [Exit.RIGHT]
    if campaign.failures or campaign.unshrunk:
        holds.append(Exit.WRONG)
    if campaign.stopped == "infrastructure":
        holds.append(Exit.INFRASTRUCTURE)
    if blind_because(campaign, command, min_cases):
        holds.append(Exit.BLIND)
    code = worst(holds)
    return VERDICTS[code], int(code)
