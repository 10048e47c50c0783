"""Correct attentions in plain torch, one per dialect."""

from itertools import pairwise

import torch
from layers import attend, causal_mask, window_mask


def sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    keep, bias = None, 0.0
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        keep = attn_mask
    elif attn_mask is not None:
        keep, bias = attn_mask != -torch.inf, attn_mask.masked_fill(attn_mask == -torch.inf, 0.0)
    if is_causal:
        keep = causal_mask(query.shape[-2], key.shape[-2], bottom_right=False)
    return attend(query, key, value, keep=keep, bias=bias, scale=scale, dropout=dropout_p)[0]


def flash(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, return_lse=False
):
    Lq, Lk = q.shape[1], k.shape[1]
    keep = window_mask(Lq, Lk, *window_size)
    if causal:
        keep = keep & causal_mask(Lq, Lk, bottom_right=True)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o, lse = attend(q, k, v, keep=keep, scale=softmax_scale, softcap=softcap, dropout=dropout_p)
    return (o.transpose(1, 2), lse) if return_lse else o.transpose(1, 2)


def native(q, k, v, *, mask=None, bias=None, scale=None, softcap=0.0, return_lse=False):
    B, H, Lq, _ = q.shape
    keep = None if mask is None else mask.dense(B, H, Lq, k.shape[2])
    o, lse = attend(q, k, v, keep=keep, bias=0.0 if bias is None else bias, scale=scale, softcap=softcap)
    return (o, lse) if return_lse else o


def varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, return_lse=False,
):  # fmt: skip
    rows, lses = [], []
    for (a, b), (c, d) in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True):
        keep = window_mask(b - a, d - c, *window_size)
        if causal:
            keep = keep & causal_mask(b - a, d - c, bottom_right=True)
        own = (x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d]))
        o, lse = attend(*own, keep=keep, scale=softmax_scale, softcap=softcap, dropout=dropout_p)
        rows.append(o[0].transpose(0, 1))
        lses.append(lse[0])
    o = torch.cat(rows) if rows else q.new_zeros(0, q.shape[1], v.shape[2])
    lse = torch.cat(lses, 1) if lses else torch.zeros(q.shape[1], 0)
    return (o, lse) if return_lse else o


def flex(query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False):
    at = [torch.arange(n).view([-1 if a == axis else 1 for a in range(4)])
          for axis, n in enumerate((*query.shape[:3], key.shape[2]))]  # fmt: skip
    keep = None if block_mask is None else block_mask.mask_mod(*at)
    change = None if score_mod is None else lambda s: score_mod(s, *at)
    o, lse = attend(query, key, value, keep=keep, change=change, scale=scale)
    return (o, lse) if return_lse else o
