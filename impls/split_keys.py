"""Attention with the keys in splits whose results are merged through their lse, as kernels for few queries and many keys do."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..fuzz.masks import Full, Mask
from ..fuzz.region import Region
from . import register

SPLIT = 16
"""Keys of a split."""
REGION = Region(dropout=False, alibi=False, sinks=False, sinks_grad=False, softcap=False)


@register(dialect="native", supports=REGION, contract=f"ieee,masked_nonfinite=may_leak,kv_tile={SPLIT}")
def split_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q k^T + bias) v from partial results over splits of the keys; differentiable.

    q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv) -> o (B, Hq, Lq, Dv) and, asked for, lse (B, Hq, Lq). Rows with no allowed
    key give 0 and lse -inf.
    """
    B, Hq, Lq, D = q.shape
    keep = None if mask is None or mask == Full() else mask.dense(B, Hq, Lq, k.shape[2], q.device)
    group = Hq // k.shape[1]
    wq, wk, wv = q.float(), *(x.float().repeat_interleave(group, 1) for x in (k, v))
    wq = wq * (D**-0.5 if scale is None else scale)
    parts = [
        _partial(wq, wk[:, :, j : j + SPLIT], wv[:, :, j : j + SPLIT], _part(bias, j), _part(keep, j))
        for j in range(0, k.shape[2], SPLIT)
    ]
    if not parts:
        parts = [_partial(wq, wk, wv, None, None)]
    o, lse = _merge(*(torch.stack(x) for x in zip(*parts, strict=True)))
    return (o.to(q.dtype), lse) if return_lse else o.to(q.dtype)


def _part(x: Tensor | None, j: int) -> Tensor | None:
    """The columns of a split of a tensor (B|1, Hq|1, Lq|1, Lk|1)."""
    return x if x is None or x.shape[3] == 1 else x[..., j : j + SPLIT]


def _partial(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """(o, lse) over one split: the output as if there were no other keys; 0 and -inf where it has none for a row."""
    s = q @ k.mT
    s = s if bias is None else s + bias.float()
    s = s if keep is None else s.masked_fill(~keep, -math.inf)
    empty = (s == -math.inf).all(-1, keepdim=True)
    s = s.masked_fill(empty, 0.0)
    p = torch.softmax(s, -1).masked_fill(empty, 0.0)
    return p @ v, torch.logsumexp(s, -1).masked_fill(empty.squeeze(-1), -math.inf)


def _merge(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """(o, lse) of all keys from those of the splits: o (splits, B, Hq, Lq, Dv), lse (splits, B, Hq, Lq)."""
    m = lse.amax(0)
    m = m.masked_fill(m == -math.inf, 0.0).detach()
    empty = lse == -math.inf
    weight = torch.exp(lse.masked_fill(empty, 0.0) - m).masked_fill(empty, 0.0)
    total = weight.sum(0)
    dead = total == 0
    total = total.masked_fill(dead, 1.0)
    merged = (weight.unsqueeze(-1) * o).sum(0) / total.unsqueeze(-1)
    return merged, (m + torch.log(total)).masked_fill(dead, -math.inf)
