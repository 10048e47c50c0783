"""How a target is found: a registered name, package.module:attr, path/to/file.py:attr, or a file with one candidate."""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from . import MODULES, REGISTRY, Implementation

Q_K_V = (("q", "query"), ("k", "key"), ("v", "value"))
"""Names that the first three parameters of an attention may have, in any case."""

ADAPTER = str(Path(__file__).parent.parent / "fuzz" / "adapter.py")


class TargetError(Exception):
    """A target that cannot be used: one sentence, and the traceback of the target's own code where there is one."""

    def __init__(self, sentence: str, traceback: str = "") -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.traceback = traceback


def load(target: str) -> Implementation:
    """The implementation a target names; TargetError says what is wrong with it in one sentence."""
    head, colon, attr = target.rpartition(":")
    place = head if colon else target
    if colon and not head:
        raise TargetError(f"target must be a name, package.module:attr or path/to/file.py:attr, got target={target!r}")
    if place.endswith(".py"):
        module = _import_file(Path(place), target)
        return _implementation(target, _find(module, attr, target) if colon else _only_candidate(module, place)[1])
    if colon:
        return _implementation(target, _find(_import_module(head, target), attr, target))
    return registered(target)


def attribute(target: str) -> str:
    """The name of the target in its file or module; that of the only candidate where a file is given alone, "" without one."""
    _, colon, attr = target.rpartition(":")
    if colon or not target.endswith(".py"):
        return attr if colon else ""
    return _only_candidate(_import_file(Path(target), target), target)[0]


def registered(name: str) -> Implementation:
    """The implementation registered under a name; modules are imported until one registers it."""
    for module in sorted(MODULES, key=lambda m: not name.startswith(m)):
        if name not in REGISTRY:
            importlib.import_module(f".{module}", __package__)
    if name in REGISTRY:
        return REGISTRY[name]
    close = difflib.get_close_matches(name, REGISTRY, 3)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise TargetError(
        f"target must be package.module:attr, path/to/file.py:attr or a known name, got target={name!r}; "
        f"{hint}known names: {', '.join(sorted(n for n in REGISTRY if not n.startswith('planted_')))} and the planted bugs"
    )


def signature(call: Callable[..., Any]) -> inspect.Signature | None:
    """The callable's parameters; None for a builtin that does not tell. A module is asked for those of its forward."""
    if isinstance(call, torch.nn.Module):
        call = call.forward
    if is_operator(call):
        return _schema_signature(call)
    try:
        return inspect.signature(call)
    except (ValueError, TypeError):
        return None


def _schema_signature(operator: Any) -> inspect.Signature:
    """The parameters of an operator of torch.library, from its schema; the default overload of a packet."""
    overload = getattr(operator, "_opoverload", operator)
    schema = getattr(overload, "default", overload)._schema  # noqa: SLF001 (torch shows it nowhere else)
    P = inspect.Parameter
    return inspect.Signature(
        [
            P(
                a.name,
                P.KEYWORD_ONLY if a.kwarg_only else P.POSITIONAL_OR_KEYWORD,
                default=a.default_value if a.has_default_value() else P.empty,
            )
            for a in schema.arguments
        ]
    )


