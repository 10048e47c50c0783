"""FlexAttention compiled by Inductor, dynamic shapes, causal and score scale."""

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

torch._dynamo.config.recompile_limit = 256
torch._dynamo.config.fail_on_recompile_limit_hit = True  # otherwise it runs eager from then on, and says nothing
compiled = torch.compile(flex_attention, dynamic=True)


def trained(query, key, value, is_causal=False, scale=None, enable_gqa=False):
    """With gradients."""
    if 0 in query.shape or 0 in key.shape:
        raise NotImplementedError("empty")
    if query.shape[1] % key.shape[1] or min(query.shape[-1], value.shape[-1]) < 16:
        raise NotImplementedError("heads, or D below 16, which it refuses on a GPU")
    mask = None
    if is_causal:
        mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, query.shape[2], key.shape[2], device=query.device
        )
    from torch.utils._python_dispatch import _disable_current_modes  # under a mode torch does not compile

    with _disable_current_modes():
        return compiled(query, key, value, block_mask=mask, scale=scale, enable_gqa=enable_gqa)


def attention(query, key, value, is_causal=False, scale=None, enable_gqa=False):
    """Forward only."""
    with torch.no_grad():
        return trained(query, key, value, is_causal, scale, enable_gqa)
