"""flash_attention_jax."""

import os
import sys

import torch

sys.path.insert(0, os.path.dirname(__file__))
from common import refuse
from jax_xla import Bridge


def attention(query, key, value, is_causal=False):
    """flash_attention and causal_flash_attention of flash-attention-jax."""
    import flash_attention_jax as fj
    import jax.numpy as jnp

    refuse(query.shape[1] != key.shape[1] or query.shape[-1] != value.shape[-1], "heads or Dv")
    refuse(0 in query.shape or 0 in key.shape, "empty")
    refuse(query.dtype != torch.float32, "float32 only")
    refuse(is_causal and query.shape[2] != key.shape[2], "causal is aligned bottom-right")
    mask = jnp.ones((key.shape[0], key.shape[2]), bool)
    f = fj.causal_flash_attention if is_causal else lambda q, k, v: fj.flash_attention(q, k, v, mask)
    return Bridge.apply(f, query, key, value)
