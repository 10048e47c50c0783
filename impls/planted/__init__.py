"""Planted bugs: each is one edit of a correct implementation, and the harness must find it and shrink it to the case stated there.

Most are bugs that attention kernels have had; `source` says which. `minimal` was worked out from the edit. Each is registered as
the target `planted_NAME`. They lie in a module for each kind; reports.toml says which public reports they stand for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .. import REGISTRY, blockwise, packed_loop, register, split_keys, textbook, triton_flash  # noqa: F401 - what is broken here
from . import backward, forward, scores, stateful, triton_backward, triton_forward, wrappers
from .edits import edited, whole
from .row import FORWARD, Planted

__all__ = ["FORWARD", "KINDS", "PLANTED", "Planted"]

KINDS: dict[str, tuple[Planted, ...]] = {
    "forward": forward.ROWS,
    "scores": scores.ROWS,
    "backward": backward.ROWS,
    "stateful": stateful.ROWS,
    "wrappers": wrappers.ROWS,
    "triton_forward": triton_forward.ROWS,
    "triton_backward": triton_backward.ROWS,
}
"""Kind of bug, the name of its module here, to its rows."""

PLANTED: dict[str, Planted] = {p.name: p for rows in KINDS.values() for p in rows}


def _register(bug: Planted) -> None:
    clean = REGISTRY[whole(bug.part)]

    @functools.cache
    def faulty() -> Callable[..., Any]:
        return edited(bug.part, bug.edits, bug.name)

    @functools.wraps(clean.call)
    def attention(*args: Any, **kwargs: Any) -> Any:
        return faulty()(*args, **kwargs)

    declared = {n: getattr(clean, n) for n in ("dialect", "supports", "contract", "devices", "triton")}
    register(name=bug.target, summary=f"planted bug: {bug.story}", **declared)(attention)


for _bug in PLANTED.values():
    _register(_bug)
