"""Which mask of a case a dense tensor is, and which layout strides are: found by candidates that are compared in every element."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .layouts import layout
from .masks import ALIGNMENTS, BlockSparse, Causal, Document, Full, Mask, Not, Padding, Prefix, Random, Window

Sizes = tuple[int, int, int, int]
TILES = (128, 64, 32, 16)
MOST_DOCUMENTS = 4096


def mask_of(keep: Tensor, sizes: Sizes) -> Mask | None:
    """The mask whose dense form is `keep`, bool, 4-D, broadcastable to (B, H, Lq, Lk); None if no kind says it exactly."""
    keep = compact(keep.cpu())
    if bool(keep.all()):
        return Full()
    if keep.shape[1] > 1:
        return None
    padding = _padding(keep.any(2)[:, 0].expand(-1, sizes[3]))
    if keep.shape[2] == 1:
        return padding if _same(padding, keep, sizes) else None
    fullest = keep[:, 0].flatten(1).sum(1).argmax()
    plane = keep[fullest, 0].expand(-1, sizes[3])
    for rows in _of_rows(plane, sizes):
        for mask in (rows, rows & padding):
            if _same(mask, keep, sizes):
                return mask
    return None


def compact(x: Tensor) -> Tensor:
    """The tensor with size 1 on every axis along which it does not change."""
    for axis, size in enumerate(x.shape):
        if size > 1 and bool((x == x.narrow(axis, 0, 1)).all()):
            x = x.narrow(axis, 0, 1)
    return x


def nearest(keep: Tensor) -> Mask:
    """A mask by hash with the same density and axes: in whole tiles where `keep` is made of tiles."""
    keep = compact(keep.cpu())
    percent = min(max(round(100 * keep.float().mean().item()), 0), 100) if keep.numel() else 100
    axes = "".join(a for a, n in zip("bhqk", keep.shape, strict=True) if n > 1)
    for tile in TILES:
        if "q" in axes and "k" in axes and min(keep.shape[2:]) > tile and _tiled(keep, tile):
            return BlockSparse(tile, tile, percent, axes=axes)
    return Random(percent, axes=axes or "k")


def _tiled(keep: Tensor, tile: int) -> bool:
    """Whether every tile is all true or all false."""
    q, k = (torch.arange(n) // tile * tile for n in keep.shape[2:])
    return bool((keep == keep[:, :, q][..., k]).all())


def _same(mask: Mask, keep: Tensor, sizes: Sizes) -> bool:
    return bool((mask.dense(*sizes) == keep).all())


def _padding(columns: Tensor) -> Mask:
    """Keys at the end, at the start or on both sides of each batch are left out; columns bool (B or 1, Lk)."""
    counts = columns.sum(1)
    first = columns.int().argmax(1)
    ends = torch.where(counts > 0, first + counts, 0)
    starts = torch.where(counts > 0, first, 0)
    left, right = bool((starts > 0).any()), bool((ends < columns.shape[1]).any())
    after = Padding(tuple(ends.tolist())) if right else Full()
    return after & Not(Padding(tuple(starts.tolist()))) if left else after


def _of_rows(plane: Tensor, sizes: Sizes) -> Iterator[Mask]:
    """Masks over (query, key) that the rows of one plane (Lq, Lk) suggest, the simplest first."""
    Lq, Lk = sizes[2:]
    for align in ALIGNMENTS:
        yield Causal(align)
    live = plane.any(1)
    low, high = plane.int().argmax(1), Lk - 1 - plane.flip(1).int().argmax(1)
    yield from _windows(low, high, live, Lq, Lk)
    leading = int(plane[0].int().cumprod(0).sum())
    for align in ALIGNMENTS:
        yield Prefix(leading, align)
    yield from _documents(low, live)


def _windows(low: Tensor, high: Tensor, live: Tensor, Lq: int, Lk: int) -> Iterator[Mask]:
    """Windows as wide as the rows that neither edge of the plane cuts, for both alignments."""
    if not bool(live.any()):
        return
    i = torch.arange(Lq)
    least, most = low[live].min(), high[live].max()
    for align in ALIGNMENTS:
        at = i + (Lk - Lq if align == "bottom_right" else 0)
        left = (at - low)[live & (low > least)]
        right = (high - at)[live & (high < most)]
        before, after = (int(x.max()) if x.numel() else -1 for x in (left, right))
        if min(before, after) >= -1 and (before, after) != (-1, -1):
            yield Window(before, after, align)


def _documents(low: Tensor, live: Tensor) -> Iterator[Mask]:
    """Documents that begin where the first key of a row changes; the same, causal."""
    if not bool(live.all()):
        return
    lengths = tuple(torch.unique_consecutive(low, return_counts=True)[1].tolist())
    if 1 < len(lengths) <= MOST_DOCUMENTS:
        for some in (lengths, lengths[:-1]):  # the second where keys go on after the last query
            yield Document(some)
            yield Document(some) & Causal()


def layout_of(
    shape: Sizes, strides: Sequence[int], *, misaligned: bool = False, shared: bool = False
) -> tuple[str, bool]:
    """(the layout's name, whether its strides are these) of a (B, H, L, D) tensor.

    `misaligned`: its first element does not lie on 16 bytes. `shared`: another of q, k and v lies in the same storage.
    """
    if 0 in shape:
        return "contiguous", True
    strides = tuple(strides)
    if any(s == 0 and n > 1 for s, n in zip(strides, shape, strict=True)):
        return "expand", _on_real_axes(shape, strides, "expand")
    for name in ("contiguous", "blhd", "transposed", "chunk", "strided"):
        if strides == layout(name, shape).strides:
            return ("offset" if name == "contiguous" and misaligned else name), True
    if shared and _slice_of_rows(shape, strides):
        return "packed", True
    for name in ("contiguous", "blhd", "transposed", "chunk", "strided", "packed"):
        if _on_real_axes(shape, strides, name):
            return ("size1" if name == "contiguous" else name), name != "contiguous"
    return _nearest_layout(shape, strides), False


def _on_real_axes(shape: Sizes, strides: Sequence[int], name: str) -> bool:
    """Whether the strides are those of the layout wherever there is more than one element."""
    return all(n <= 1 or s == w for n, s, w in zip(shape, strides, layout(name, shape).strides, strict=True))


def _slice_of_rows(shape: Sizes, strides: Sequence[int]) -> bool:
    """Heads lie side by side in rows that hold more than them."""
    B, H, L, D = shape
    rows = strides[3] == 1 and (H == 1 or strides[1] == D) and strides[2] > H * D
    return rows and (B == 1 or strides[0] == L * strides[2])


def _nearest_layout(shape: Sizes, strides: Sequence[int]) -> str:
    """The layout with the same innermost axis and the same order of heads and rows."""
    if shape[3] > 1 and strides[3] != 1:
        return "transposed" if strides[2] == 1 else "strided"
    return "packed" if shape[1] > 1 and shape[2] > 1 and strides[1] < strides[2] else "chunk"
