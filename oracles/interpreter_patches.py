"""Attributes replaced in somebody else's modules, and put back in reverse order."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class Patches:
    """The replacements made so far; `restore` undoes all of them, whatever happened between."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """What `owner.name` was before it became `value`."""
        old = owner.__code__ if name == "__code__" else vars(owner).get(name, _ABSENT)
        self._undo.append((owner, name, old))
        setattr(owner, name, value)
        return old

    def restore(self) -> None:
        """Put every attribute back."""
        while self._undo:
            owner, name, old = self._undo.pop()
            if old is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
