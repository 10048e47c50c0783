"""The attention kernels of JAX Pallas, interpreted."""

import os
import sys

sys.path.insert(0, os.path.dirname(__file__))
from common import refuse
from jax_xla import Bridge


def known(query, key, value, is_causal=False, scale=None):
    """`attention` without what is known to be wrong: blocks beyond the last key, and causal calls with more queries than keys."""
    lengths = query.shape[2], key.shape[2]
    cut = any((n > 32 and n % 32) or (n > 128 and n % 128) for n in lengths)
    refuse(cut or (is_causal and lengths[0] > lengths[1]), "known")
    return attention(query, key, value, is_causal, scale)


def attention(query, key, value, is_causal=False, scale=None):
    from jax.experimental.pallas.ops.gpu import attention as ga

    refuse(query.shape[1] != key.shape[1] or query.shape[-1] != value.shape[-1], "heads or Dv")
    refuse(0 in query.shape or 0 in key.shape, "empty")
    scale = query.shape[-1] ** -0.5 if scale is None else scale

    def f(q, k, v):
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
        return ga.mha(q, k, v, None, sm_scale=scale, causal=is_causal, interpret=True).transpose(0, 2, 1, 3)

    return Bridge.apply(f, query, key, value)


def decode(query, key, value, scale=None, enable_gqa=False):
    """gqa of decode_attention: one query row."""
    from jax.experimental.pallas.ops.gpu import decode_attention as da

    refuse(query.shape[2] != 1 or query.shape[-1] != value.shape[-1], "one row only")
    refuse(0 in query.shape or 0 in key.shape, "empty")
    refuse(key.shape[2] < 16, "keys below 16")

    def f(q, k, v):
        return da.gqa(
            q[:, :, 0],
            k.transpose(0, 2, 1, 3),
            v.transpose(0, 2, 1, 3),
            sm_scale=scale,
            k_splits=1,
            block_k=max(16, k.shape[2]),
            interpret=True,
        )[:, :, None]

    return Bridge.apply(f, query, key, value)
