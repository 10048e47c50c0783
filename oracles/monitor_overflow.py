"""Integers that overflowed, followed to the addresses made from them.

An int32 offset that wraps is a bug when a lane that is not masked off uses it as an address, and none when it is a hash or lies in a
masked lane. Triton's own check looks at every operation and then discards its assertion in the interpreter. Here an interval test of
the operands replaces it; only when an operation did overflow are the interpreter's integer operations wrapped, until the launch ends,
so that the lanes in question carry a mark.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interp
from triton.language.semantic import TritonSemantic

from .interpreter_patches import Patches
from .monitor_memory import Memory
from .monitor_state import Array

_MARK = "overflowed"
_OPERATIONS: dict[str, Callable[..., Array]] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _bounds(data: Array) -> tuple[int, int]:
    if data.size == 1:
        value = int(data.reshape(-1)[0])
        return value, value
    return int(data.min()), int(data.max())


def _interval(name: str, a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """The smallest and largest result that operands within these bounds can give."""
    if name == "add":
        return a[0] + b[0], a[1] + b[1]
    if name == "sub":
        return a[0] - b[1], a[1] - b[0]
    corners = [x * y for x in a for y in b]
    return min(corners), max(corners)


class OverflowWatch:
    """Marks the lanes of overflowed integers and tells the monitor when one of them reaches an address."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.marking = Patches()
        self.active = False
        self.pending: tuple[Any, Any, Array] | None = None

    def check(self, lhs: Any, rhs: Any, operation: Any) -> None:
        """Called with the operands of an integer operation before it is carried out."""
        scalar, name = lhs.type.scalar, operation.__name__
        left, right = lhs.handle.data, rhs.handle.data
        if scalar.int_bitwidth >= 64 or not left.size or not right.size:
            return
        lowest, highest = scalar.get_int_min_value(), scalar.get_int_max_value()
        low, high = _interval(name, _bounds(left), _bounds(right))
        if low >= lowest and high <= highest:
            return
        result = _OPERATIONS[name](left.astype(np.int64), right.astype(np.int64))
        outside = (result < lowest) | (result > highest)
        if outside.any():
            self.pending = lhs.handle, rhs.handle, outside
            self._begin_marking()

    def end(self) -> None:
        """The launch is over: take the marking away."""
        self.marking.restore()
        self.active, self.pending = False, None

    def _begin_marking(self) -> None:
        if self.active:
            return
        self.active = True
        builder = interp.InterpreterBuilder
        for name in ("create_add", "create_sub", "create_mul", "create_addptr"):
            self._wrap(builder, name, self._binary)
        for name in ("create_expand_dims", "create_broadcast", "create_reshape", "create_trans"):
            self._wrap(builder, name, self._reshaped)
        self._wrap(builder, "create_int_cast", lambda _, out, src, *__: _mark(out, _marks(src)))
        self._wrap(builder, "create_splat", lambda _, out, __, src: _mark(out, _marks(src)))
        self._wrap(builder, "create_select", self._selected)
        for name in ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas"):
            self._announce(builder, name)

    def _wrap(self, builder: Any, name: str, follow: Callable[..., None]) -> None:
        original = getattr(builder, name)

        def wrapped(*args: Any) -> Any:
            out = original(*args)
            follow(original, out, *args[1:])
            return out

        self.marking.set(builder, name, wrapped)

    def _binary(self, _: Any, out: Any, lhs: Any, rhs: Any) -> None:
        if self.pending is not None and self.pending[0] is lhs and self.pending[1] is rhs:
            _mark(out, self.pending[2])
            self.pending = None
        _mark(out, _marks(lhs))
        _mark(out, _marks(rhs))

    def _reshaped(self, original: Any, out: Any, src: Any, *args: Any) -> None:
        marks = _marks(src)
        if marks is not None:
            full = interp.TensorHandle(np.broadcast_to(marks, src.data.shape), tl.int1)
            _mark(out, original(interp.interpreter_builder, full, *args).data)

    def _selected(self, _: Any, out: Any, condition: Any, lhs: Any, rhs: Any) -> None:
        left, right = _marks(lhs), _marks(rhs)
        if left is not None or right is not None:
            _mark(out, np.where(condition.data, False if left is None else left, False if right is None else right))

    def _announce(self, builder: Any, name: str) -> None:
        original = getattr(builder, name)
        position = 2 if name == "create_atomic_rmw" else 1  # (self, operation, pointer, ...)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.memory.monitor.overflowed = _marks(args[position])
            try:
                return original(*args, **kwargs)
            finally:
                self.memory.monitor.overflowed = None

        self.marking.set(builder, name, wrapped)


def _marks(handle: Any) -> Array | None:
    marks: Array | None = handle.attr.get(_MARK)
    return marks


def _mark(handle: Any, marks: Array | None) -> None:
    if marks is None:
        return
    full = np.broadcast_to(marks, handle.data.shape)
    before = _marks(handle)
    handle.attr[_MARK] = full if before is None else before | full


def apply(patches: Patches, memory: Memory) -> OverflowWatch:
    """Put the watch in the place of Triton's own overflow check."""
    watch = OverflowWatch(memory)
    patches.set(
        TritonSemantic,
        "binary_op_sanitize_overflow_impl",
        lambda _, lhs, rhs, operation: watch.check(lhs, rhs, operation),
    )
    return watch
