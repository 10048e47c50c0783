"""transformers' sdpa_attention_forward and eager_attention_forward (Llama, gpt-oss) as targets."""

from types import SimpleNamespace

import torch


def module(q, k, causal):
    m = torch.nn.Module()
    m.num_key_value_groups = q.shape[1] // k.shape[1]
    m.is_causal = causal
    m.training = False
    m.config = SimpleNamespace(_attn_implementation="sdpa")
    return m


def refuse(q, k, causal=False, scale=None):
    if 0 in q.shape or 0 in k.shape:
        raise NotImplementedError("empty")
    if q.shape[2] == 1 != k.shape[2] and causal:
        raise NotImplementedError("one query row is taken as a decoding step, which sees every key")
    if causal and scale is not None and scale <= 0:
        raise NotImplementedError("torch's CPU flash backend gives nan")


def sdpa(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    refuse(query, key, is_causal, scale)
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    o, _ = sdpa_attention_forward(
        module(query, key, is_causal), query, key, value, attn_mask, dropout=0.0, scaling=scale, is_causal=is_causal
    )
    return o.transpose(1, 2)


def eager(query, key, value, attn_mask=None, scale=None, enable_gqa=False):
    refuse(query, key)
    from transformers.models.llama.modeling_llama import eager_attention_forward

    if attn_mask is not None and attn_mask.dtype != torch.bool and (attn_mask == -torch.inf).all(-1).any():
        raise NotImplementedError("a row that is -inf throughout is nan, which oneDNN's bfloat16 matmul spreads: known")
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros(attn_mask.shape, dtype=query.dtype).masked_fill(
            ~attn_mask, torch.finfo(query.dtype).min
        )
    o, _ = eager_attention_forward(
        module(query, key, False),
        query,
        key,
        value,
        attn_mask,
        scaling=scale if scale is not None else query.shape[-1] ** -0.5,
    )
    return o.transpose(1, 2)


def flex(query, key, value, attn_mask=None, scale=None, enable_gqa=False):
    refuse(query, key)
    from transformers.integrations.flex_attention import flex_attention_forward

    o, _ = flex_attention_forward(module(query, key, False), query, key, value, attn_mask, scaling=scale)
    return o.transpose(1, 2)
