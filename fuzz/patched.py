"""Callables replaced wherever a module holds them, and put back."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

Wrapper = Callable[[Callable[..., Any], Callable[..., Any]], Callable[..., Any]]
"""(the callable, what a module holds in its place now) -> what it is to hold."""
_REPLACED: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The wrappers of captures that are open or were, with what each replaced."""


class CaptureError(Exception):
    """A capture that cannot begin: one sentence."""


def found(target: str) -> Callable[..., Any]:
    """What "package.module:attr" names; CaptureError if it is not there or cannot be called."""
    head, colon, attr = target.partition(":")
    if not (head and colon and attr) or "." in attr:
        raise CaptureError(f"target must be package.module:attr or a callable, got target={target!r}")
    try:
        module = importlib.import_module(head)
    except Exception as e:  # noqa: BLE001 (the target's own code runs here, it may raise anything)
        raise CaptureError(f"target {target} failed to import: {type(e).__name__}: {e}") from None
    fn = getattr(module, attr, None)
    if not callable(fn):
        close = difflib.get_close_matches(attr, [n for n, x in vars(module).items() if callable(x)], 3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise CaptureError(f"target {target} must name a callable that exists, got attr={attr!r}{hint}")
    return original(fn)


def named(fn: Callable[..., Any]) -> str:
    """A callable as a target: module:name, or file.py:name for one of the script that runs."""
    if not callable(fn):
        raise CaptureError(f"target must be package.module:attr or a callable, got {type(fn).__name__}")
    fn = original(fn)
    module = getattr(fn, "__module__", None) or type(fn).__module__
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    if module == "torch._C._nn":
        module = "torch.nn.functional"
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return f"{Path(script).resolve()}:{name}" if module == "__main__" and script else f"{module}:{name}"


def original(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The callable behind the wrappers of captures."""
    while type(fn) is FunctionType and fn in _REPLACED:
        fn = _REPLACED[fn]
    return fn


class Patched:
    """What was replaced where."""

    def __init__(self) -> None:
        self._places: list[tuple[Any, str, Any, Any]] = []  # owner, attribute, what it held, what it holds

    def add(self, fn: Callable[..., Any], wrapper: Wrapper) -> None:
        """Replace a callable in every module that holds it under any name; CaptureError if none does."""
        fn = original(fn)
        if not isinstance(fn, FunctionType | BuiltinFunctionType):
            raise CaptureError(
                f"target {named(fn)} must be a function to be replaced, got {type(fn).__name__}; wrap what is called: "
                f"x.forward = flashproof.capture.wrap(x.forward)"
            )
        made: dict[int, Any] = {}
        for owner, name, held in _holders(fn):
            if id(held) not in made:
                made[id(held)] = wrapper(fn, held)
                _REPLACED[made[id(held)]] = held
            setattr(owner, name, made[id(held)])
            self._places.append((owner, name, held, made[id(held)]))
        if not made:
            raise CaptureError(
                f"target {named(fn)} must be held by a module under some name to be recorded; "
                f"wrap it where it is kept: f = flashproof.capture.wrap(f)"
            )

    def undo(self) -> list[str]:
        """Put everything back; the places that hold something else by now, which keep it."""
        changed = []
        for owner, name, held, ours in reversed(self._places):
            if vars(owner).get(name) is ours:
                setattr(owner, name, held)
            else:
                changed.append(f"{owner.__name__}.{name}")
        self._places.clear()
        return changed


def _holders(fn: Callable[..., Any]) -> list[tuple[Any, str, Any]]:
    """(module, attribute, what it holds) wherever that is the callable or a capture's wrapper of it."""
    out = []
    for module in {id(m): m for m in list(sys.modules.values())}.values():  # some are there under two names
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict) or getattr(module, "__name__", "").startswith("torch._C"):
            continue  # torch.compile looks its functions up in torch._C, once, and must find the real ones there
        for name, held in list(names.items()):
            if held is fn or (type(held) is FunctionType and original(held) is fn):
                out.append((module, name, held))
    return out
