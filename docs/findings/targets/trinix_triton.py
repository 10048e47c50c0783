"""triton_attn_func of trinix."""

import os
import sys

sys.path.insert(0, os.path.dirname(__file__))
from common import pretend_cuda, refuse


def attention(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """(B, L, H, D); forward only."""
    refuse(q.shape != k.shape or k.shape != v.shape, "shapes must agree")
    refuse(0 in q.shape, "empty")
    refuse(min(window_size) < 0 and window_size != (-1, -1), "one-sided window")
    with pretend_cuda():
        from trinix.layers.attention.functional import triton_attn_func

        return triton_attn_func(
            q,
            k,
            v,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=None if window_size == (-1, -1) else window_size,
        )
