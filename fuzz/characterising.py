"""The runs from which a contract is fitted: drawn, run on the target, and beside a conforming implementation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from torch import Tensor

from ..impls.emulation import Arithmetic
from ..impls.emulation import run as emulated
from ..oracles.characterise import KEPT_FIELDS, MEASURED, fit
from ..oracles.exact import Problem
from ..oracles.fitted import Fit
from ..oracles.sample import Sample
from .case import Case
from .generate import drawn
from .hashing import uniform_bits
from .learn import Learner
from .masks import Causal, Full, Mask
from .region import Region
from .session import Session
from .strategies import cases as all_cases
from .tensors import build
from .words import sentence

CASES = 500
SECONDS = 120.0
FITTING = 0.6
"""The share of the time that running may take."""
BATCH, TURNS = 60, 100
"""Cases that are planned at once, and how often: each batch lies in the region that the answers so far leave."""
LONGEST = 64
LARGEST = 24_000
"""Elements of a plain case's largest tensor, so that some hundred runs fit in memory."""
CONFORMING = Arithmetic(q_tile=32, kv_tile=32)
PLAIN = ("normal", "normal", "normal", "normal", "normal", "offset", "normal", "outlier")
"""Data of the cases whose errors are measured. A large mean of v tells a rounding of dP from one of P."""
SMALL = ("tiny", "subnormal", "cancel", "normal", "heavy", "uniform")
"""Data of further plain cases: small gradients show what is rounded near the end of the format."""
QUERIES, KEYS = (33, 40, 56, 64, 20, 72, 100, 160, 200, 260), (33, 48, 20, 40, 72, 136, 200, 264)
"""Lengths of plain cases: one tile and several, since what is rounded once a tile shows only there."""
HEADS = ((1, 1), (1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (8, 1), (2, 2))
"""Heads of q and of k and v."""
SMALL_SCALES = (0.11, 0.011, 0.0013, None, 0.37)


def plan(region: Region, count: int = CASES, seed: int = 0) -> list[Case]:
    """`count` cases inside the region: two plain ones in turn with one as a hunt draws it."""
    fitting = (c for i in range(8 * count) if _fits(c := _plain(region, i, seed)) and not region.refuses(c))
    strategy = all_cases(
        replace(region, dropout=False), max_len=max(LONGEST, region.min_len), without=("sequence", "layouts", "dropout")
    )
    rest = drawn(strategy, count, seed)
    rest = list({c.key: c for c in rest if c.requires_grad or not region.backward}.values())
    share = count if not rest else max(2 * count // 3, count - len(rest))
    plain = list(islice(fitting, share))
    turns = [c for n, other in enumerate(rest) for c in (*plain[2 * n : 2 * n + 2], other)]
    return [*turns, *plain[2 * len(rest) :]][:count]


def _fits(case: Case) -> bool:
    return case.Hq * max(case.Lq, case.Lk) * case.D <= LARGEST


def _plain(region: Region, index: int, seed: int) -> Case:
    """The case of an index: dtypes in turn, sizes of some tiles, several heads, a mask or a bias now and then."""

    def pick(purpose: int, *options: Any) -> Any:
        return options[int(uniform_bits(seed, purpose, index)) % len(options)]

    dtype = region.dtypes[index % len(region.dtypes)]
    turn = index // len(region.dtypes)
    dims = [d for d in region.head_dims or (24, 40, 48, 56, 64) if d <= min(region.max_head_dim, 128)]
    Lq, Lk = pick(1, *QUERIES), pick(2, *KEYS)
    Lq, Lk = (min(max(n, region.min_len), region.max_len) for n in (Lq, Lk if region.lq_differs else Lq))
    Hq, Hkv = pick(3, *HEADS) if region.gqa else (pick(3, 1, 2), 0)
    small = turn % 2 == 1
    D = pick(4, *(dims or [region.max_head_dim]))
    bias = region.bias and turn % 5 == 4
    return Case(
        B=1, Hq=Hq, Hkv=Hkv or Hq, Lq=Lq, Lk=Lk, D=D, Dv=D, dtype=dtype, seed=seed * 100_003 + index,
        mask=pick(5, *_masks(region, Lq == Lk)), bias="normal" if bias else "", mask_form="flags",
        scale=_scale(region, D, small, pick), data=pick(7, *(SMALL if small else PLAIN)),
        grad=pick(8, "normal", "scaled", "ones") if small else "normal",
        requires_grad=("qkvb" if bias and region.bias_grad else "qkv") if region.backward else "",
    )  # fmt: skip


def _scale(region: Region, D: int, small: bool, pick: Callable[..., Any]) -> float | None:
    """No power of two, whose products are exact; far below 1 where small gradients are to show a cast after it."""
    if not region.scale:
        return None
    return pick(6, *SMALL_SCALES) if small else 0.37 if D & (D - 1) == 0 or pick(6, 0, 1) else None


def _masks(region: Region, square: bool) -> list[Mask]:
    """What a plain case may be masked by."""
    out: list[Mask] = [Case().mask] * ("none" in region.masks)
    out += [Causal()] * ("causal_top_left" in region.masks)
    out += [Causal("bottom_right")] * ("causal_bottom_right" in region.masks and not square)
    return out or [Case().mask]


def is_plain(case: Case) -> bool:
    """Whether errors of the case are measured: generic data and gradients, and scores of the usual size."""
    usual = case.data in PLAIN and case.grad == "normal" and case.scale in (None, 0.37) and case.B == 1
    simple = isinstance(case.mask, Full | Causal) and case.mask_form == "flags" and case.bias in ("", "normal")
    return usual and simple and min(case.Lq, case.Lk, case.D) >= 16 and not (case.softcap or case.lse_grad)


def samples(session: Session, region: Region, count: int, seed: int, until: float) -> Iterator[Sample]:
    """Runs that the target answered, until there are `count` or the time is up; what refusals rule out is drawn no more."""
    counts: dict[str, int] = {}
    learner, answered = Learner(region), 0
    for turn in range(TURNS):
        for case in plan(learner.region, BATCH, seed + 1000 * turn):
            if time.monotonic() > until or answered == count:
                return
            execution = session.runner.run(case)
            if execution.status in STATUSES:
                learner.add(case, STATUSES[execution.status])
            if execution.status == "ok" and execution.outputs:
                answered += 1
                yield sample(case, execution.outputs, counts)


STATUSES = {"ok": "accepted", "refused": "refused", "inexpressible": "inexpressible"}
"""What a learner calls them."""


def sample(case: Case, outputs: dict[str, Tensor], counts: dict[str, int]) -> Sample:
    """A run; of the first MEASURED plain ones of a dtype with the answer of a conforming implementation. `counts` counts those."""
    problem = Problem.of(build(case))
    measured = counts.get(case.dtype, 0) < MEASURED and is_plain(case)
    counts[case.dtype] = counts.get(case.dtype, 0) + measured
    good = _conforming(problem, case) if measured else None
    return Sample(problem, outputs, case.dtype, good, sentence(case))


def _conforming(problem: Problem, case: Case) -> dict[str, Tensor]:
    out = emulated(problem, CONFORMING)
    return {n: x for n, x in out.items() if n in ("o", "lse") or n[1:2] in case.requires_grad}


def characterised(session: Session, count: int = CASES, seconds: float = SECONDS, seed: int = 0) -> Fit:
    """The fitted contract of a target, from `count` seeded cases or those that fit in the time."""
    started = time.monotonic()
    region = session.region
    narrow = tuple(d for d in region.dtypes if d != "float64")  # float64 has no rounding to tell
    region = replace(region, dtypes=narrow or region.dtypes)
    runs = list(samples(session, region, count, seed, started + FITTING * seconds))
    return fit(runs, session.info["device"], kept(session.judge.spec), lambda: time.monotonic() - started > seconds)


def kept(spec: str) -> str:
    """Items of a declared contract that no fit can see."""
    items = (item.strip() for item in spec.split(","))
    return ",".join(i for i in items if i.partition("=")[0].strip() in KEPT_FIELDS)


def fit_lines(fitted: Fit) -> list[str]:
    """A fitted contract: the line to paste, what is seen where, what is left."""
    if not fitted.samples:
        return ["no case was answered, so there is nothing to fit"]
    told = f"{fitted.samples} cases run; wrong under the default contract: {fitted.beyond[0]}, under the fitted one: "
    lines = [f"{told}{fitted.beyond[1]}"]
    lines.append(
        f"The sizes of errors were compared with a conforming implementation's in {fitted.measured} plain cases."
    )
    fits = "the default contract fits" if not fitted.beyond[0] else "no contract fits better than the default one"
    lines.append(f"--contract {fitted.spec}" if fitted.spec else fits)
    if fitted.preset:
        lines.append(f"--contract {fitted.preset} describes the runs as well")
    lines.append(f"arithmetic: {fitted.arithmetic}")
    for seen in fitted.traits:
        lines.append(f"{seen.trait.name}: {seen.trait.words}; to remove it: {seen.trait.code_change}")
        lines += [f"  seen in {n}: {_evidence(seen.evidence[n])}" for n in seen.tensors]
    if fitted.tighter:
        stricter = ",".join(filter(None, [fitted.spec, fitted.tighter]))
        lines.append(f"optional, for stricter limits (this target rounds less than it may): --contract {stricter}")
    sizes = [
        f"{dtype}: " + ", ".join(f"{n} {after:.2f}" for n, (_, after) in row.items())
        for dtype, row in fitted.sizes.items()
    ]
    lines.append("errors over their expected size (near 1; float32 and lse from 0.3): " + "; ".join(sizes))
    lines += [f"unexplained: {text}" for text in fitted.unexplained]
    return lines


def _evidence(e: tuple[int, int, float, float]) -> str:
    beyond = f"{e[0]} -> {e[1]} runs beyond the limit" if e[0] != e[1] else ""
    size = f"size of the errors {e[2]:.2f} -> {e[3]:.2f}" if abs(e[2] - e[3]) >= 0.01 else ""
    return ", ".join(filter(None, [beyond, size]))
