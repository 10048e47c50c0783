"""The exact mode: an unmodified fp16, bf16 or fp32 program run with every float held in float64.

Memory keeps the program's dtypes, so addresses, sizes and counts are real, but each stored element also keeps its unrounded float64
value, which later loads see. Results then differ from a float64 oracle by about 1e-15 whatever the dtype, and an algorithmic slip
cannot hide behind a bf16 limit. A constant keeps the digits the kernel wrote. Torch's operations between kernels are carried out a
second time on the float64 values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interp
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from .interpreter_fast_ops import forget_constants
from .interpreter_patches import Patches
from .monitor import Monitor
from .monitor_state import flat, key_of
from .monitor_torch import light, name_of, written_arguments

_FLOATS = frozenset({"fp16", "bf16", "fp32", "fp64"})
_FLOAT64 = np.dtype(np.float64)


def _is_float(type_: Any) -> bool:
    element = type_.element_ty if isinstance(type_, tl.block_type) else type_
    return getattr(element, "name", "") in _FLOATS


def apply(patches: Patches) -> None:
    """Hold every float of the interpreter in float64; `forget_constants` when the patches are undone."""
    forget_constants()
    builder, handle = interp.InterpreterBuilder, interp.TensorHandle
    narrow, cast_impl, fp_to_fp = interp._get_np_dtype, builder.cast_impl, builder.create_fp_to_fp

    def np_dtype(type_: Any) -> Any:
        return _FLOAT64 if _is_float(type_) else narrow(type_)

    def cast(self: Any, src: Any, dst: Any) -> Any:
        if _is_float(dst.scalar) and _is_float(src.dtype.scalar):
            return handle(src.data, dst.scalar)
        return cast_impl(self, src, dst)

    def create_fp_to_fp(self: Any, src: Any, dst: Any, rounding: Any) -> Any:
        if _is_float(dst.scalar) and _is_float(src.dtype.scalar):
            return handle(src.data, dst.scalar)
        return fp_to_fp(self, src, dst, rounding)

    def bitcast(_: Any, src: Any, dst: Any) -> Any:
        """Bits are those of the dtype the kernel names: a float gives up its unrounded value here."""
        source, target = src.dtype.scalar, dst.scalar
        if _is_float(source) and _is_float(target):
            return handle(src.data, target)
        data = src.data.astype(narrow(source)) if _is_float(source) else src.data
        data = data.view(narrow(target))
        return handle(data.astype(np.float64) if _is_float(target) else data, target)

    def constant(type_: Any) -> Any:
        return lambda self, value: handle(np.array([value], np.float64), type_)

    patches.set(interp, "_get_np_dtype", np_dtype)
    patches.set(interp, "_validate_np_data_size", lambda *args: True)
    patches.set(builder, "cast_impl", cast)
    patches.set(builder, "create_fp_to_fp", create_fp_to_fp)
    patches.set(builder, "create_bitcast", bitcast)
    patches.set(builder, "create_fabs", lambda self, arg: handle(np.abs(arg.data), arg.dtype.scalar))
    for name, type_ in (("fp16", tl.float16), ("bf16", tl.bfloat16), ("fp32", tl.float32), ("fp64", tl.float64)):
        patches.set(builder, f"get_{name}", constant(type_))


@light
class ShadowMode(TorchDispatchMode):
    """Carries unrounded values through torch's operations by doing each one again in float64.

    Random operations and those that float64 cannot do lose exactness: `Monitor.value` then says so.
    """

    supports_higher_order_operators = True  # flex_attention is one: it is let through whole, and loses exactness

    def __init__(self, monitor: Monitor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.monitor = monitor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return self._whole(func, args, kwargs)
        written = [t for t in written_arguments(func, args, kwargs) if _carried(t)]
        for tensor in written:
            self.monitor.shadow_of(tensor).unrounded()  # before it changes
        twins = None if _only_looks(func) else self._twins(args, kwargs)
        out = func(*args, **kwargs)
        if twins is not None:
            results = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor)]
            self._carry(func, twins, results, written, self._lost(args, kwargs))
        return out

    def _whole(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        for tensor in filter(_carried, _tensors(out)):
            shadow = self.monitor.shadow_of(tensor)
            shadow.refresh()
            shadow.lost = func.name()
        return out

    def _twins(self, args: Any, kwargs: Any) -> Any:
        with _disable_current_modes():
            return tree_map(self._twin, (args, kwargs))

    def _twin(self, value: Any) -> Any:
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return torch.float64
        if not isinstance(value, Tensor) or not _carried(value):
            return value
        shadow = self.monitor.known(value)
        if shadow is None or shadow.values is None or shadow.dtype != value.dtype:
            return value.to(torch.float64)
        return flat(shadow.values, value)

    def _lost(self, args: Any, kwargs: Any) -> str:
        shadows = (self.monitor.known(t) for t in _tensors((args, kwargs)))
        return next((s.lost for s in shadows if s is not None and s.lost), "")

    def _carry(self, func: Any, twins: Any, results: list[Tensor], written: list[Tensor], lost: str) -> None:
        targets = [*(t for t in results if _carried(t)), *written]
        if not targets:
            return
        random = torch.Tag.nondeterministic_seeded in func.tags
        with _disable_current_modes():
            if random or _foreign(func) or not self._again(func, twins, results, written):
                lost = lost or ("" if random and _draws_only(twins, written) else name_of(func))
                for tensor in targets:
                    self.monitor.shadow_of(tensor).refresh()
        for tensor in targets:
            self.monitor.shadow_of(tensor).lost = lost

    def _again(self, func: Any, twins: Any, results: list[Tensor], written: list[Tensor]) -> bool:
        """Whether the operation could be carried out in float64 too."""
        try:
            again = [t for t in tree_flatten(func(*twins[0], **twins[1]))[0] if isinstance(t, Tensor)]
            self._keep([t for t in results if _carried(t)], [t for t in again if _carried(t)], written)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):  # float64 cannot do all that bf16 can
            return False
        return True

    def _keep(self, results: list[Tensor], again: list[Tensor], written: list[Tensor]) -> None:
        places = {key_of(t) for t in written}
        for tensor, twin in zip(results, again, strict=True):
            if tensor.numel() and key_of(tensor) not in places:
                flat(self.monitor.shadow_of(tensor).unrounded(), tensor).copy_(twin)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (t for t in tree_flatten(tree)[0] if isinstance(t, Tensor) and t.device.type == "cpu")


def _carried(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.device.type == "cpu" and tensor.layout == torch.strided


def _foreign(func: Any) -> bool:
    """Whether an operator is not torch's own: a body that casts to float32 does so whatever it is given."""
    return func.namespace not in ("aten", "prim", "prims")


def _draws_only(twins: Any, written: list[Tensor]) -> bool:
    """Whether a random operation has no input but what it overwrites: then its numbers are exactly what was drawn."""
    return len([t for t in tree_flatten(twins)[0] if isinstance(t, Tensor)]) <= len(written)


def _only_looks(func: Any) -> bool:
    """Whether the operation makes a view or hands out memory: nothing is calculated."""
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return (
        views
        or torch.Tag.inplace_view in func.tags
        or name_of(func).startswith(("empty", "new_empty", "set_", "resize_"))
    )
