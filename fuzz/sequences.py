"""Sequences side by side: which lengths a case means in a packed layout, and its tensors as (total, H, D) and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from .case import Case
from .masks import Document, Mask, Padding, Window


@dataclass(frozen=True)
class Sequences:
    """Lengths of the packed sequences, and the mask inside each: causal, a window, or everything.

    `keys` are the rows of k and v, of all B * Lk, that are packed; None: all of them.
    """

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    causal: bool = False
    window: Window | None = None
    keys: Tensor | None = None


def sequences(case: Case, causal: bool | None, window: Window | None, align: str) -> Sequences | None:
    """The sequences of a case; None where packing, with a diagonal aligned as the target aligns it, cannot say its mask.

    `causal` and `window` are what the mask says in keywords (dialects.diagonals); causal None: it says something else. Padding
    means keys that are left out of their sequence, Document means that each document of a batch is a sequence.
    """
    if causal is not None:
        return Sequences((case.Lq,) * case.B, (case.Lk,) * case.B, causal, window)
    mask: Mask = case.mask
    if mask.kind == "packed":
        return _packed(case, mask, align)
    if isinstance(mask, Padding):
        lengths = _padding(case, mask)
        rows = [b * case.Lk + j for b, n in enumerate(lengths) for j in range(n)]
        return Sequences((case.Lq,) * case.B, lengths, keys=torch.tensor(rows, dtype=torch.int64))
    if isinstance(mask, Document):
        return Sequences(documents(mask.lengths, case.Lq) * case.B, documents(mask.lengths, case.Lk) * case.B)
    return None


def _packed(case: Case, mask: Any, align: str) -> Sequences | None:
    """A mask that names its sequences and what holds inside each of them."""
    own = "top_left" if mask.causal == "top_left" else "bottom_right"
    inside, bounded = bool(mask.causal), (mask.left, mask.right) != (-1, -1)
    if (inside or bounded) and own != align and mask.lengths_q != mask.lengths_k:
        return None
    window = Window(mask.left, mask.right) if bounded else None
    return Sequences(mask.lengths_q * case.B, mask.lengths_k * case.B, inside, window)


def _padding(case: Case, mask: Padding) -> tuple[int, ...]:
    """Keys that each batch may attend: they are the first ones, whatever the mask's own fields say."""
    keep = mask.dense(case.B, 1, 1, case.Lk).expand(case.B, 1, 1, case.Lk)
    return tuple(int(n) for n in keep.sum((1, 2, 3)))


def documents(lengths: Sequence[int], total: int) -> tuple[int, ...]:
    """Lengths of the documents within `total` elements; what follows the last one is a document too."""
    ends = [0]
    for n in lengths:
        ends.append(min(ends[-1] + n, total))
    return tuple(b - a for a, b in pairwise([*ends, total]))


def offsets(lengths: Sequence[int], device: str) -> Tensor:
    """int32 (len + 1,): where each sequence begins, and the end of the last."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32).to(device)


def pack(x: Tensor, rows: Tensor | None = None) -> Tensor:
    """(B, H, L, D) or (B, H, L) -> (total, H, D) or (total, H): the sequences one after another, of which only `rows`."""
    flat = x.transpose(1, 2).flatten(0, 1)
    return flat if rows is None else flat[rows.to(x.device)]


def unpack(x: Tensor, B: int, L: int, rows: Tensor | None = None) -> Tensor:
    """The inverse of `pack`: (B, H, L, D) or (B, H, L), zero in the rows that were left out."""
    if rows is not None:
        x = x.new_zeros((B * L, *x.shape[1:])).index_copy(0, rows.to(x.device), x)
    return cast(Tensor, x.unflatten(0, (B, L)).transpose(1, 2)) if B * L else _nothing(x, B, L)


def _nothing(x: Tensor, B: int, L: int) -> Tensor:
    heads, *rest = x.shape[1:]
    return x.reshape(B, heads, L, *rest)
