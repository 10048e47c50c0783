"""A hunt finds planted bugs by itself and shrinks each to the case that was worked out by hand from the edit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashproof.fuzz.engine import hunt
from flashproof.fuzz.execute import Runner
from flashproof.fuzz.found import Policy
from flashproof.fuzz.judge import Judge
from flashproof.fuzz.worker import Worker
from flashproof.impls import REGISTRY
from flashproof.impls.planted import PLANTED, Planted

SEED, EXAMPLES = 0, 400
UNHURRIED = Policy(shrink_seconds=120.0)
"""The default but for its clock, so that a busy machine gives the same cases."""
OF_TRITON = ("dv_strides", "k_tail_load", "early_return")
"""Interpreted kernels are slow to hunt; these show what only they can: strides, loads and stores out of bounds."""
OF_TORCH = ("last_tile", "head_mapping", "dk_scale", "in_place", "dead_row_nan", "gradient_subset")
"""A few of each kind; `flashproof teeth` hunts them all."""
HUNTED = tuple(PLANTED[name] for name in (*OF_TORCH, *OF_TRITON))


def hunted(bug: Planted, runner: Runner | Worker, policy: Policy = UNHURRIED) -> Iterator[tuple[str, object]]:
    declared = REGISTRY[bug.target]
    judge = Judge(runner, declared.contract, declared.supports)
    for failure in hunt(judge, examples=EXAMPLES, seed=SEED, policy=policy).failures:
        yield failure.key, failure.case


@pytest.mark.slow
@pytest.mark.parametrize("bug", HUNTED, ids=lambda b: b.name)
def test_a_hunt_ends_at_the_case_worked_out_by_hand(bug: Planted) -> None:
    found = dict(hunted(bug, Runner(bug.target)))
    assert found.get(f"{bug.oracle}:{bug.tensor}") == bug.minimal, found


@pytest.mark.slow
def test_a_bug_that_needs_an_earlier_call_ends_at_a_call_sequence() -> None:
    bug = PLANTED["stale_scale"]
    with Worker(bug.target) as worker:
        found = dict(hunted(bug, worker, Policy(shrink_seconds=120.0, distinct=1)))
    assert found.get(f"{bug.oracle}:{bug.tensor}") == bug.minimal, found
