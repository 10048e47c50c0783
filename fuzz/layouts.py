"""How a logical (B, H, L, D) tensor lies in memory, and the guarded storages that hold it.

A guarded storage is filled with a NaN pattern before the tensor is written into it: reading past an end or into a gap
gives NaN, and a write there is found by comparing bytes with a pristine copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

Shape = tuple[int, ...]
Damage = tuple[str, tuple[int, ...], str]

PATTERNS = {
    torch.float16: (torch.int16, 0x7FE5),
    torch.bfloat16: (torch.int16, 0x7FE5),
    torch.float32: (torch.int32, 0x7FE57FE5),
    torch.float64: (torch.int64, 0x7FFE57FE57FE57FE),
    torch.bool: (torch.uint8, 0xA5),
    torch.int32: (torch.int32, 0x7FE57FE5),
}
"""Poison per dtype, as an integer: a quiet NaN whose bytes nobody writes by chance; a true that is not 1; a far index."""


@dataclass(frozen=True)
class Layout:
    """Where the elements of one tensor lie: strides and offset in elements, counted from the start of `span` elements."""

    shape: Shape
    strides: tuple[int, ...]
    offset: int
    span: int

    def of(self, storage: Tensor, start: int) -> Tensor:
        """The tensor as a view on a flat storage."""
        return storage.as_strided(self.shape, self.strides, start + self.offset)


def stored(shape: Shape, order: str, *, heads: int = 0, head: int = 0, step: int = 1) -> Layout:
    """A layout with the axes bhld in the given order, outermost first.

    The tensor is a slice, from `head` on, of one with `heads` heads (0: its own); `step` is the innermost stride.
    """
    logical = dict(zip("bhld", shape, strict=True))
    strides, span = {}, step
    for axis in reversed(order):
        strides[axis] = span
        span *= max(heads or logical[axis] if axis == "h" else logical[axis], 1)
    return Layout(shape, tuple(strides[axis] for axis in "bhld"), strides["h"] * head, span)


def _expand(shape: Shape) -> Layout:
    inner = stored((1, 1, *shape[2:]), "bhld")
    return Layout(shape, (0, 0, *inner.strides[2:]), 0, inner.span)


def _size1(shape: Shape) -> Layout:
    """Contiguous, with strides of size-1 axes that nothing may rely on (odd, larger than the tensor)."""
    plain = stored(shape, "bhld")
    strides = tuple(3 * plain.span + 7 if n == 1 else s for n, s in zip(shape, plain.strides, strict=True))
    return Layout(shape, strides, 0, plain.span)


def _offset(shape: Shape) -> Layout:
    plain = stored(shape, "bhld")
    return Layout(shape, plain.strides, 1, plain.span + 1)


def _packed_alone(shape: Shape) -> Layout:
    """The middle third of a storage (B, L, 3H, D)."""
    return stored(shape, "blhd", heads=3 * shape[1], head=shape[1])


LAYOUT_RULES: dict[str, Callable[[Shape], Layout]] = {
    "contiguous": lambda shape: stored(shape, "bhld"),
    "blhd": lambda shape: stored(shape, "blhd"),
    "packed": _packed_alone,
    "chunk": lambda shape: stored(shape, "bhld", heads=2 * shape[1], head=shape[1]),
    "expand": _expand,
    "offset": _offset,
    "strided": lambda shape: stored(shape, "bhld", step=2),
    "size1": _size1,
    "transposed": lambda shape: stored(shape, "bhdl"),
}


@lru_cache(maxsize=4096)
def layout(name: str, shape: Shape) -> Layout:
    """The layout of that name for a tensor that is alone in its storage."""
    return LAYOUT_RULES[name](shape)


def packed(shapes: Sequence[Shape]) -> list[Layout]:
    """Slices along the heads of one storage (B, L, all heads, D), for tensors that agree in everything but heads."""
    heads, at, out = sum(s[1] for s in shapes), 0, []
    for shape in shapes:
        out.append(stored(shape, "blhd", heads=heads, head=at))
        at += shape[1]
    return out


def _margin(layouts: Sequence[Layout]) -> int:
    """Elements before and after: 64 rows, within 256..8192, a multiple of 128 so that alignment is what torch gives."""
    row = max(max((s for s, n in zip(x.strides, x.shape, strict=True) if n > 1), default=1) for x in layouts)
    return min(max(64 * row, 256), 8192) // 128 * 128


@dataclass
class Guarded:
    """A flat storage with the tensors in it, its pristine copy, and what lies where."""

    names: tuple[str, ...]
    layouts: tuple[Layout, ...]
    margin: int
    storage: Tensor  # flat, integers of the dtype's width
    dtype: torch.dtype
    pristine: Tensor = field(init=False)

    @classmethod
    def hold(
        cls,
        names: Sequence[str],
        layouts: Sequence[Layout],
        values: Sequence[Tensor],
        dtype: torch.dtype,
        device: str,
        guards: bool,
    ) -> Guarded:
        """Tensors of `dtype` with the given values (any dtype, broadcast to the shapes) in one poisoned storage."""
        integer, poison = PATTERNS[dtype]
        margin = _margin(layouts) if guards else 0
        storage = torch.full((2 * margin + max(x.span for x in layouts),), poison, dtype=integer)
        block = cls(tuple(names), tuple(layouts), margin, storage, dtype)
        for layout, value in zip(layouts, values, strict=True):
            unexpanded(layout.of(storage.view(dtype), margin)).copy_(value)
        block.storage = storage if device == "cpu" else storage.to(device)
        block.pristine = block.storage.clone()
        return block

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name, a view on the storage."""
        return self.layouts[self.names.index(name)].of(self.storage.view(self.dtype), self.margin)

    @property
    def nbytes(self) -> int:
        return 2 * self.storage.numel() * self.storage.element_size()

    def damage(self, most: int = 16) -> list[Damage]:
        """(tensor, logical index, what) for the first bytes that are no longer what they were."""
        if torch.equal(self.storage, self.pristine):
            return []
        places = (self.storage != self.pristine).nonzero().flatten()[:most].tolist()
        return [self._describe(place) for place in places]

    def _describe(self, place: int) -> Damage:
        flat = torch.arange(self.storage.numel())
        for name, layout in zip(self.names, self.layouts, strict=True):
            hits = (layout.of(flat, self.margin) == place).nonzero()
            if len(hits):
                return name, tuple(hits[0].tolist()), "input changed"
        name = "+".join(self.names)
        before, after = self.margin - place, place - (self.storage.numel() - self.margin) + 1
        if before > 0:
            return name, (), f"guard overwritten, {before} elements before the start"
        if after > 0:
            return name, (), f"guard overwritten, {after} elements past the end"
        return name, (), f"guard overwritten, in the gap at element {place - self.margin}"


def unexpanded(view: Tensor) -> Tensor:
    """The part of a view that its memory holds once: axes of stride 0 cut to their first index."""
    return view[tuple(slice(0, 1) if s == 0 else slice(None) for s in view.stride())]
