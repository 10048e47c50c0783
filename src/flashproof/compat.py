"""Versions that cannot work together, refused with the remedy before anything else goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata

Versions = Mapping[str, str]
"""Installed version per distribution name; a distribution that is not installed is absent."""


class IncompatibleVersions(ImportError):
    """Two installed distributions cannot work together; the message says what to install instead."""


@dataclass(frozen=True)
class _Rule:
    broken: Callable[[Versions], bool]
    reason: str
    remedy: str
    names: tuple[str, ...]


def _release(version: str) -> tuple[int, ...]:
    """The numbers a version starts with: 2.13.0+cpu -> (2, 13, 0), 3.7.0rc1 -> (3, 7, 0)."""
    numbers: list[int] = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _below(versions: Versions, name: str, *bound: int) -> bool:
    """Whether the distribution is installed in a version below the bound."""
    return name in versions and _release(versions[name]) < bound


def _from(versions: Versions, name: str, *bound: int) -> bool:
    """Whether the distribution is installed in that version or above."""
    return name in versions and _release(versions[name]) >= bound


RULES = (
    _Rule(
        lambda v: _from(v, "numpy", 2, 4) and _below(v, "triton", 3, 7),
        "Triton's interpreter before 3.7 fails on numpy 2.4 (https://github.com/triton-lang/triton/issues/9171)",
        "pip install 'numpy<2.4' (or 'triton>=3.7')",
        ("numpy", "triton"),
    ),
    _Rule(
        lambda v: _below(v, "triton", 3, 6),
        "Triton's interpreter before 3.6 refuses valid tensor descriptors",
        "pip install 'triton>=3.6'",
        ("triton",),
    ),
    _Rule(
        lambda v: _below(v, "torch", 2, 11),
        "flashproof is only tested with torch 2.11 and newer",
        "pip install 'torch>=2.11'",
        ("torch",),
    ),
)


def problem(versions: Versions) -> str | None:
    """One sentence that names the versions, the reason and the remedy, or None when they can work together."""
    for rule in RULES:
        if rule.broken(versions):
            found = " with ".join(f"{name} {versions[name]}" for name in rule.names)
            return f"flashproof cannot work on {found}: {rule.reason}. Remedy: {rule.remedy}"
    return None


def installed(*names: str) -> dict[str, str]:
    """Versions of those distributions that are installed, read from their metadata: nothing is imported."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def check() -> None:
    """Raise IncompatibleVersions when the installed distributions cannot work together."""
    sentence = problem(installed("numpy", "torch", "triton"))
    if sentence is not None:
        raise IncompatibleVersions(sentence)
