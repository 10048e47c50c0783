"""Versions that cannot work together, refused with the remedy before anything else goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

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
    interpreter: bool = False  # only Triton's interpreter is broken: compiled kernels on a GPU work


def _release(version: str) -> tuple[int, ...]:
    """The numbers a version starts with: 2.13.0+cpu -> (2, 13, 0), 3.7.0rc1 -> (3, 7, 0)."""
    numbers: list[int] = []
    for part in version.partition("+")[0].split("."):
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
        interpreter=True,
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


def problem(versions: Versions, *, gpu: bool = False) -> str | None:
    """One sentence that names the versions, the reason and the remedy, or None when they can work together.

    On a machine with a `gpu` kernels can be compiled, so what breaks only the interpreter is no reason to refuse.
    """
    for rule in RULES:
        if rule.broken(versions) and not (gpu and rule.interpreter):
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


def has_gpu() -> bool:
    """Whether the operating system shows an NVIDIA or AMD compute device."""
    return any(Path(node).exists() for node in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd"))


def check(*, gpu: bool | None = None) -> None:
    """Raise IncompatibleVersions when the installed distributions cannot work together; `gpu` None: look for one."""
    sentence = problem(installed("numpy", "torch", "triton"), gpu=has_gpu() if gpu is None else gpu)
    if sentence is not None:
        raise IncompatibleVersions(sentence)
