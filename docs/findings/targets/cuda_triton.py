"""flash_attention_bhsd and flash_attention_full_triton of cuda-triton-multiarch."""

import os
import sys

import torch

sys.path.insert(0, os.path.dirname(__file__))
from common import pretend_cuda, refuse


def bhsd(query, key, value, is_causal=False):
    refuse(query.shape != key.shape or key.shape != value.shape, "shapes must agree")
    refuse(0 in query.shape, "empty")
    with pretend_cuda():
        from kernels.attention_api import flash_attention_bhsd

        return flash_attention_bhsd(query, key, value, is_causal=is_causal)


def full(query, key, value, is_causal=False):

    refuse(query.shape != key.shape or key.shape != value.shape, "shapes must agree")
    refuse(0 in query.shape or query.dtype != torch.float16, "empty or not float16")
    refuse(query.shape[-1] < 16 or query.shape[-1] & (query.shape[-1] - 1), "D not a power of 2 from 16 on")
    from kernels.flash_attention_full import flash_attention_full_triton

    return flash_attention_full_triton(query, key, value, causal=is_causal)
