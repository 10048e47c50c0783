"""Guarded allocations: memory that a target asks torch for gets poisoned margins and, if not filled by torch, poisoned contents.

Only torch's factory functions are covered (empty, empty_like, new_empty, empty_strided, zeros, ones, full and their kin); results
of native operators are allocated inside torch and stay uncovered. Poison is 0xFF in every byte: NaN in each floating dtype, -1 in
integers. A tensor that is read before it is written shows as NaN; a kernel that writes past its end changes a margin.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .finding import Finding

TORCH = str(Path(torch.__file__).parent)
MARGIN = 4096
"""Bytes on each side: a row of 256 float64 twice over, and a multiple of every alignment that kernels ask for (512 on CUDA)."""
POISON = 0xFF

_aten = torch.ops.aten
UNFILLED = frozenset({
    _aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default,
    _aten.new_empty.default, _aten.new_empty_strided.default,
})  # fmt: skip
FILLED = frozenset({
    _aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default, _aten.ones.default, _aten.ones_like.default,
    _aten.new_ones.default, _aten.full.default, _aten.full_like.default, _aten.new_full.default,
})  # fmt: skip

COVERED = UNFILLED | FILLED
_COVERED_IDS = frozenset(
    map(id, COVERED)
)  # asked on every operator: the hash of an operator itself is computed in Python


@dataclass(frozen=True)
class Allocation:
    """One guarded allocation: its bytes with margins, what it is, and where the target made it."""

    raw: Tensor
    shape: torch.Size
    dtype: torch.dtype
    made_by: Any  # the operator
    where: tuple[str, int]  # file and line

    def __str__(self) -> str:
        """What was allocated and where, in words."""
        name, dtype = self.made_by.overloadpacket.__name__, str(self.dtype).removeprefix("torch.")
        return f"{tuple(self.shape)} {dtype} by {name} made at {self.where[0]}:{self.where[1]}"

    def overwritten(self) -> str:
        """Which margin was written, in words; empty when both are as they were."""
        both = self.raw.as_strided((2, MARGIN), (len(self.raw) - MARGIN, 1))
        if int(both.min()) == POISON:  # the largest byte there is
            return ""
        before, after = both != POISON
        if bool(before.any()):
            return f"{MARGIN - int(before.nonzero()[0])} bytes before its start"
        return f"{int(after.nonzero()[0])} bytes after its end" if bool(after.any()) else ""


class GuardedAllocations(TorchDispatchMode):
    """While it is active every factory call gives a tensor inside poisoned margins; `findings` looks at the margins."""

    supports_higher_order_operators = True  # flex_attention is one; it is let through whole

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[Allocation] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch wraps each dispatch in dynamo.disable: two seconds of imports, then a cost on every operator

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise torch.compile runs a compiled target eagerly while a mode is active, and we would test something else

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        return self._guarded(result, func) if id(func) in _COVERED_IDS else result

    def _guarded(self, plain: Tensor, func: Any) -> Tensor:
        if (
            type(plain) is not Tensor
            or plain.layout != torch.strided
            or plain.device.type == "meta"
            or plain.is_quantized
        ):
            return plain
        nbytes = plain.untyped_storage().nbytes()
        try:
            raw = torch.empty(nbytes + 2 * MARGIN, dtype=torch.uint8, device=plain.device).fill_(POISON)
        except (RuntimeError, MemoryError):  # the guard is too large, the target is not: it must not be blamed
            return plain
        inner = torch.empty(0, dtype=plain.dtype, device=plain.device)
        inner.set_(raw.untyped_storage(), MARGIN // plain.element_size(), plain.shape, plain.stride())
        if func in FILLED or plain.dtype == torch.bool:  # a bool of 255 is no bool
            inner.copy_(plain)
        self.made.append(Allocation(raw, plain.shape, plain.dtype, func, _caller()))
        return inner

    def findings(self) -> list[Finding]:
        """One finding for each place in the target whose allocation was written outside its bounds."""
        out = {}
        for allocation in self.made:
            where = allocation.overwritten()
            if where and allocation.where not in out:
                message = f"memory was written {where}: {allocation}"
                out[allocation.where] = Finding("guard", "workspace", message)
        return list(out.values())


def _caller() -> tuple[str, int]:
    """File and line of the innermost frame that is neither torch's nor this file's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((TORCH, __file__)):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("an unknown place", 0)
