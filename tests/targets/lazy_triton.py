"""A target that imports its Triton kernel at the first call; the kernel loads one element past the end of k."""

import torch
from layers import attend


def attention(q, k, v, is_causal=False, scale=None):
    from lazy_kernel import last

    last[(1,)](k, torch.zeros(1), k.numel())
    return attend(q, k, v, scale=scale)[0]
