"""FlexAttention compiled by Inductor, dynamic shapes, causal and score scale."""

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

compiled = torch.compile(flex_attention, dynamic=True)


def attention(query, key, value, is_causal=False, scale=None, enable_gqa=False):
    if 0 in query.shape or 0 in key.shape:
        raise NotImplementedError("empty")
    if query.shape[1] % key.shape[1] or query.shape[-1] < 8:
        raise NotImplementedError("heads or small D")
    mask = None
    if is_causal:
        mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, query.shape[2], key.shape[2], device=query.device
        )
    from torch.utils._python_dispatch import _disable_current_modes  # under a mode torch does not compile

    with _disable_current_modes(), torch.no_grad():
        return compiled(query, key, value, block_mask=mask, scale=scale, enable_gqa=enable_gqa)
