"""A planted bug as an edit of the source of a correct implementation: the clean code carries no switches for it.

The edited text is compiled as a copy of the module beside the clean one, so tracebacks and Triton's own reading of the
source show the edited lines. Modules of the same implementation that import the edited one are copied with it.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

Edit = tuple[str, str]
PARTS: dict[str, tuple[str, ...]] = {
    "blockwise": ("blockwise",),
    "textbook": ("textbook",),
    "packed_loop": ("packed_loop",),
    "split_keys": ("split_keys",),
    "triton_flash": ("triton_scores", "triton_forward", "triton_backward", "triton_flash"),
}
"""The modules of an implementation, each after those it imports; the last one holds the function of that name."""


def whole(part: str) -> str:
    """The implementation that a module belongs to."""
    return next(name for name, parts in PARTS.items() if part in parts)


def edited(part: str, edits: tuple[Edit, ...], name: str) -> Callable[..., Any]:
    """The implementation whose module `part` has every (old, new) replaced; ValueError if an old text is not there once."""
    parts = PARTS[whole(part)]
    for module in parts:
        text = _source(module)
        if module == part:
            text = _replace(text, edits, name)
        for other in parts:
            text = text.replace(f"from .{other} import", f"from .{other}__{name} import")
        made = _execute(
            f"{module}__{name}",
            text.replace("from . import register", "from .planted.edits import register"),
        )
    call: Callable[..., Any] = getattr(made, whole(part))
    return call


def register(**_declared: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that changes nothing: a copy is not registered under the name of the clean implementation."""
    return lambda call: call


def _source(module: str) -> str:
    return (Path(__file__).parents[1] / f"{module}.py").read_text(encoding="utf-8")


def _replace(text: str, edits: tuple[Edit, ...], name: str) -> str:
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(
                f"planted bug {name} must replace a text that occurs once, got {text.count(old)} of {old!r}"
            )
        text = text.replace(old, new)
    return text


def _execute(name: str, text: str) -> ModuleType:
    """The module made of a text, importable by its name; its lines are kept for tracebacks and for inspect."""
    package = __package__.rpartition(".")[0]
    made = ModuleType(f"{package}.{name}")
    made.__package__, made.__file__ = package, f"<{name}>"
    linecache.cache[made.__file__] = (len(text), None, text.splitlines(keepends=True), made.__file__)
    sys.modules[made.__name__] = made
    exec(compile(text, made.__file__, "exec"), made.__dict__)  # noqa: S102 - our own source with one edit
    return made
