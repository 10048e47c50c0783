"""What is compiled while a target runs: which variants, how many of them no cache held, how long it took.

Triton 3.6 to 3.9 is watched where it compiles a variant, torch.compile through dynamo's callbacks, XLA through jax's monitoring, which
tells of a compilation when it is over. A *variant* is a kernel with
one set of constants, types and specialised arguments, met for the first time in a process; it is *built* if no cache on disk had it.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

TRITON, DYNAMO, XLA = "triton", "torch.compile", "XLA"
UNSEEN = "none seen by Triton, torch.compile or jax (XLA); what other compilers did is not observed"
"""What is said where nothing was compiled: no other compiler is watched."""
XLA_COMPILED, XLA_CACHED = "/jax/core/compile/backend_compile_duration", "/jax/compilation_cache/cache_hits"
"""Names of jax's events; the first has a duration, and has the second before it where a cache on disk had the program."""


@dataclass
class Compiled:
    """What was compiled: variants by name, how many of them were built, seconds, and the configurations of tuned kernels."""

    variants: set[str] = field(default_factory=set)
    built: int = 0
    seconds: float = 0.0
    configs: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, told: Mapping[str, Any]) -> int:
        """Add what a run told (`Watch.taken`); how many variants were not known before."""
        before = len(self.variants)
        self.variants.update(told.get("variants", ()))
        self.built += told.get("built", 0)
        self.seconds += told.get("seconds", 0.0)
        for kernel, counts in told.get("configs", {}).items():
            mine = self.configs.setdefault(kernel, {})
            for config, n in counts.items():
                mine[config] = mine.get(config, 0) + n
        return len(self.variants) - before

    def to_json(self) -> dict[str, Any]:
        """Counts, seconds, and the names of the kernels with the number of their variants."""
        kernels: dict[str, int] = {}
        for variant in sorted(self.variants):
            name = variant.partition(" ")[0]
            kernels[name] = kernels.get(name, 0) + 1
        out: dict[str, Any] = {"variants": len(self.variants), "built": self.built, "seconds": round(self.seconds, 3)}
        return {**out, "kernels": kernels, "configs": self.configs}

    @property
    def _deadlines(self) -> str:
        """XLA says that it compiled only when it has, so a deadline does not wait for it."""
        return "within the deadlines" if any(v.startswith(XLA) for v in self.variants) else "apart from every deadline"

    def __str__(self) -> str:
        """One line for a report; empty where nothing was compiled."""
        if not self.variants:
            return ""
        cached = len(self.variants) - self.built
        found = f" ({cached} from a cache)" if cached > 0 else ""
        found += f", {self.built} built" if cached > 0 else ""
        return f"{len(self.variants)} variants{found} in {self.seconds:.1f} s, {self._deadlines}"


