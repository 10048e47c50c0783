"""What a fit says: the contract, each trait with what speaks for it, and what is left unexplained."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from .traits import Trait

EVIDENCE = 0.04
"""A trait is seen in a tensor when its errors come this much nearer to their expected size, in natural logarithms."""


@dataclass(frozen=True)
class Seen:
    """A trait of the fitted contract and per tensor what speaks for it.

    `evidence`: tensor -> (runs beyond a limit without it, with it, size of the errors without it, with it).
    """

    trait: Trait
    evidence: dict[str, tuple[int, int, float, float]]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Where it is seen: fewer wrong runs, or errors nearer to their expected size."""
        return tuple(n for n, e in self.evidence.items() if e[1] < e[0] or nearer(e[2], e[3]) > EVIDENCE)


@dataclass
class Fit:
    """A fitted contract. `spec` is the line to paste; `tighter` are items that may be added since nothing needs what they take.

    `arithmetic`: the default's arithmetic and the traits beside it, by name. `preset`: one under which the runs do as well.
    `sizes`: dtype -> tensor -> (errors over their expected size before, after); `beyond` (before, after): runs outside a limit.
    `unexplained`: what no trait accounts for, in words.
    """

    spec: str = ""
    arithmetic: str = ""
    traits: list[Seen] = field(default_factory=list)
    tighter: str = ""
    preset: str = ""
    samples: int = 0
    measured: int = 0
    beyond: tuple[int, int] = (0, 0)
    sizes: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    unexplained: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The JSON object of a fit."""
        traits = [
            {"name": s.trait.name, "declared": s.trait.declared, "words": s.trait.words, "code_change": s.trait.code_change,
             "tensors": list(s.tensors),
             "evidence": {n: dict(zip(("beyond_without", "beyond_with", "size_without", "size_with"), e, strict=True))
                          for n, e in s.evidence.items()}}
            for s in self.traits
        ]  # fmt: skip
        plain = ("spec", "arithmetic", "tighter", "preset", "samples", "measured", "beyond", "sizes", "unexplained")
        return {n: getattr(self, n) for n in plain} | {"traits": traits}


def nearer(before: float, after: float) -> float:
    """How much nearer to 1 a ratio came, in natural logarithms."""
    if not before or not after:
        return 0.0
    return abs(math.log(before)) - abs(math.log(after))
