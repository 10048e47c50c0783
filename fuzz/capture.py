"""capture: records the calls of a real training or serving step as cases, so that what a team really runs joins its corpus."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from .called import CannotExpressError, Source
from .patched import CaptureError, Patched, found, named
from .recorded import Recorded, family, surroundings, token
from .written import Folder, table

DEFAULTS = (
    "torch.nn.functional:scaled_dot_product_attention",
    "flash_attn:flash_attn_func",
    "flash_attn:flash_attn_varlen_func",
)
"""What is recorded when no target is named; those that are not installed are left out."""
LIMIT = 256
FIRST_LENGTHS = 16
"""Of calls that differ in lengths alone this many are recorded, then only the 32nd, the 64th, ...: a decoded token is one length."""
TRACED = "calls were traced by torch.compile; its graphs run without the function, so they are not recorded"
MOST_BYTES = 64 << 20

_ACTIVE: list[capture] = []
_LOCK = threading.RLock()


class capture:  # noqa: N801 (called like a function)
    """Context manager: the calls of the targets inside it, each structure once, as case files in a folder.

    `targets` are callables, or "package.module:attr"; by default scaled_dot_product_attention and flash_attn's functions.
    `tensors` stores q, k, v, a dense mask and grad_output of the first call of each structure too, if they are at most
    `max_bytes`. At most `limit` structures are recorded. `quiet` prints no summary at exit.
    `dialect` names the signature of targets whose parameters do not decide it.

    What is called, and what it returns, is left alone: an error in here is counted and told at the end. CaptureError before
    anything runs: a target that does not exist, a folder that cannot be written.
    """

    def __init__(
        self,
        folder: str | Path,
        targets: Iterable[str | Callable[..., Any]] | None = None,
        *,
        tensors: bool = False,
        limit: int = LIMIT,
        max_bytes: int = MOST_BYTES,
        quiet: bool = False,
        dialect: str = "",
    ) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise CaptureError(f"limit must be an integer >= 1, got limit={limit!r}")
        if isinstance(targets, str) or callable(targets):
            raise CaptureError(f"targets must be a list of callables or names, got targets={targets!r:.80}")
        self.folder = Folder(Path(folder))
        self.targets = None if targets is None else list(targets)
        self.tensors, self.limit, self.max_bytes, self.quiet = tensors, limit, max_bytes, quiet
        self.dialect = dialect
        self.recorded: dict[Any, Recorded] = {}
        self.inexpressible: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.lengths: Counter[Any] = Counter()
        self._compiled: dict[str, bool] = {}
        self._known: dict[Any, Recorded | str] = {}
        self._patched = Patched()
        self._sources: dict[int, Source] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        """Begin to record; CaptureError if it cannot."""
        with _LOCK:
            for other in _ACTIVE:
                if other.folder.path.resolve() == self.folder.path.resolve():
                    raise CaptureError(
                        f"{self.folder.path} must be the folder of one capture at a time, got a second one inside it"
                    )
            self.folder.make()
            try:
                for name, fn in self._resolved():
                    self._patched.add(fn, functools.partial(self._wrapper, name=name))
            except BaseException:
                self._patched.undo()
                raise
            _ACTIVE.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Put every callable back, write what was recorded, say what came of it; an exception inside goes on."""
        with _LOCK:
            if self in _ACTIVE:
                _ACTIVE.remove(self)
            for place in self._patched.undo():
                self.notes[f"{place} was changed by someone else meanwhile and left so"] += 1
        self.flush()
        try:
            self.folder.say(self.summary())
        except OSError as e:
            self.notes[f"summary.txt could not be written: {e}"] += 1
        if not self.quiet:
            print(self.summary(), file=sys.stderr)

    def flush(self) -> None:
        """Write what was recorded so far; an error is noted."""
        for one in list(self.recorded.values()):
            try:
                self.folder.keep(one, self.inexpressible)
            except Exception as e:  # noqa: BLE001 (a training step must not end for what is only watched)
                self._noted(e)

    def summary(self) -> str:
        """A table of the recorded structures with their counts, then what was not recorded and why."""
        told = [*self.notes, *self._compiled]
        return table(self.recorded.values(), self.folder.path, self.inexpressible, self.skipped, told)

    @staticmethod
    def wrap(fn: Callable[..., Any], name: str = "", dialect: str = "") -> Callable[..., Any]:
        """The callable, recorded by every capture that is open while it is called: for one that no module holds by a name."""
        source = _source(fn, name or named(fn), dialect)

        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not _ACTIVE or torch.compiler.is_compiling():
                return fn(*args, **kwargs)
            call = fn
            for log in _ACTIVE:
                call = functools.partial(log._call, call, source)  # noqa: SLF001 (the class's own)
            return call(*args, **kwargs)

        return wrapped

    def _resolved(self) -> list[tuple[str, Callable[..., Any]]]:
        if self.targets is None:
            present = [t for t in DEFAULTS if t.partition(":")[0].partition(".")[0] == "torch" or _installed(t)]
            return [(t, found(t)) for t in present]
        return [(t, found(t)) if isinstance(t, str) else (named(t), t) for t in self.targets]

    def _wrapper(self, fn: Callable[..., Any], inner: Callable[..., Any], name: str) -> Callable[..., Any]:
        """What stands in a module in place of `inner`, which is `fn` or another capture's wrapper of it."""
        source = _source(fn, name, self.dialect)
        call, compiled = self._call, self._compiled

        @functools.wraps(inner)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                compiled[TRACED] = True
                return inner(*args, **kwargs)
            return call(inner, source, *args, **kwargs)

        return recorded

    def _call(self, fn: Callable[..., Any], source: Source, *args: Any, **kwargs: Any) -> Any:
        new = None
        try:
            new = self._seen(source, args, kwargs)
        except Exception as e:  # noqa: BLE001 (as in flush)
            self._noted(e)
        out = fn(*args, **kwargs)
        if new is not None:
            try:
                new.answered(out)
                if not new.waits:
                    self.folder.keep(new, self.inexpressible)
            except Exception as e:  # noqa: BLE001 (as in flush)
                self._noted(e)
        return out

    def _seen(self, source: Source, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recorded | None:
        """Count the call; what is to be filled in, if its structure is new."""
        key = (source.name, surroundings(), *map(token, args), *((n, token(x)) for n, x in kwargs.items()))
        known = self._known.get(key)
        if isinstance(known, str):
            self.inexpressible[known] += 1
            return None
        if known is not None:
            known.calls += 1
            if not (known.by_contents and known.calls & (known.calls - 1) == 0):
                known.count += 1
                return None
        with self._lock:
            return self._new(key, source, args, kwargs)

    def _new(self, key: Any, source: Source, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recorded | None:
        """A call of a structure not seen before, or one whose mask is looked at again."""
        if reason := _not_now(args, kwargs):
            self.skipped[reason] += 1
            return None
        first = self._known.get(key)
        if first is None and (len(self.recorded) >= self.limit or len(self._known) >= 4 * self.limit):
            self.skipped[f"more than {self.limit} structures (limit)"] += 1
            return None
        if first is None and self._enough_lengths(family(source, args, kwargs)):
            return None
        try:
            new = Recorded.of(source, args, kwargs, tensors=self.tensors, max_bytes=self.max_bytes)
        except CannotExpressError as e:
            if first is None:
                self._known[key] = str(e)
            self.inexpressible[str(e)] += 1
            return None
        same = self.recorded.get(new.structure)
        if same is not None:
            same.count += 1
            self._known.setdefault(key, same)
            return None
        if len(self.recorded) >= self.limit:
            self.skipped[f"more than {self.limit} structures (limit)"] += 1
            return None
        self.recorded[new.structure] = new
        self._known.setdefault(key, new)
        return new

    def _enough_lengths(self, same: Any) -> bool:
        """Whether calls that differ in lengths alone were recorded often enough."""
        self.lengths[same] += 1
        n = self.lengths[same]
        if n <= FIRST_LENGTHS or n & (n - 1) == 0:
            return False
        self.skipped["further lengths of calls that are recorded"] += 1
        return True

    def _noted(self, error: Exception) -> None:
        self.notes[f"the recorder failed: {type(error).__name__}: {error}"] += 1


def _source(fn: Callable[..., Any], name: str, dialect: str) -> Source:
    try:
        return Source.of(fn, name, dialect)
    except ValueError as e:
        reason = str(e).replace("with --dialect", "with dialect=")
        raise CaptureError(f"target {name} cannot be recorded: {reason}") from None


def _installed(target: str) -> bool:
    """Whether the module of a default target can be imported and has it."""
    module, _, attr = target.partition(":")
    try:
        return hasattr(importlib.import_module(module), attr)
    except Exception:  # noqa: BLE001 (a package that is there but broken is not recorded)
        return False


def _not_now(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Why nothing may be read now; empty otherwise."""
    on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for x in (*args, *kwargs.values()))
    if on_gpu and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph was being captured"
    return "inside torch.jit.trace" if torch._C._get_tracing_state() is not None else ""  # noqa: SLF001 (what is_tracing asks)
