"""Operands of a binary operation matched by a table of types instead of by calculation, and without being copied to full size.

Triton's semantic layer promotes and broadcasts both operands of every `+`, `<` or `where` before the interpreter calls one numpy
function, which broadcasts by itself. Here the outcome of the matching depends on the two types alone and is remembered; an operand
keeps its small array and only gets the broadcast type. Whatever is not plain (mixed dtypes, float8, ranks that differ, errors) goes
Triton's own way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
import triton.runtime.interpreter as interp
from triton.language.semantic import TritonSemantic

from .interpreter_patches import Patches

_HALVES = frozenset({"fp16", "bf16"})
_FLOATS = frozenset({"fp16", "bf16", "fp32", "fp64"})


class _Match(NamedTuple):
    """The types that the operands get; None: they keep their own."""

    left: Any
    right: Any


_constants: dict[Any, Any] = {}
"""Tensors of Python scalars, by value and type."""


def forget_constants() -> None:
    """Drop the remembered constants: the exact mode makes other ones."""
    _constants.clear()


def apply(patches: Patches) -> None:
    """Replace the matching of operands, `to_tensor`, `expand_dims` and the broadcasting of equal shapes."""
    match_slowly = TritonSemantic.binary_op_type_checking_impl
    matches: dict[Any, _Match | None] = {}

    def match_operands(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        flags = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        if type(rhs) is tl.tensor and type(lhs) is tl.tensor:
            key = lhs.type.name, rhs.type.name, flags
            match = matches[key] if key in matches else matches.setdefault(key, _match(lhs.type, rhs.type, *flags))
            if match is None:
                return match_slowly(self, lhs, rhs, *flags)
            left, right = match
            return (
                lhs if left is None else tl.tensor(lhs.handle, left),
                rhs if right is None else tl.tensor(rhs.handle, right),
            )
        if type(lhs) is tl.tensor and (constant := _constant(self, rhs, lhs.type, div_or_mod)) is not None:
            return lhs, constant
        if type(rhs) is tl.tensor and (constant := _constant(self, lhs, rhs.type, div_or_mod)) is not None:
            return constant, rhs
        return match_slowly(self, lhs, rhs, *flags)

    patches.set(TritonSemantic, "binary_op_type_checking_impl", match_operands)
    _skip_what_changes_nothing(patches)


def _skip_what_changes_nothing(patches: Patches) -> None:
    to_tensor, broadcast = TritonSemantic.to_tensor, TritonSemantic.broadcast_impl_value

    def to_tensor_unless_it_is(self: Any, x: Any, check_type: bool = True) -> Any:
        return x if type(x) is tl.tensor else to_tensor(self, x, check_type)

    def broadcast_unless_equal(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape == right.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def create_expand_dims(_: Any, arg: Any, axis: int) -> Any:
        index = (slice(None),) * axis + (None,)
        return interp.TensorHandle(arg.data[index], arg.dtype.scalar)

    patches.set(TritonSemantic, "to_tensor", to_tensor_unless_it_is)
    patches.set(TritonSemantic, "broadcast_impl_value", broadcast_unless_equal)
    patches.set(interp.InterpreterBuilder, "create_expand_dims", create_expand_dims)


def _match(lhs: Any, rhs: Any, lhs_ptr: bool, rhs_ptr: bool, arithmetic: bool, divides: bool) -> _Match | None:
    """How two operand types become one shape; None where dtypes must be converted or Triton must complain."""
    left, right = lhs.scalar, rhs.scalar
    if left.is_ptr() or right.is_ptr():
        plain = (lhs_ptr and left.is_ptr() and right.is_int()) or (rhs_ptr and right.is_ptr() and left.is_int())
    else:
        same = left.name == right.name and (left.is_int() or left.name in _FLOATS)
        plain = same and not (arithmetic and divides and left.name in _HALVES)
    shape = _common_shape(_shape(lhs), _shape(rhs)) if plain else None
    if shape is None:
        return None
    return _Match(_widened(lhs, shape), _widened(rhs, shape))


def _shape(type_: Any) -> tuple[int, ...]:
    return tuple(tl.core._unwrap_if_constexpr(n) for n in type_.shape) if type_.is_block() else ()


def _common_shape(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    if not left or not right:
        return left or right
    if len(left) != len(right) or any(n != m and 1 not in (n, m) for n, m in zip(left, right, strict=True)):
        return None
    return tuple(max(n, m) for n, m in zip(left, right, strict=True))


def _widened(type_: Any, shape: tuple[int, ...]) -> Any:
    return None if _shape(type_) == shape else tl.block_type(type_.scalar, list(shape))


def _constant(semantic: Any, value: Any, like: Any, divides: bool) -> Any:
    """The Python number as a tensor of the other operand's type; None where that is not what Triton would make of it."""
    scalar = like.scalar
    if type(value) is float:
        plain = scalar.name in _FLOATS
    elif type(value) is int:
        plain = scalar.name in _FLOATS or _fits(value, scalar)
    else:
        return None
    if not plain or (divides and scalar.name in _HALVES):
        return None
    key = value, type(value), like.name
    known = _constants.get(key)
    if known is None:
        known = tl.tensor(semantic.scalar_constant(value, scalar).handle, like)
        if value and scalar.name in (*_FLOATS, "int32", "int64"):  # 0.0 and -0.0 are the same key
            _constants[key] = known
    return known


def _fits(value: int, scalar: Any) -> bool:
    """Whether Triton takes the number as a constant of an integer type; int1 is left to it."""
    if not scalar.is_int() or scalar.int_bitwidth == 1:
        return False
    return bool(scalar.get_int_min_value() <= value <= scalar.get_int_max_value())
