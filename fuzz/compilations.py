"""What was compiled in this process: kernel variants by Triton, graphs by torch.compile, and the seconds they took."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

_VARIANTS: list[tuple[str, float, bool]] = []
"""Name, seconds and whether it came from the cache, of every variant that Triton compiled or loaded."""
_FRAMES = ("entire_frame_compile", "_compile.compile_inner")
"""Phases of torch.compile that hold all others; the name changed between versions."""


def watch() -> None:
    """Count what Triton compiles from now on; nothing where Triton is not imported or has no listener."""
    knobs = sys.modules.get("triton.knobs")
    if knobs is None or getattr(knobs.compilation.listener, "counts", False):
        return
    before = knobs.compilation.listener

    def listener(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        _VARIANTS.append((str(getattr(src, "name", "")), float(getattr(times, "total", 0)) * 1e-6, bool(cache_hit)))
        if before is not None:
            before(src=src, metadata=metadata, metadata_group=metadata_group, times=times, cache_hit=cache_hit)

    listener.counts = True  # type: ignore[attr-defined]
    knobs.compilation.listener = listener


def compiled() -> dict[str, Any]:
    """Counts and seconds so far: `triton`, `triton_cached`, `triton_seconds`, `kernels`, `graphs`, `graph_seconds`."""
    return {
        "triton": sum(not hit for _, _, hit in _VARIANTS),
        "triton_cached": sum(hit for _, _, hit in _VARIANTS),
        "triton_seconds": round(sum(seconds for _, seconds, _ in _VARIANTS), 3),
        "kernels": sorted({name for name, _, _ in _VARIANTS if name}),
        **_graphs(),
    }


def _graphs() -> dict[str, Any]:
    """What torch.compile did; its modules are not imported to find out."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return {"graphs": 0, "graph_seconds": 0.0}
    times = getattr(dynamo, "compilation_time_metrics", {})
    seconds = max((sum(times.get(name, ())) for name in _FRAMES), default=0.0)
    return {"graphs": int(dynamo.counters["stats"]["unique_graphs"]), "graph_seconds": round(float(seconds), 3)}


def words(found: Mapping[str, Any], interpreted: bool, device: str) -> list[str]:
    """A line for each compiler that was at work; one that says that none was."""
    lines = []
    if interpreted:
        lines.append("Triton kernels are interpreted, nothing compiled")
    elif found.get("triton", 0) + found.get("triton_cached", 0):
        cached = f", {found['triton_cached']} loaded from the cache" if found["triton_cached"] else ""
        lines.append(
            f"Triton: {_many(found['triton'], 'variant')} of {_many(len(found['kernels']), 'kernel')} compiled in "
            f"{found['triton_seconds']:.1f} s{cached}"
        )
    if found.get("graphs"):
        lines.append(f"torch.compile: {_many(found['graphs'], 'graph')} in {found['graph_seconds']:.1f} s")
    return lines or [f"nothing compiled on {device}"]


def _many(n: int, word: str) -> str:
    return f"{n} {word}{'s' * (n != 1)}"
