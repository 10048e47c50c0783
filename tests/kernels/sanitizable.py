"""Targets with one planted CUDA error each, of the kind that one tool of compute-sanitizer reports; they need a GPU and NVRTC."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import flashproof

SOURCE = {
    "planted_race": "__shared__ float s[64]; s[threadIdx.x] = o[threadIdx.x]; o[threadIdx.x] = s[63 - threadIdx.x];",
    "planted_read": "o[threadIdx.x] = x[threadIdx.x] > 0.f ? 1.f : 2.f;",
    "planted_barrier": "if (threadIdx.x % 32 < 16) __syncthreads(); o[threadIdx.x] = 1.f;",
}
THREADS = 64


@functools.cache
def kernel(name: str) -> Any:
    """The compiled kernel of a name: (float* o, const float* x)."""
    text = f'extern "C" __global__ void {name}(float* o, const float* x) {{ {SOURCE[name]} }}'
    return torch.cuda._compile_kernel(text, name)


def called(name: str, q: Tensor, v: Tensor) -> Tensor:
    """An output, after the kernel ran on 64 numbers of its own; x is memory that nobody wrote."""
    o, x = torch.zeros(THREADS, device=q.device), torch.empty(THREADS, device=q.device)
    kernel(name)(grid=(1, 1, 1), block=(THREADS, 1, 1), args=[o, x])
    return torch.zeros((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)


@flashproof.target(layout="bhld", forward_only=True, devices=("cuda",))
def race(q, k, v, scale):
    return {"o": called("planted_race", q, v)}


@flashproof.target(layout="bhld", forward_only=True, devices=("cuda",))
def unwritten(q, k, v, scale):
    return {"o": called("planted_read", q, v)}


@flashproof.target(layout="bhld", forward_only=True, devices=("cuda",))
def barrier(q, k, v, scale):
    return {"o": called("planted_barrier", q, v)}
