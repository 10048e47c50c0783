"""Which memory torch handed out without writing it, and which it wrote since."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .monitor import Monitor

_EMPTY = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"})
_COPIES = frozenset({"clone", "_to_copy"})


def written_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operation writes: in-place targets and `out=`."""
    if not func._schema.is_mutable or torch.Tag.inplace_view in func.tags:
        return
    for i, spec in enumerate(func._schema.arguments):
        if spec.alias_info is None or not spec.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else kwargs.get(spec.name)
        yield from (v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, Tensor))


def name_of(func: Any) -> str:
    """The operation's name without namespace and overload."""
    return str(func._schema.name.rpartition("::")[2])


def light(mode: type[TorchDispatchMode]) -> type[TorchDispatchMode]:
    """The dispatch mode, which no longer loads torch's compiler when its first operation comes.

    Torch wraps `__torch_dispatch__` to hide it from torch.compile, and the wrapper imports torch._dynamo: seconds that a process
    without torch.compile need not spend. Once something else has imported it, the wrapper is used.
    """
    wrapped = mode.__torch_dispatch__
    plain = getattr(wrapped, "__wrapped__", wrapped)

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        chosen = wrapped if "torch._dynamo" in sys.modules else plain
        return chosen(self, func, types, args, kwargs)

    mode.__torch_dispatch__ = dispatch  # type: ignore[method-assign]
    return mode


@light
class AllocationMode(TorchDispatchMode):
    """Tells a monitor about torch's allocations and writes."""

    supports_higher_order_operators = True  # flex_attention is one; it is let through whole

    def __init__(self, monitor: Monitor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.monitor = monitor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            return out
        if name_of(func) in _EMPTY:
            if "out" not in kwargs:
                self.monitor.mark_empty(out)
            return out
        for tensor in written_arguments(func, args, kwargs):
            self.monitor.mark_written(tensor)
        if name_of(func) in _COPIES:
            self.monitor.mark_copied(args[0], out)
        elif name_of(func) == "copy_":
            self.monitor.mark_copied(args[1], out)
        return out
