"""Which memory torch handed out without writing it, and which it wrote since."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .monitor import Monitor

_EMPTY = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"})


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


class AllocationMode(TorchDispatchMode):
    """Tells a monitor about torch's allocations and writes."""

    def __init__(self, monitor: Monitor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.monitor = monitor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if name_of(func) in _EMPTY:
            if "out" not in kwargs:
                self.monitor.mark_empty(out)
            return out
        for tensor in written_arguments(func, args, kwargs):
            self.monitor.mark_written(tensor)
        return out
