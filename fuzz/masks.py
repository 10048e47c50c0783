"""Masks as data: a frozen tree of predicates (b, h, i, j) -> bool; True means query i may attend key j.

A mask never holds a tensor. Its dense form is computed from the sizes, so a smaller case keeps the same mask.
Alignment says where the diagonal of a non-square score matrix lies: `top_left` puts it at j = i,
`bottom_right` at j = i + Lk - Lq.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from .grid import ALIGNMENTS, Align, Grid, place
from .hashing import uniform_bits

__all__ = [
    "ALIGNMENTS", "KINDS", "MAX_DEPTH", "Align", "And", "BlockSparse", "Causal", "Document", "Full", "Grid", "Mask", "Not",
    "Or", "Packed", "Padding", "Prefix", "Random", "Strided", "Window", "mask_from_json",
]  # fmt: skip


class Mask:
    """A predicate. Subclasses are final, frozen, listed in KINDS; `axes` names the indices it depends on."""

    kind: ClassVar[str]

    @property
    def axes(self) -> str:
        """The indices, of b, h, q and k, that the mask depends on."""
        raise NotImplementedError

    def keep(self, at: Grid) -> Tensor:
        """True where attention is allowed; broadcastable to (B, H, Lq, Lk)."""
        raise NotImplementedError

    def __and__(self, other: Mask) -> Mask:
        return other if isinstance(self, Full) else self if isinstance(other, Full) else And(self, other)

    def __or__(self, other: Mask) -> Mask:
        return Or(self, other)

    def __invert__(self) -> Mask:
        return Not(self)

    def dense(self, B: int, H: int, Lq: int, Lk: int, device: torch.device | str = "cpu") -> Tensor:
        """Boolean tensor with size 1 on every axis the mask does not depend on."""
        b, h, q, k = (n if axis in self.axes else 1 for axis, n in zip("bhqk", (B, H, Lq, Lk), strict=True))
        at = replace(Grid.of(b, h, q, k, device), Lq=Lq, Lk=Lk)
        keep: Tensor = self.keep(at).expand(b, h, q, k)
        return keep.contiguous()

    def blocks(self, B: int, H: int, Lq: int, Lk: int, block_q: int, block_k: int) -> tuple[Tensor, Tensor]:
        """(any, all) per tile, (B|1, H|1, ceil(Lq/block_q), ceil(Lk/block_k)): tile has a live pair; is all live."""
        keep = self.dense(B, H, Lq, Lk).expand(-1, -1, Lq, Lk)
        pad = (0, -Lk % block_k, 0, -Lq % block_q)

        def tiles(x: Tensor, fill: bool) -> Tensor:
            y: Tensor = torch.nn.functional.pad(x, pad, value=fill)
            return y.unflatten(3, (-1, block_k)).unflatten(2, (-1, block_q)).transpose(3, 4)

        return tiles(keep, False).any(-1).any(-1), tiles(keep, True).all(-1).all(-1)

    def walk(self) -> Iterator[Mask]:
        """This mask and every mask inside it."""
        yield self
        for f in fields(self):  # type: ignore[arg-type]
            inner = getattr(self, f.name)
            if isinstance(inner, Mask):
                yield from inner.walk()

    def to_json(self) -> dict[str, Any]:
        """A JSON object with `kind` and the fields."""
        out: dict[str, Any] = {"kind": self.kind}
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            out[f.name] = (
                value.to_json() if isinstance(value, Mask) else list(value) if isinstance(value, tuple) else value
            )
        return out


def _check(name: str, value: object, ok: bool, rule: str) -> None:
    if not ok:
        raise ValueError(f"mask field {name} must {rule}, got {name}={value!r}")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_sides(mask: Window | Packed) -> None:
    for name, value in (("left", mask.left), ("right", mask.right)):
        _check(name, value, _whole(value) and value >= -1, "be an integer >= -1")


@dataclass(frozen=True)
class Full(Mask):
    """Every key is allowed."""

    kind: ClassVar[str] = "full"
    axes: ClassVar[str] = ""

    def keep(self, at: Grid) -> Tensor:
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=at.i.device)


@dataclass(frozen=True)
class Causal(Mask):
    """j <= i + diagonal."""

    align: Align = "top_left"
    kind: ClassVar[str] = "causal"
    axes: ClassVar[str] = "qk"

    def __post_init__(self) -> None:
        _check("align", self.align, self.align in ALIGNMENTS, f"be one of {', '.join(ALIGNMENTS)}")

    def keep(self, at: Grid) -> Tensor:
        return at.j <= at.i + at.diagonal(self.align)


@dataclass(frozen=True)
class Window(Mask):
    """i + diagonal - left <= j <= i + diagonal + right; -1 leaves that side open (the flash-attn convention)."""

    left: int = -1
    right: int = -1
    align: Align = "top_left"
    kind: ClassVar[str] = "window"
    axes: ClassVar[str] = "qk"

    def __post_init__(self) -> None:
        _check("align", self.align, self.align in ALIGNMENTS, f"be one of {', '.join(ALIGNMENTS)}")
        _check_sides(self)

    def keep(self, at: Grid) -> Tensor:
        distance = at.j - at.i - at.diagonal(self.align)
        keep = torch.ones_like(distance, dtype=torch.bool)
        if self.left >= 0:
            keep = keep & (distance >= -self.left)
        if self.right >= 0:
            keep = keep & (distance <= self.right)
        return keep


def _lengths(value: object) -> bool:
    return isinstance(value, tuple) and len(value) > 0 and all(_whole(n) and n >= 0 for n in value)


@dataclass(frozen=True)
class Padding(Mask):
    """j < lengths[b]; batches beyond the list start it again, so a smaller batch keeps its lengths."""

    lengths: tuple[int, ...] = (1,)
    kind: ClassVar[str] = "padding"
    axes: ClassVar[str] = "bk"

    def __post_init__(self) -> None:
        _check("lengths", self.lengths, _lengths(self.lengths), "be a non-empty list of integers >= 0")

    def keep(self, at: Grid) -> Tensor:
        lengths = torch.tensor(self.lengths, device=at.b.device)
        return at.j < lengths[at.b % len(self.lengths)]


@dataclass(frozen=True)
class Document(Mask):
    """Query and key lie in the same document; documents have the given lengths, the last one takes the rest."""

    lengths: tuple[int, ...] = (1,)
    kind: ClassVar[str] = "document"
    axes: ClassVar[str] = "qk"

    def __post_init__(self) -> None:
        _check("lengths", self.lengths, _lengths(self.lengths), "be a non-empty list of integers >= 0")

    def keep(self, at: Grid) -> Tensor:
        ends = torch.tensor(self.lengths, device=at.i.device).cumsum(0)
        return torch.bucketize(at.i, ends, right=True) == torch.bucketize(at.j, ends, right=True)


@dataclass(frozen=True)
class Packed(Mask):
    """Sequences packed end to end: query and key lie in the same one; lengths may be 0 and add up to Lq and Lk.

    `causal` and the window hold inside each sequence, aligned as `causal` says; a window alone is aligned bottom-right.
    """

    lengths_q: tuple[int, ...] = (1,)
    lengths_k: tuple[int, ...] = (1,)
    causal: str = ""
    left: int = -1
    right: int = -1
    kind: ClassVar[str] = "packed"
    axes: ClassVar[str] = "qk"

    def __post_init__(self) -> None:
        for name in ("lengths_q", "lengths_k"):
            value = getattr(self, name)
            _check(name, value, _lengths(value), "be a non-empty list of integers >= 0")
        counts = len(self.lengths_q), len(self.lengths_k)
        _check("lengths_k", self.lengths_k, counts[0] == counts[1], f"have as many entries as lengths_q ({counts[0]})")
        _check("causal", self.causal, self.causal in ("", *ALIGNMENTS), f"be '' or one of {', '.join(ALIGNMENTS)}")
        _check_sides(self)

    @property
    def inside(self) -> tuple[Mask, ...]:
        """The masks that hold inside each sequence."""
        align: Align = "top_left" if self.causal == "top_left" else "bottom_right"
        causal = (Causal(align),) if self.causal else ()
        return causal if self.left == self.right == -1 else (*causal, Window(self.left, self.right, align))

    def keep(self, at: Grid) -> Tensor:
        (sq, i, Lq), (sk, j, Lk) = place(at.i, self.lengths_q), place(at.j, self.lengths_k)
        keep, own = (sq == sk) & (sq < len(self.lengths_q)), Grid(at.b, at.h, i, j, Lq, Lk)
        for mask in self.inside:
            keep = keep & mask.keep(own)
        return keep


@dataclass(frozen=True)
class Prefix(Mask):
    """Causal, but the first `length` keys are open to every query (prefix-LM)."""

    length: int = 0
    align: Align = "top_left"
    kind: ClassVar[str] = "prefix"
    axes: ClassVar[str] = "qk"

    def __post_init__(self) -> None:
        _check("align", self.align, self.align in ALIGNMENTS, f"be one of {', '.join(ALIGNMENTS)}")
        _check("length", self.length, _whole(self.length) and self.length >= 0, "be an integer >= 0")

    def keep(self, at: Grid) -> Tensor:
        return (at.j < self.length) | (at.j <= at.i + at.diagonal(self.align))


@dataclass(frozen=True)
class Strided(Mask):
    """Keys within `stride` before the query and every stride-th earlier key (Child et al. 2019, strided, causal)."""

    stride: int = 2
    kind: ClassVar[str] = "strided"
    axes: ClassVar[str] = "qk"

    def __post_init__(self) -> None:
        _check("stride", self.stride, _whole(self.stride) and self.stride >= 1, "be an integer >= 1")

    def keep(self, at: Grid) -> Tensor:
        back = at.i - at.j
        return (back >= 0) & ((back < self.stride) | (back % self.stride == 0))


@dataclass(frozen=True)
class BlockSparse(Mask):
    """Tiles of block_q x block_k kept with probability percent/100, by hash of (seed, b, h, tile); axes adds b and h."""

    block_q: int = 16
    block_k: int = 16
    percent: int = 50
    seed: int = 0
    axes: str = "qk"
    kind: ClassVar[str] = "block_sparse"

    def __post_init__(self) -> None:
        for name in ("block_q", "block_k"):
            value = getattr(self, name)
            _check(name, value, _whole(value) and value >= 1, "be an integer >= 1")
        _check("percent", self.percent, _whole(self.percent) and 0 <= self.percent <= 100, "be an integer in 0..100")
        _check("seed", self.seed, _whole(self.seed) and self.seed >= 0, "be an integer >= 0")
        _check("axes", self.axes, self.axes in ("qk", "bqk", "hqk", "bhqk"), "be one of qk, bqk, hqk, bhqk")

    def keep(self, at: Grid) -> Tensor:
        return _coin(self.seed, "block_sparse", at, self.axes, self.percent, self.block_q, self.block_k)


@dataclass(frozen=True)
class Random(Mask):
    """Each pair kept with probability percent/100 and whole rows dead with dead_rows/100, by hash; depends on `axes`."""

    percent: int = 50
    dead_rows: int = 0
    seed: int = 0
    axes: str = "qk"
    kind: ClassVar[str] = "random"

    def __post_init__(self) -> None:
        for name in ("percent", "dead_rows"):
            value = getattr(self, name)
            _check(name, value, _whole(value) and 0 <= value <= 100, "be an integer in 0..100")
        _check("seed", self.seed, _whole(self.seed) and self.seed >= 0, "be an integer >= 0")
        ok = isinstance(self.axes, str) and self.axes != "" and _subset(self.axes)
        _check("axes", self.axes, ok, "be a non-empty subset of bhqk in that order")

    def keep(self, at: Grid) -> Tensor:
        keep = _coin(self.seed, "random", at, self.axes, self.percent)
        if self.dead_rows and "q" in self.axes:
            keep = keep & ~_coin(self.seed, "dead_rows", at, self.axes.replace("k", ""), self.dead_rows)
        return keep


def _subset(axes: str) -> bool:
    return axes == "".join(c for c in "bhqk" if c in axes)


def _coin(seed: int, stream: str, at: Grid, axes: str, percent: int, block_q: int = 1, block_k: int = 1) -> Tensor:
    """True with probability percent/100, a hash of the seed and of the indices named in `axes`."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=at.i.device)
    b, h = (at.b if "b" in axes else zero), (at.h if "h" in axes else zero)
    i = at.i // block_q if "q" in axes else zero
    j = at.j // block_k if "k" in axes else zero
    return uniform_bits(seed, stream, b, h, i, j) % 100 < percent


