"""Triton kernels on a CPU, made trustworthy: right bfloat16, guarded memory, a monitor of every access, and an exact mode.

enable()                      # before the target is imported, if possible
with monitored() as monitor:  # or exact()
    o = kernel(q, k, v)
findings(monitor, {"o": o})   # list of Finding
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from .finding import Finding

if TYPE_CHECKING:
    from torch import Tensor

    from .interpreter_patches import Patches
    from .monitor import Monitor
    from .monitor_memory import Memory

_installed: list[tuple[Patches, Memory]] = []


def enable() -> None:
    """Have Triton interpret its kernels from now on; a kernel that was decorated before is interpreted too."""
    os.environ["TRITON_INTERPRET"] = "1"
    if "triton" in sys.modules:
        install()


def disable() -> None:
    """Undo `enable` and `install`. A kernel that was decorated in between stays an interpreted one."""
    os.environ.pop("TRITON_INTERPRET", None)
    while _installed:
        _installed.pop()[0].restore()


def available() -> bool:
    """Whether Triton is there."""
    return importlib.util.find_spec("triton") is not None


def install() -> None:
    """Make the interpreter right, fast and safe. Idempotent.

    From now on every launch runs on guarded memory, monitored or not: a stray access is dropped and kept in `guard().violations`.
    """
    if _installed:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.runtime.interpreter as interp

    from . import (
        interpreter_bf16,
        interpreter_fast,
        interpreter_fast_ops,
        interpreter_launch,
        interpreter_libdevice,
        monitor_overflow,
    )
    from .interpreter_patches import Patches
    from .monitor_memory import Memory

    patches, memory = Patches(), Memory(interp._interpreter)
    interpreter_bf16.apply(patches)
    interpreter_fast.apply(patches)
    interpreter_fast_ops.apply(patches)
    interpreter_libdevice.apply(patches)
    interpreter_launch.apply(patches, memory, monitor_overflow.apply(patches, memory))
    _installed.append((patches, memory))


def guard() -> Monitor:
    """The monitor of launches outside `monitored()`: bounds and counts only."""
    install()
    return _installed[0][1].stack[0]


@contextmanager
def monitored(**options: Any) -> Iterator[Monitor]:
    """A Monitor (its fields are the options) that sees every launch and every torch allocation of the block."""
    install()
    from .monitor import Monitor
    from .monitor_torch import AllocationMode

    monitor, memory = Monitor(**options), _installed[0][1]
    memory.stack.append(monitor)
    try:
        with AllocationMode(monitor):
            yield monitor
    finally:
        memory.stack.remove(monitor)


@contextmanager
def exact(**options: Any) -> Iterator[Monitor]:
    """Like `monitored`, with every float held in float64; `monitor.value(tensor)` is its unrounded value."""
    install()
    from . import shadow
    from .interpreter_fast_ops import forget_constants
    from .interpreter_patches import Patches

    patches = Patches()
    with ExitStack() as stack:
        stack.callback(forget_constants)
        stack.callback(patches.restore)
        shadow.apply(patches)
        monitor = stack.enter_context(monitored(exact=True, **options))
        stack.enter_context(shadow.ShadowMode(monitor))
        yield monitor


def findings(monitor: Monitor, outputs: Mapping[str, Tensor], harmed: bool | None = None) -> list[Finding]:
    """One Finding per kind, kernel and argument, and one per output with unwritten elements; see memory_findings.findings."""
    from .memory_findings import findings as found

    return found(monitor, outputs, harmed)
