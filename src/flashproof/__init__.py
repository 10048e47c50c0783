"""Differential testing and correctness fuzzing of attention kernels."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .compat import check as _refuse_versions_that_cannot_work

if TYPE_CHECKING:
    from .fuzz.adapter import target
    from .fuzz.api import CheckFailed, Refuse, cases, check
    from .fuzz.capture import capture
    from .fuzz.case import Case
    from .fuzz.region import Region

__version__ = "0.1.0"
__all__ = ["Case", "CheckFailed", "Refuse", "Region", "capture", "cases", "check", "target"]

_refuse_versions_that_cannot_work()

# Loaded on first use: `import flashproof` happens in every pytest run that has the plugin installed, and torch takes seconds.
_HOME = {
    "Case": "fuzz.case",
    "CheckFailed": "fuzz.api",
    "Refuse": "fuzz.api",
    "Region": "fuzz.region",
    "capture": "fuzz.capture",
    "cases": "fuzz.api",
    "check": "fuzz.api",
    "target": "fuzz.adapter",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"flashproof has {', '.join(__all__)}, got {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
