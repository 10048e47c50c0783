"""Operands of a binary operation matched by a table of types instead of by calculation, and without being copied to full size.

Triton's semantic layer promotes and broadcasts both operands of every `+`, `<` or `where` before the interpreter calls one numpy
function, which broadcasts by itself. Here the outcome of the matching depends on the two types alone and is remembered; an operand
keeps its small array and only gets the broadcast type. Integers of two widths (a stride and an index) are widened here too. Whatever
is not plain (other mixed dtypes, float8, ranks that differ, errors) goes Triton's own way.
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
    """The types that the operands get, None: they keep their own; and whose integers are converted to that type."""

    left: Any
    right: Any
    convert_left: bool = False
    convert_right: bool = False


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
            left, right, convert_left, convert_right = match
            return (
                lhs if left is None else _with_type(self, lhs, left, convert_left),
                rhs if right is None else _with_type(self, rhs, right, convert_right),
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


def _with_type(semantic: Any, x: Any, type_: Any, convert: bool) -> Any:
    handle = semantic.builder.create_int_cast(x.handle, type_, type_.scalar.is_int_signed()) if convert else x.handle
    return tl.tensor(handle, type_)


def _match(lhs: Any, rhs: Any, lhs_ptr: bool, rhs_ptr: bool, arithmetic: bool, divides: bool) -> _Match | None:
    """How two operand types become one shape; None where Triton has to convert other dtypes or to complain."""
    left, right = lhs.scalar, rhs.scalar
    if arithmetic and _differ_in_width(left, right):
        wide = left if left.int_bitwidth > right.int_bitwidth else right
        shape = _common_shape(_shape(lhs), _shape(rhs))
        if shape is None:
            return None
        return _Match(_formed(lhs, wide, shape), _formed(rhs, wide, shape), left is not wide, right is not wide)
    if left.is_ptr() or right.is_ptr():
        plain = (lhs_ptr and left.is_ptr() and right.is_int()) or (rhs_ptr and right.is_ptr() and left.is_int())
    else:
        same = left.name == right.name and (left.is_int() or left.name in _FLOATS)
        plain = same and not (arithmetic and divides and left.name in _HALVES)
    shape = _common_shape(_shape(lhs), _shape(rhs)) if plain else None
    if shape is None:
        return None
    return _Match(_formed(lhs, left, shape), _formed(rhs, right, shape))


def _differ_in_width(left: Any, right: Any) -> bool:
    """Two integer types of one signedness, neither of them int1: the wider one is that of the result."""
    if not (left.is_int() and right.is_int()) or left.int_signedness != right.int_signedness:
        return False
    return 1 not in (left.int_bitwidth, right.int_bitwidth) and left.int_bitwidth != right.int_bitwidth


def _formed(type_: Any, scalar: Any, shape: tuple[int, ...]) -> Any:
    """The type with that scalar and shape; None where it has both."""
    if type_.scalar is scalar and _shape(type_) == shape:
        return None
    return tl.block_type(scalar, list(shape)) if shape else scalar


def _shape(type_: Any) -> tuple[int, ...]:
    return tuple(tl.core._unwrap_if_constexpr(n) for n in type_.shape) if type_.is_block() else ()


def _common_shape(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    if not left or not right:
        return left or right
    if len(left) != len(right) or any(n != m and 1 not in (n, m) for n, m in zip(left, right, strict=True)):
        return None
    return tuple(max(n, m) for n, m in zip(left, right, strict=True))


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