@dataclass(frozen=True)
class And(Mask):
    """Both masks allow the pair."""

    first: Mask
    second: Mask
    kind: ClassVar[str] = "and"

    @property
    def axes(self) -> str:
        return "".join(c for c in "bhqk" if c in self.first.axes + self.second.axes)

    def keep(self, at: Grid) -> Tensor:
        return self.first.keep(at) & self.second.keep(at)


@dataclass(frozen=True)
class Or(Mask):
    """Either mask allows the pair."""

    first: Mask
    second: Mask
    kind: ClassVar[str] = "or"

    @property
    def axes(self) -> str:
        return "".join(c for c in "bhqk" if c in self.first.axes + self.second.axes)

    def keep(self, at: Grid) -> Tensor:
        return self.first.keep(at) | self.second.keep(at)


@dataclass(frozen=True)
class Not(Mask):
    """The inner mask forbids the pair."""

    inner: Mask
    kind: ClassVar[str] = "not"

    @property
    def axes(self) -> str:
        return self.inner.axes

    def keep(self, at: Grid) -> Tensor:
        return ~self.inner.keep(at)


KINDS: dict[str, type[Mask]] = {
    c.kind: c for c in (Full, Causal, Window, Padding, Document, Prefix, Strided, BlockSparse, Random, Packed, And, Or, Not)
}  # fmt: skip
MAX_DEPTH = 16
"""Masks inside masks that a JSON object may have."""


def mask_from_json(data: object, depth: int = 0) -> Mask:
    """The mask a JSON object describes; ValueError names the field that is wrong."""
    if depth > MAX_DEPTH:
        raise ValueError(f"mask must be nested at most {MAX_DEPTH} deep")
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str) or data["kind"] not in KINDS:
        kind = data.get("kind") if isinstance(data, dict) else data
        raise ValueError(f"mask kind must be one of {', '.join(KINDS)}, got kind={kind!r}")
    cls = KINDS[data["kind"]]
    known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    extra = set(data) - known - {"kind"}
    if extra:
        raise ValueError(
            f"mask {cls.kind} must have only the fields {', '.join(sorted(known)) or '(none)'}, got {min(extra)!r}"
        )
    values = {
        name: mask_from_json(v, depth + 1)
        if name in ("first", "second", "inner")
        else tuple(v)
        if isinstance(v, list)
        else v
        for name, v in data.items()
        if name != "kind"
    }
    try:
        return cls(**values)
    except TypeError as e:
        raise ValueError(f"mask {cls.kind} must have the fields {', '.join(sorted(known))}: {e}") from None
