"""Attention by its definition: scores, softmax and weighted sum as whole matrices, differentiated by autograd."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..fuzz.masks import Full, Mask
from ..fuzz.region import Region
from ..fuzz.tensors import dropout_keep
from . import register

REGION = Region(dtypes=("float32", "float16", "bfloat16", "float64"), max_head_dim=1 << 30)


@register(dialect="native", supports=REGION, contract="ieee")
def textbook(  # noqa: PLR0913 (the keywords of the native dialect)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout: float = 0.0,
    dropout_seed: int = 0,
    return_lse: bool = False,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v with the scores materialised in float32; differentiable.

    q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv) -> o (B, Hq, Lq, Dv) and, asked for, lse (B, Hq, Lq).
    Scores are softcap * tanh(scale q.k / softcap), plus bias, minus slope * distance for alibi (Hq,) or (B, Hq), then masked.
    sinks (Hq,) are logits of one key more in each row, of value zero, that lse counts. Rows with no allowed key give 0 and
    lse -inf; a key that no query of its head may see is replaced by zeros, so that what it holds cannot reach a result.
    """
    B, Hq, Lq, D = q.shape
    Lk = k.shape[2]
    keep = None if mask is None or mask == Full() else mask.dense(B, Hq, Lq, Lk, q.device)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    wq, wk, wv = q.to(wide), k.to(wide), v.to(wide)
    if keep is not None:
        seen = _seen_keys(keep, k)
        wk, wv = wk.where(seen, 0.0), wv.where(seen, 0.0)
    s = _grouped(wq, k.shape[1]) @ wk.transpose(-1, -2) * (D**-0.5 if scale is None else scale)
    s = s.view(B, Hq, Lq, Lk)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s if bias is None else s + bias.to(wide)
    s = s if alibi is None else s - torch.atleast_2d(alibi).to(wide)[..., None, None] * _distances(Lq, Lk, q.device)
    s = s if keep is None else s.masked_fill(~keep, -math.inf)
    s = s if sinks is None else torch.cat([s, sinks.to(wide).view(1, -1, 1, 1).expand(B, Hq, Lq, 1)], -1)
    dead = (s == -math.inf).all(-1, keepdim=True)
    s = s.masked_fill(dead, 0.0)  # autograd through a row of -inf is nan
    p = torch.softmax(s, -1).masked_fill(dead, 0.0)[..., :Lk]
    if dropout:
        p = p * dropout_keep(dropout_seed, B, Hq, Lq, Lk, dropout, q.device) / (1 - dropout)
    o = (_grouped(p, k.shape[1]) @ wv).view(B, Hq, Lq, v.shape[3]).to(q.dtype)
    if not return_lse:
        return o
    return o, torch.logsumexp(s, -1).masked_fill(dead.squeeze(-1), -math.inf)


def _distances(Lq: int, Lk: int, device: torch.device) -> Tensor:
    """(Lq, Lk): how far each key is from the query's own place, the last query at the last key."""
    return (torch.arange(Lq, device=device)[:, None] + (Lk - Lq) - torch.arange(Lk, device=device)).abs()


def _grouped(x: Tensor, Hkv: int) -> Tensor:
    """(B, Hq, L, n) as (B, Hkv, G L, n): the rows of one key head's query heads lie under one another."""
    B, Hq, L, n = x.shape
    return x.reshape(B, Hkv, Hq // Hkv * L, n)


def _seen_keys(keep: Tensor, k: Tensor) -> Tensor:
    """(B | 1, Hkv | 1, Lk, 1): some query of the key's head may see it."""
    per_head = keep.any(2).expand(-1, -1, k.shape[2])
    if per_head.shape[1] > 1:
        per_head = per_head.unflatten(1, (k.shape[1], -1)).any(2)
    return per_head.unsqueeze(-1)
