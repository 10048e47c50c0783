"""memory_efficient_attention of xformers."""

import os
import sys

sys.path.insert(0, os.path.dirname(__file__))
from common import refuse


def attention(q, k, v, causal=False, softmax_scale=None, attn_mask=None):
    """(B, L, H, D); grouped heads as xformers wants them, in five dimensions; causal is aligned bottom-right."""
    import xformers.ops as xops
    from xformers.ops.fmha.attn_bias import LowerTriangularFromBottomRightMask

    refuse(0 in q.shape or 0 in k.shape, "empty")
    refuse(softmax_scale is not None and softmax_scale <= 0, "scale <= 0: known")
    refuse(attn_mask is not None and (causal or attn_mask.dtype != q.dtype), "boolean mask, or a mask beside causal")
    refuse(q.shape[2] % k.shape[2] != 0, "heads")
    bias = LowerTriangularFromBottomRightMask() if causal else None
    if attn_mask is not None:
        refuse(q.shape[2] != k.shape[2], "a mask beside grouped heads")
        bias = attn_mask.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        q = q.unflatten(2, (k.shape[2], groups))
        k, v = (x[:, :, :, None].expand(*x.shape[:3], groups, x.shape[3]) for x in (k, v))
    o = xops.memory_efficient_attention(q, k, v, attn_bias=bias, scale=softmax_scale)
    return o.flatten(2, 3) if groups > 1 else o
