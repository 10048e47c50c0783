"""bfloat16 made right in Triton's interpreter.

Triton 3.6 to 3.9 hold bfloat16 as raw uint16 and calculate with the bit patterns: `dot`, `+`, `max` and `exp` are wrong by 1e9 and no
error is raised, and float32 -> bfloat16 truncates. Here bfloat16 is ml_dtypes' numpy type, which converts by rounding to nearest even,
as torch and every GPU do.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interp

from .interpreter_patches import Patches

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def _is_bfloat16(*types: Any) -> bool:
    return any(t.scalar == tl.bfloat16 for t in types)


def _truncated(data: Any) -> Any:
    """bfloat16 by dropping bits: what `fp_downcast_rounding="rtz"` asks for."""
    return (data.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(BFLOAT16)


def apply(patches: Patches) -> None:
    """Teach the interpreter's dtype table, casts and constants about bfloat16."""
    builder = interp.InterpreterBuilder
    get_np_dtype, cast, fp_to_fp = interp._get_np_dtype, builder.cast_impl, builder.create_fp_to_fp

    def np_dtype(type_: Any) -> Any:
        element = type_.element_ty if isinstance(type_, tl.block_type) else type_
        return BFLOAT16 if element == tl.bfloat16 else get_np_dtype(type_)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if _is_bfloat16(src.dtype, dst_type):
            return interp.TensorHandle(src.data.astype(interp._get_np_dtype(dst_type.scalar)), dst_type.scalar)
        return cast(self, src, dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if not _is_bfloat16(source, target) or source.is_fp8() or target.is_fp8():
            return fp_to_fp(self, src, dst_type, rounding)
        if target == tl.bfloat16 and rounding == interp._ir.ROUNDING_MODE.RTZ:
            return interp.TensorHandle(_truncated(src.data), target)
        return cast_impl(self, src, dst_type)

    def get_bf16(_: Any, value: Any) -> Any:
        return interp.TensorHandle(np.array([value], dtype=BFLOAT16), tl.bfloat16)

    patches.set(interp, "_get_np_dtype", np_dtype)
    patches.set(builder, "cast_impl", cast_impl)
    patches.set(builder, "create_fp_to_fp", create_fp_to_fp)
    patches.set(builder, "get_bf16", get_bf16)
