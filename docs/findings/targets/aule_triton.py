"""flash_attention_triton of aule-attention."""

import os
import sys

sys.path.insert(0, os.path.dirname(__file__))
from common import refuse


def attention(q, k, v, causal=False, softmax_scale=None, window_size=(-1, -1)):
    """(B, L, H, D); aule's window is symmetric, or to the left when causal; alignment is top-left: square only."""
    from aule.triton_flash import flash_attention_triton

    refuse(q.shape[-1] != v.shape[-1], "Dv")
    refuse(0 in q.shape or 0 in k.shape, "empty")
    refuse(q.shape[1] != k.shape[1] and (causal or window_size != (-1, -1)), "alignment")
    refuse(q.shape[-1] < 16, "D below 16: tl.dot")
    left, right = window_size
    refuse(left != right and not (causal and left >= 0 and right in (0, -1)), "window")
    refuse(left == 0, "window of 0 means none")
    o = flash_attention_triton(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=causal, scale=softmax_scale, window_size=left
    )
    return o.transpose(1, 2)