def takes_q_k_v(call: Callable[..., Any]) -> bool:
    """Whether the first three positional parameters are called q, k, v or query, key, value."""
    sig = signature(call)
    if sig is None:
        return False
    names = [p.name.lower() for p in sig.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(names) >= 3 and all(n in allowed for n, allowed in zip(names, Q_K_V, strict=False))


def candidates(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Public attention-like callables that the module itself defines, by name."""
    return {n: x for n, x in vars(module).items() if not n.startswith("_") and _own(x, module) and takes_q_k_v(x)}


def _own(value: object, module: ModuleType) -> bool:
    if inspect.isfunction(value):
        return value.__module__ == module.__name__
    return isinstance(value, torch.nn.Module | functools.partial)


def _only_candidate(module: ModuleType, place: str) -> tuple[str, Callable[..., Any]]:
    """The name and value of the one callable that a file given alone can mean."""
    adapted = {n: x for n, x in vars(module).items() if isinstance(x, Implementation) and x.adapter is not None}
    found = adapted or candidates(module)
    if len(found) == 1:
        return next(iter(found.items()))
    if not found:
        raise TargetError(
            f"{place} must define a public callable whose parameters begin with q, k, v; name one as {place}:attr"
        )
    raise TargetError(f"{place} must define one candidate or be given as {place}:attr, got {', '.join(sorted(found))}")


def _find(module: ModuleType, attr: str, target: str) -> object:
    value: object = module
    for part in attr.split("."):
        if part not in dir(value):
            close = difflib.get_close_matches(part, dir(value), 3)
            hint = (
                f"; did you mean {' or '.join(close)}?"
                if close
                else f"; it has {', '.join(candidates(module)) or 'no candidate'}"
            )
            raise TargetError(f"target {target} must name something that exists, got attr={part!r}{hint}")
        value = getattr(value, part)
    return value


def _implementation(target: str, value: object) -> Implementation:
    if isinstance(value, Implementation):
        return value
    for known in REGISTRY.values():
        if known.call is value:
            return known
    if not callable(value):
        raise TargetError(f"target {target} must be callable, got {type(value).__name__}")
    if isinstance(value, type):
        raise TargetError(f"target {target} must be a function or an instance, got the class {value.__name__}")
    summary = (getattr(value, "__doc__", None) or "").strip().partition("\n")[0] if inspect.isfunction(value) else ""
    return Implementation(name=target, call=value, summary=summary)


def _import_module(name: str, target: str) -> ModuleType:
    _on_path(os.getcwd())
    return _importing(target, lambda: importlib.import_module(name))


def _import_file(path: Path, target: str) -> ModuleType:
    """The file as a module of a name of its own; its folder is importable, as it is for a script."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise TargetError(f"target {target} must name a file that exists, got {path}")
    name = f"flashproof_target_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"target {target} must be Python source, got {path}")
    module = importlib.util.module_from_spec(spec)
    _on_path(str(path.parent))
    sys.modules[name] = module  # before execution: dataclasses and triton.jit look their module up

    def execute() -> ModuleType:
        spec.loader.exec_module(module)  # type: ignore[union-attr]
        return module

    try:
        return _importing(target, execute)
    except TargetError:
        del sys.modules[name]
        raise


def _on_path(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _importing(target: str, load_module: Callable[[], ModuleType]) -> ModuleType:
    try:
        return load_module()
    except (Exception, SystemExit) as e:  # noqa: BLE001 (the target's own code runs here, it may raise anything)
        hint = "; name it package.module:attr" if "relative import" in str(e) else ""
        declared = traceback.extract_tb(e.__traceback__)[-1].filename == ADAPTER  # by @flashproof.target: it says all
        text, frames = (str(e), "") if declared else (f"{type(e).__name__}: {e}{hint}", own_frames(e))
        raise TargetError(f"target {target} failed to import: {text}", frames) from None


def is_operator(call: object) -> bool:
    """Whether the callable is an operator of torch.library."""
    return isinstance(call, OpOverload | OpOverloadPacket | CustomOpDef)


def own_frames(error: BaseException) -> str:
    """The traceback of an error from the first frame of the target on: the harness's own frames lead nobody anywhere."""
    frames = traceback.extract_tb(error.__traceback__)
    while frames and _harness(frames[0].filename):
        del frames[0]
    head = ["Traceback (most recent call last):\n", *traceback.format_list(frames)] if frames else []
    return "".join([*head, *traceback.format_exception_only(error)])


def _harness(filename: str) -> bool:
    package = Path(__file__).parent.parent
    ours = (__file__, str(package / "fuzz"), str(package / "oracles"), "<frozen importlib")
    return filename.startswith(ours) or "/importlib/" in filename
