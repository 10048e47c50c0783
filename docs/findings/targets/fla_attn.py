"""parallel_attn of flash-linear-attention."""

import os
import sys

sys.path.insert(0, os.path.dirname(__file__))
from common import refuse


def attention(q, k, v, causal=False, softmax_scale=None, window_size=(-1, -1)):
    """parallel_attn of flash-linear-attention: (B, T, H, D), always causal."""
    refuse(not causal, "causal only")
    refuse(q.shape[1] != k.shape[1] or 0 in q.shape or 0 in k.shape or q.shape[-1] > 256, "lengths or D")
    left, right = window_size
    refuse(right > 0, "window ahead")
    refuse(q.is_cuda and max(q.shape[-1], v.shape[-1]) > 128, "too little shared memory: known")
    from fla.ops.attn import parallel_attn

    return parallel_attn(q, k, v, scale=softmax_scale, window_size=None if left < 0 else left + 1)
