"""A hunt on one target as the commands run it: progress while it runs, failures saved when found, an outcome at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .found import Campaign, blind_because
from .commands import Options
from .engine import hunt
from .outcome import FailedCase, Keeper, Outcome
from .session import Session, header, opened


@dataclass(frozen=True)
class Budget:
    """When a hunt ends: after so many cases or seconds, whichever comes first."""

    examples: int | None = None
    seconds: float | None = None
    seed: int = 0
