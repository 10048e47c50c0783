"""What FlexAttention takes: a mask as its block mask, and softcap and bias as its score function."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .masks import Grid, Mask

Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def predicate(mask: Mask, Lq: int, Lk: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The mask as a function of index tensors (b, h, i, j): single ones, as FlexAttention maps over them, or broadcast ones."""

    def keep(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        allowed = mask.keep(Grid(b, h, i, j, Lq, Lk))
        if not (b.dim() or h.dim() or i.dim() or j.dim()):
            return allowed.reshape(())
        return allowed.expand(torch.broadcast_tensors(b, h, i, j)[0].shape)

    return keep


def block_mask(mask: Mask, B: int, H: int, Lq: int, Lk: int, device: str) -> Any:
    """The mask as a torch BlockMask: the same predicate, evaluated by index."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(predicate(mask, Lq, Lk), B, H, Lq, Lk, device=device)


def score_mod(bias: Tensor | None, softcap: float) -> Score | None:
    """softcap, then the bias read by index, 0 on its broadcast axes; None where neither is asked for."""
    if bias is None and not softcap:
        return None

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        if bias is not None:
            at = (x if n > 1 else torch.zeros_like(x) for x, n in zip((b, h, i, j), bias.shape, strict=True))
            s = s + bias[tuple(at)]
        return s

    return score


def aux_request(dialect: str) -> Any:
    """What torch's flex_attention or varlen_attn is given as return_aux to return lse beside the output."""
    module = "flex_attention" if dialect == "flex" else "varlen"
    return importlib.import_module(f"torch.nn.attention.{module}").AuxRequest(lse=True)
