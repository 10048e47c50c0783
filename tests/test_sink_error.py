"""`sink_error` against four ways to compute a sink's weight, every rounding explicit: enough, and too little with a quarter of a unit.

The errors are computed in float64; each operation is off by at most its unit. Units are given one by one, so that each is seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flashproof.oracles.contract import Contract
from flashproof.oracles.exact import Problem, Reference
from flashproof.oracles.limits_forward import sink_error

LOG2E, DRAWS, KEYS = math.log2(math.e), 6000, 3
UNITS = {
    "u": 2.0**-12,
    "exp_u": 2.0**-12,
    "log_abs": 2.0**-10,
    "lse_u": 2.0**-9,
    "constant_u": 2.0**-12,
    "s_u": 2.0**-9,
}
NONE = dict.fromkeys(UNITS, 0.0)


def drawn() -> tuple[np.ndarray, np.ndarray]:
    """(sinks, scores): alike and apart, either of them large or small."""
    rng = np.random.default_rng(5)
    size = 10.0 ** rng.uniform(-2, 2, (2, DRAWS)) * rng.choice([-1.0, 1.0], (2, DRAWS))
    apart = 10.0 ** rng.uniform(-3, 1, (DRAWS, 1)) * rng.normal(size=(DRAWS, KEYS))
    sinks = np.where(np.arange(DRAWS) % 3 == 0, size[1] * (1 + 0.01 * rng.normal(size=DRAWS)), size[0])
    sinks, scores = sinks.astype(np.float32), np.sort((size[1][:, None] + apart).astype(np.float32), -1)
    return sinks.astype(np.float64), scores.astype(np.float64)


def reference(sinks: np.ndarray, scores: np.ndarray) -> Reference:
    """One query for each head, whose scores are the bias."""
    one = torch.zeros(1, len(sinks), 1, 1)
    keys = torch.zeros(1, len(sinks), KEYS, 1)
    bias = torch.from_numpy(scores)[None, :, None].float()
    return Reference(Problem(one, keys, keys, one, bias=bias, sinks=torch.from_numpy(sinks).float()))


class Machine:
    """Operations that are off by at most a unit: `worst` by all of it, up or down; else rounded to nearest in so many bits."""

    def __init__(self, c: Contract, seed: int, *, worst: bool) -> None:
        self.c, self.rng, self.worst = c, np.random.default_rng(seed), worst

    def off(self, unit: float, x: np.ndarray) -> np.ndarray:
        return unit * self.rng.choice([-1.0, 1.0], x.shape)

    def fl(self, x: np.ndarray) -> np.ndarray:
        if self.worst or not self.c.u:
            return x * (1 + self.off(self.c.u, x))
        fraction, power = np.frexp(x)
        return np.ldexp(np.round(fraction / self.c.u) * self.c.u, power)

    def exp2(self, x: np.ndarray) -> np.ndarray:
        """The log of 2^x: what is small stays a number."""
        return x / LOG2E + np.log1p(self.off(self.c.exp_u, x))

    def in_base_2(self, x: np.ndarray) -> np.ndarray:
        return self.fl(x * LOG2E * (1 + self.off(self.c.constant_u, x)))

    def stored(self, sink: np.ndarray) -> np.ndarray:
        return sink * (1 + self.off(self.c.s_u, sink))


def among_the_keys(machine: Machine, sink: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """log of the sink's weight relative to exp(m), m the maximum of all, which is rounded in base 2 for itself."""
    m = np.maximum(sink, scores.max(-1))
    return machine.exp2(machine.fl(machine.in_base_2(machine.stored(sink)) - machine.in_base_2(m))) - (sink - m)


def first(machine: Machine, sink: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """The same where the sink is the first maximum, and each key is a tile that may raise it."""
    m = machine.in_base_2(machine.stored(sink))
    log_weight = np.zeros_like(m)
    for score in scores.T:
        new = np.maximum(m, machine.in_base_2(score))
        log_weight, m = log_weight + machine.exp2(machine.fl(m - new)), new
    return log_weight - (sink - np.maximum(sink, scores.max(-1)))


def after(machine: Machine, sink: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """log of the sink's weight over that of the keys, from the keys' lse as it is stored: m + log(sum) in base 2, then in base e."""
    m, c = scores.max(-1), machine.c
    total = np.exp(scores - m[:, None]).sum(-1)
    lse = machine.fl(machine.in_base_2(m) + np.log2(total))
    lse = machine.fl(lse / LOG2E * (1 + machine.off(c.constant_u, lse))) + machine.off(c.log_abs, lse)
    lse = lse * (1 + machine.off(c.lse_u, lse))
    apart = machine.fl(machine.stored(sink) - lse)
    return machine.exp2(machine.in_base_2(apart)) - (sink - m - np.log(total))


def lagging(machine: Machine, sink: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """As among the keys, in base e, with a maximum that is raised only when it lags by more than the contract's slack."""
    m = machine.fl(np.maximum(sink, scores.max(-1)) - machine.c.rescale_slack)
    return machine.exp2(machine.in_base_2(machine.fl(machine.stored(sink) - m))) - (sink - m)


WAYS: tuple[Callable[..., Any], ...] = (among_the_keys, first, after, lagging)


def greatest(c: Contract, allowed: Contract) -> float:
    """The greatest error, under the units of c, over what sink_error allows under those of `allowed`."""
    sinks, scores = drawn()
    limit = sink_error(reference(sinks, scores), allowed, np.full((1, DRAWS, 1, 1), KEYS + 1.0)).reshape(-1)
    runs = [way(Machine(c, seed, worst=seed < 6), sinks, scores) for seed in range(8) for way in WAYS]
    return float((np.abs(runs).max(0) / np.maximum(limit, 1e-12)).max())


@pytest.mark.parametrize("unit", UNITS)
def test_no_way_to_compute_a_sink_is_beyond_its_limit_and_a_quarter_of_a_unit_is_too_little(unit: str) -> None:
    c = replace(Contract(), **NONE | {unit: UNITS[unit]})
    assert greatest(c, c) <= 1 + 4 * UNITS[unit]
    assert greatest(c, replace(c, **{unit: UNITS[unit] / 4})) > 1


def test_a_maximum_that_lags_is_allowed_for() -> None:
    c = replace(Contract(), **NONE | {"u": UNITS["u"], "rescale_slack": 20.0})
    assert greatest(c, c) <= 1
    assert greatest(c, replace(c, rescale_slack=5.0)) > 1


def test_all_units_together_are_within_the_limit() -> None:
    c = replace(Contract(), **UNITS)
    assert 0.25 < greatest(c, c) <= 1
