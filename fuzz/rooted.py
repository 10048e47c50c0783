"""A tree of source that a target is loaded from: the working tree of a repository, or another revision of it in a folder of its own."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..impls.loading import TargetError


@dataclass(frozen=True)
class Tree:
    """The folder `root` stands for the repository's own folder `original`; `inside` is where a command was started in it."""

    root: str
    original: str
    inside: str = "."
    label: str = ""

    def to_json(self) -> dict[str, str]:
        """A JSON object with every field."""
        return asdict(self)

    def place(self, path: str | Path) -> Path | None:
        """Where a path of the repository lies in this tree; None for one outside the repository."""
        full = Path(self.original, self.inside, path).resolve()
        original = Path(self.original).resolve()
        return Path(self.root) / full.relative_to(original) if full.is_relative_to(original) else None


def named(target: str) -> tuple[str, str]:
    """("file", path), ("module", dotted name), or ("known", name) for an implementation that comes with flashproof."""
    head, colon, _ = target.rpartition(":")
    place = head if colon else target
    kind = "file" if place.endswith(".py") else "module" if colon else "known"
    return kind, place


def enter(tree: Tree, target: str) -> str:
    """The target's name inside the tree, after this process was moved there: working folder, module path, editable installs.

    No bytecode is written: Python takes a cached file for fresh when size and second of change agree, which they often do
    between two revisions checked out one after the other.
    """
    sys.dont_write_bytecode = True
    folder = Path(tree.root, tree.inside)
    os.chdir(folder if folder.is_dir() else tree.root)
    sys.path[:] = module_path(tree, sys.path)
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    for finder in sys.meta_path:
        _redirect(finder, tree)
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    kind, place = named(target)
    if kind == "file" and Path(place).is_absolute():
        return target.replace(place, str(tree.place(place) or place), 1)
    return target


def module_path(tree: Tree, entries: list[str]) -> list[str]:
    """The module path of a tree: it comes first, and no folder of the repository's own source is left but those in it."""
    roots = [p for p in (Path(tree.root), Path(tree.root, "src")) if p.is_dir()]
    out = [str(p) for p in roots]
    for entry in entries:
        place = tree.place(entry)
        if place is None or "site-packages" in Path(entry).parts or place == Path(entry).resolve():
            out.append(entry)  # installed packages, or the working tree itself
        elif place.is_dir():
            out.append(str(place))
    return list(dict.fromkeys(out))


def _redirect(finder: object, tree: Tree) -> None:
    """Make the finder of an editable install look into the tree."""
    module = sys.modules.get(getattr(finder, "__module__", ""))
    mapping = getattr(module, "MAPPING", None)
    if isinstance(mapping, dict):
        for name, path in mapping.items():
            place = tree.place(path) if isinstance(path, str) else None
            mapping[name] = str(place) if place is not None else path


def check(tree: Tree, target: str) -> None:
    """Raise TargetError if what was loaded for the target lies outside the tree: it would be no revision of the repository."""
    kind, place = named(target)
    found = getattr(sys.modules.get(place), "__file__", None) if kind == "module" else place
    if found is None or not Path(found).resolve().is_relative_to(Path(tree.root).resolve()):
        raise TargetError(f"target {target} must lie in the repository {tree.original}, got {found}")


def source(call: Callable[..., Any]) -> list[Any]:
    """[file, line] where a callable is defined; empty where it does not tell."""
    inner: Any = call
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = getattr(inner, "forward", inner) if not inspect.isroutine(inner) else inner
    inner = inspect.unwrap(getattr(inner, "__func__", inner))
    code = getattr(inner, "__code__", None)
    return [code.co_filename, code.co_firstlineno] if code is not None else []


def tree_from_json(data: Mapping[str, str] | None) -> Tree | None:
    """The tree that `to_json` wrote."""
    return None if data is None else Tree(**data)
