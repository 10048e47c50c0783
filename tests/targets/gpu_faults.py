"""Triton kernels that take a GPU down: one reads memory that is not there, one never ends; both only for more than 16 keys."""

import torch
import triton
import triton.language as tl
from layers import attend


@triton.jit
def stray(X, O, far):
    tl.store(O, tl.load(X + far.to(tl.int64) * 1024 * 1024 * 1024))


@triton.jit
def endless(X, O):
    n = tl.load(X)
    while n == 0:
        n = tl.atomic_add(X, 0)
    tl.store(O, n)


def illegal_access(q, k, v, scale=None):
    o = attend(q, k, v, keep=None, scale=scale)[0]
    if k.shape[2] > 16:
        x = torch.ones(1, device=q.device)
        stray[(1,)](x, torch.empty_like(x), 1 << 12)
    return o


def hang(q, k, v, scale=None):
    o = attend(q, k, v, keep=None, scale=scale)[0]
    if k.shape[2] > 16:
        x = torch.zeros(1, dtype=torch.int32, device=q.device)
        endless[(1,)](x, torch.empty_like(x))
    return o
