"""Hypothesis as a generator only: a list of cases for a seed, the same on every machine and beside any user's tests.

Own settings throughout (Hypothesis loads a profile "ci" by itself), no database, no deadline. A provider of our own draws
uniformly: the built-in one mixes in constants that it finds in whatever modules happen to be imported.
"""

from __future__ import annotations

import random
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider
from hypothesis.strategies import SearchStrategy

from .case import Case

BACKEND = "flashproof"
_WIDEST = 1 << 32  # of an integer drawn without a bound


class UniformProvider(HypothesisProvider):
    """Integers and booleans from the run's seed alone; everything else as Hypothesis draws it."""

    @property
    def _source(self) -> random.Random:
        assert self._random is not None
        return self._random

    def draw_boolean(self, p: float = 0.5) -> bool:
        """True with probability p."""
        return self._source.random() < p

    def draw_integer(
        self,
        min_value: int | None = None,
        max_value: int | None = None,
        *,
        weights: dict[int, float] | None = None,
        shrink_towards: int = 0,  # noqa: ARG002 (the interface of a provider)
    ) -> int:
        """Uniform between the bounds, or by weight."""
        if weights:
            values = list(weights)
            rest = 1.0 - sum(weights.values())
            chosen = self._source.choices([*values, None], [*weights.values(), rest])[0]
            if chosen is not None:
                return chosen
        low = min_value if min_value is not None else (max_value - _WIDEST if max_value is not None else -_WIDEST)
        return self._source.randint(low, max_value if max_value is not None else low + 2 * _WIDEST)

    def _maybe_draw_constant(self, *_: Any, **__: Any) -> None:
        return None


def drawn(strategy: SearchStrategy[Case], count: int, seed: int) -> list[Case]:
    """`count` cases (the first is the simplest one, some may be equal), a function of the strategy and the seed."""
    AVAILABLE_PROVIDERS.setdefault(BACKEND, UniformProvider)
    out: list[Case] = []

    @hypothesis.seed(seed)
    @settings(_quiet(count))
    @given(strategy)
    def collect(case: Case) -> None:
        out.append(case)

    collect()
    return out[:count]


def _quiet(count: int) -> settings:
    """Every setting that a loaded profile could change, said."""
    return settings(
        max_examples=count,
        backend=BACKEND,
        database=None,
        deadline=None,
        derandomize=False,
        phases=(Phase.generate,),
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
