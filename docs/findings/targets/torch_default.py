"""scaled_dot_product_attention as torch dispatches it, and variants of how it is called."""

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa


def attention(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    if not key.shape[2] or (is_causal and scale is not None and scale <= 0):
        raise NotImplementedError("known")
    return sdpa(query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


def vmapped(query, key, value, is_causal=False, scale=None):
    """The batch mapped by vmap."""
    if not key.shape[2] or not query.shape[0] or query.shape[1] != key.shape[1]:
        raise NotImplementedError("empty or heads")
    return torch.func.vmap(lambda q, k, v: sdpa(q, k, v, is_causal=is_causal, scale=scale))(query, key, value)


def three_dims(query, key, value, is_causal=False, scale=None):
    """Heads folded into the batch: three dimensions."""
    if not key.shape[2] or query.shape[1] != key.shape[1]:
        raise NotImplementedError("empty or heads")
    q, k, v = (x.flatten(0, 1) for x in (query, key, value))
    return sdpa(q, k, v, is_causal=is_causal, scale=scale).unflatten(0, query.shape[:2])