class Watch:
    """Sees compilations of this process from `install` on. `told` hears of each beginning (its name) and end ("")."""

    def __init__(self, told: Callable[[str], None] = lambda _: None) -> None:
        self.told = told
        self._lock = threading.RLock()  # autograd compiles in a thread of its own
        self._hooked: set[str] = set()
        self._reset()

    def _reset(self) -> None:
        self._variants: list[str] = []
        self._built, self.seconds = 0, 0.0  # since `taken`
        self._open: set[str] = set()
        self._began = 0.0
        self.configs: dict[str, dict[str, int]] = {}

    def install(self) -> None:
        """Hook whichever compilers are imported by now; those of others stay in place."""
        if "triton" not in self._hooked and "triton.knobs" in sys.modules and _compiles():
            self._hooked.add("triton")
            _hook_triton(self)
        if "dynamo" not in self._hooked and "torch._dynamo.callback" in sys.modules:
            self._hooked.add("dynamo")
            _hook_dynamo(self)
        if "jax" not in self._hooked and "jax" in sys.modules:
            self._hooked.add("jax")
            _hook_jax(self)

    def begin(self, compiler: str, variant: str) -> None:
        """A compiler begins with a variant."""
        with self._lock:
            self._variants.append(variant)
            if not self._open:
                self._began = time.perf_counter()
                self.told(variant)
            self._open.add(compiler)

    def built(self) -> None:
        """The variant was in no cache."""
        with self._lock:
            self._built += 1

    def end(self, compiler: str) -> None:
        """A compiler is done, well or not."""
        with self._lock:
            self._open.discard(compiler)
            if not self._open and self._began:
                self.seconds += time.perf_counter() - self._began
                self._began = 0.0
                self.told("")

    def over(self, variant: str, seconds: float, cached: bool) -> None:
        """A compiler that tells only of ends was done with a variant in so many seconds."""
        with self._lock:
            self._variants.append(variant)
            self._built += not cached
            if not self._open:  # else the time counts already
                self.seconds += seconds

    def chose(self, kernel: str, config: str) -> None:
        """A tuned kernel was launched with this configuration."""
        counts = self.configs.setdefault(kernel, {})
        counts[config] = counts.get(config, 0) + 1

    def taken(self) -> dict[str, Any]:
        """What was compiled since the last call, as JSON; empty when nothing was. A compiler that raised is done."""
        with self._lock:
            for compiler in tuple(self._open):
                self.end(compiler)
            out: dict[str, Any] = {}
            if self._variants:
                out = {"variants": self._variants, "built": self._built, "seconds": round(self.seconds, 6)}
            if self.configs:
                out["configs"] = self.configs
            self._reset()
            return out


def _compiles() -> bool:
    import triton

    return not triton.knobs.runtime.interpret


def _hook_triton(watch: Watch) -> None:
    """Triton calls JITFunction._do_compile for each variant that is new to the process, and the listener once it has it.

    Its own jit_cache_hook would make it write the constants as JSON, which not all constants can be.
    """
    from triton import knobs
    from triton.runtime.jit import JITFunction

    compile_variant, listener = JITFunction._do_compile, knobs.compilation.listener  # noqa: SLF001

    def do_compile(self: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        watch.begin(TRITON, variant_of(self.fn, key))
        try:
            return compile_variant(self, key, *args, **kwargs)
        finally:
            watch.end(TRITON)

    def on_compiled(**told: Any) -> None:
        if not told["cache_hit"]:
            watch.built()
        if listener:
            listener(**told)

    JITFunction._do_compile = do_compile  # noqa: SLF001
    knobs.compilation.listener = on_compiled


def variant_of(function: Any, key: object) -> str:
    """A kernel's name and eight digits of what it is specialised on; the same in every process."""
    return f"{function.__name__} {hashlib.sha256(f'{function.__module__} {key}'.encode()).hexdigest()[:8]}"


def _hook_dynamo(watch: Watch) -> None:
    from torch._dynamo.callback import callback_handler

    def on_begin(told: Any = None) -> None:
        watch.begin(DYNAMO, f"{DYNAMO} {getattr(told, 'compile_id', '')}")
        watch.built()

    callback_handler.register_start_callback(on_begin)
    callback_handler.register_end_callback(lambda *_: watch.end(DYNAMO))


def _hook_jax(watch: Watch) -> None:
    """Every program that XLA compiles is one variant: jax keeps what it compiled, and compiles a program twice only if it must."""
    from jax import monitoring

    count, cached = 0, False

    def on_event(event: str, **_: Any) -> None:
        nonlocal cached
        cached = cached or event == XLA_CACHED

    def on_duration(event: str, seconds: float, **_: Any) -> None:
        nonlocal count, cached
        if event == XLA_COMPILED:
            count += 1
            watch.over(f"{XLA} {os.getpid()}.{count}", seconds, cached)
            cached = False

    monitoring.register_event_listener(on_event)
    monitoring.register_event_duration_secs_listener(on_duration)
