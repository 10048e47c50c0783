"""Correct attentions in plain torch, one per dialect."""

import torch
from layers import attend, causal_mask, window_mask


def sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    keep, bias = None, 0.0
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        keep = attn_mask
    elif attn_mask is not None:
        bias = attn_mask
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
