"""Packed rows: tensors (total, H, D) with cu_seqlens, as flash_attn_varlen_func takes them, and back to (B, H, L, D).

A case of packed sequences is handed over as it is; any other as B sequences of equal length. Rows are views on the case's own
storages where those can be read as (total, H, D); a batch of several, and tensors that the case calls contiguous, are copied
into guarded storages of their own, in which the drawn layout is that of the packed tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import layouts
from .case import Case
from .layouts import Guarded, Layout, layout
from .masks import Mask, Packed
from .region import mask_kind
from .sequences import offsets
from .tensors import TORCH_DTYPES, Inputs, storages

CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_k")


def lengths(case: Case) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The lengths of the sequences in q and in k."""
    if mask_kind(case) == "packed" and isinstance(case.mask, Packed):
        return case.mask.lengths_q, case.mask.lengths_k
    return (case.Lq,) * case.B, (case.Lk,) * case.B


def inside(case: Case) -> tuple[tuple[Mask, ...], bool]:
    """The masks inside each sequence, all of which must hold, and whether q and k have equal lengths in each."""
    lengths_q, lengths_k = lengths(case)
    packed = mask_kind(case) == "packed" and isinstance(case.mask, Packed)
    return case.mask.inside if packed else (case.mask,), lengths_q == lengths_k  # type: ignore[attr-defined]


def arguments(inputs: Inputs) -> dict[str, Any]:
    """cu_seqlens_q, cu_seqlens_k (int32, guarded like every input), max_seqlen_q and max_seqlen_k."""
    if CU_SEQLENS[0] not in inputs.held:
        for name, sizes in zip(CU_SEQLENS, lengths(inputs.case), strict=True):
            ends = offsets(sizes, "cpu")
            where = Layout((len(ends),), (1,), 0, len(ends))
            block = Guarded.hold((name,), (where,), (ends,), torch.int32, inputs.device, inputs.guards)
            inputs.blocks.append(block)
            inputs.held[name] = block.tensor(name)
        inputs.held |= rows(inputs)
    most = [max(sizes, default=0) for sizes in lengths(inputs.case)]
    return {n: inputs.held[n] for n in CU_SEQLENS} | dict(zip(("max_seqlen_q", "max_seqlen_k"), most, strict=True))


def rows(inputs: Inputs) -> dict[str, Tensor]:
    """q, k, v and do as (total, H, D), by the name they are held under."""
    out: dict[str, Tensor] = {}
    for names in storages(inputs.case):
        views = {n: getattr(inputs, n) for n in names}
        if any(_copied(inputs.case, n, x) for n, x in views.items()):
            views = _hold(inputs, names)
        out |= {f"rows {n}": x[0].transpose(0, 1) for n, x in views.items()}
    return out


def _copied(case: Case, name: str, x: Tensor) -> bool:
    """Whether rows of a tensor cannot be a view that means what its layout says."""
    if case.B != 1:
        return True
    return getattr(case, f"layout_{name}") == "contiguous" and not x[0].transpose(0, 1).is_contiguous()


def _hold(inputs: Inputs, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Tensors (1, H, total, D) in one new storage; "contiguous" is said of (total, H, D)."""
    values = [getattr(inputs, n).transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for n in names]
    shapes = [tuple(x.shape) for x in values]
    drawn = getattr(inputs.case, f"layout_{names[0]}")
    rule = "blhd" if drawn == "contiguous" else drawn
    where = layouts.packed(shapes) if names[1:] else [layout(rule, shapes[0])]
    if rule == "expand":
        values = [x[:, :1] for x in values]
    block = Guarded.hold(names, where, values, TORCH_DTYPES[inputs.case.dtype], inputs.device, inputs.guards)
    inputs.blocks.append(block)
    return {n: block.tensor(n) for n in names}


class Rows:
    """How tensors of the varlen dialect and logical (B, H, L, D) ones become each other."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def given(self, inputs: Inputs, name: str) -> Tensor:
        """q, k, v or do as the target sees it."""
        arguments(inputs)
        rows: Tensor = inputs.held[f"rows {name}"]
        return rows

    def back(self, x: Tensor, name: str) -> Tensor:
        """(total, H, D) -> (B, H, L, D) of the tensor called o, q, k or v."""
        length = self.case.Lk if name in ("k", "v") else self.case.Lq
        return x.unflatten(0, (self.case.B, length)).transpose(1, 2)

    def lse_shape(self) -> tuple[int, ...]:
        """(Hq, total)."""
        return self.case.Hq, self.case.B * self.case.Lq

    def lse(self, x: Tensor) -> Tensor:
        """(Hq, total) -> (B, Hq, Lq)."""
        return x.unflatten(1, (self.case.B, self.case.Lq)).transpose(0, 1)

    def dlse(self, x: Tensor) -> Tensor:
        """(B, Hq, Lq) -> (Hq, total)."""
        return x.transpose(0, 1).flatten(1)


class Heads:
    """The same of the dialects that take (B, H, L, D), or (B, L, H, D) where heads lie inside."""

    def __init__(self, case: Case, inside: bool) -> None:
        self.case, self.inside = case, inside

    def given(self, inputs: Inputs, name: str) -> Tensor:
        """q, k, v or do as the target sees it."""
        return self.back(getattr(inputs, name), name)

    def back(self, x: Tensor, name: str) -> Tensor:  # noqa: ARG002 (as Rows)
        """The target's tensor with heads and length swapped where heads lie inside; its own inverse."""
        return x.transpose(1, 2) if self.inside else x

    def lse_shape(self) -> tuple[int, ...]:
        """(B, Hq, Lq)."""
        return self.case.B, self.case.Hq, self.case.Lq

    def lse(self, x: Tensor) -> Tensor:
        """As it is."""
        return x

    dlse = lse
