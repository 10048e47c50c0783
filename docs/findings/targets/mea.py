"""FlashAttentionFunction of memory-efficient-attention-pytorch."""

import os
import sys

import torch

sys.path.insert(0, os.path.dirname(__file__))
from common import refuse


def attention(q, k, v, causal=False, attn_mask=None):
    """(B, L, H, D) -> FlashAttentionFunction of memory-efficient-attention-pytorch with small buckets."""
    from memory_efficient_attention_pytorch.flash_attention import FlashAttentionFunction

    refuse(q.shape[2] != k.shape[2] or q.shape[-1] != v.shape[-1], "heads or Dv")
    refuse(0 in q.shape or 0 in k.shape, "empty")

    refuse(attn_mask is not None and attn_mask.dtype != torch.bool, "additive mask")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return FlashAttentionFunction.apply(q, k, v, attn_mask, causal, 4, 8).transpose(1, 2)
