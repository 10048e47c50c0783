"""A function of transformers' attention interface: (B, H, L, D) in, (B, L, H, D) out, an additive mask."""

import torch
from torch import nn


def my_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, is_causal=None, **kwargs):
    groups = module.num_key_value_groups
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    s = query.float() @ key.float().mT * scaling
    if attention_mask is not None:
        s = s + attention_mask[..., : key.shape[-2]].float()
    dead = (s == -torch.inf).all(-1, keepdim=True)
    p = torch.softmax(s.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    return (p @ value.float()).to(query.dtype).transpose(1, 2).contiguous(), None


# The adapter
import flashproof


def layer(Hq, Hkv):
    module = nn.Module()
    module.num_key_value_groups = Hq // Hkv
    return module.train()


@flashproof.target(layout="bhld", factory={"module": layer}, masked_nonfinite="may_leak")
def attention(module, q, k, v, attn_mask, scale):
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # transformers hands additive masks to this function
        attn_mask = torch.zeros(attn_mask.shape, dtype=q.dtype, device=q.device).masked_fill(~attn_mask, -torch.inf)
    o, _ = my_attention(module, q, k, v, attn_mask, scaling=scale)
    return o.transpose(1, 2)
