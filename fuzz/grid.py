"""The index tensors that masks are predicates of, and where an index lies among packed sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Align = Literal["top_left", "bottom_right"]
ALIGNMENTS: tuple[Align, ...] = ("top_left", "bottom_right")


@dataclass(frozen=True)
class Grid:
    """Index tensors b (B,1,1,1), h (1,H,1,1), i (1,1,Lq,1), j (1,1,1,Lk) and the two lengths.

    A tensor as length holds that of each query's or key's own sequence.
    """

    b: Tensor
    h: Tensor
    i: Tensor
    j: Tensor
    Lq: int | Tensor
    Lk: int | Tensor

    @classmethod
    def of(cls, B: int, H: int, Lq: int, Lk: int, device: torch.device | str = "cpu") -> Grid:
        def axis(n: int, dim: int) -> Tensor:
            shape = [1, 1, 1, 1]
            shape[dim] = n
            return torch.arange(n, device=device).view(shape)

        return cls(axis(B, 0), axis(H, 1), axis(Lq, 2), axis(Lk, 3), Lq, Lk)

    def diagonal(self, align: Align) -> int | Tensor:
        """The key index that query 0 is aligned with; one for each pair where the lengths are those of its sequences."""
        return self.Lk - self.Lq if align == "bottom_right" else 0


def place(index: Tensor, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """(sequence, index inside it, its length) of an index into sequences that lie end to end."""
    sizes = torch.tensor(lengths, device=index.device)
    ends = sizes.cumsum(0)
    sequence = torch.bucketize(index, ends, right=True)
    at = sequence.clamp(max=len(lengths) - 1)
    return sequence, index - (ends - sizes)[at], sizes[at]
