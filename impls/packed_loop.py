"""Attention over packed sequences, one after another: cu_seqlens, causal or a window inside each, aligned bottom-right."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..fuzz.region import Region
from . import register

REGION = Region(
    masks=("none", "causal_bottom_right", "window", "packed"), bias=False, bias_grad=False,
    dropout=False, alibi=False, sinks=False, sinks_grad=False,
)  # fmt: skip


@register(dialect="flash_attn_varlen", supports=REGION, contract="ieee,masked_nonfinite=may_leak")
def packed_loop(  # noqa: PLR0913, PLR0917 - the dialect
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,  # noqa: ARG001 - part of the dialect
    max_seqlen_k: int,  # noqa: ARG001
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v inside each sequence, scores materialised in float32; differentiable.

    q (total_q, Hq, D), k (total_k, Hkv, D), v (total_k, Hkv, Dv), cu_seqlens (sequences + 1,) int32 -> o (total_q, Hq, Dv) and,
    asked for, lse (Hq, total_q). Query i of a sequence stands at key i + Lk - Lq. Rows with no allowed key give 0 and lse -inf.
    """
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    window = (window_size[0], 0 if causal else window_size[1])
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    o, lse = [], []
    for b in range(len(starts_q) - 1):
        rows, keys = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        ob, lb = _sequence(q[rows], k[keys], v[keys], scale, window, softcap)
        o.append(ob)
        lse.append(lb)
    whole = torch.cat(o) if o else q.new_empty(0, q.shape[1], v.shape[2])
    if not return_lse:
        return whole
    return whole, torch.cat(lse, 1) if lse else q.new_empty(q.shape[1], 0, dtype=torch.float32)


def _sequence(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: tuple[int, int], softcap: float
) -> tuple[Tensor, Tensor]:
    """(o, lse) of one sequence: q (Lq, Hq, D), k (Lk, Hkv, D), v (Lk, Hkv, Dv) -> (Lq, Hq, Dv), (Hq, Lq)."""
    group = q.shape[1] // k.shape[1]
    wq = q.float().transpose(0, 1)
    wk, wv = (x.float().transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
    s = wq @ wk.mT * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    s = s.masked_fill(~_keep(q.shape[0], k.shape[0], window, q.device), -math.inf)
    dead = (s == -math.inf).all(-1, keepdim=True)
    s = s.masked_fill(dead, 0.0)
    p = torch.softmax(s, -1).masked_fill(dead, 0.0)
    o = (p @ wv).to(q.dtype).transpose(0, 1)
    return o, torch.logsumexp(s, -1).masked_fill(dead.squeeze(-1), -math.inf)


def _keep(Lq: int, Lk: int, window: tuple[int, int], device: torch.device) -> Tensor:
    """(Lq, Lk), whether a query may see a key: at most window[0] keys before its place and window[1] after; -1 for no bound."""
    distance = torch.arange(Lk, device=device) - torch.arange(Lq, device=device)[:, None] - (Lk - Lq)
    left, right = window
    keep = torch.ones_like(distance, dtype=torch.bool)
    keep = keep if left < 0 else keep & (distance >= -left)
    return keep if right < 0 else keep & (distance <= right)
