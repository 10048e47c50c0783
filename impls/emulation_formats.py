"""Number formats, exponentials and dots of the emulated kernels, every rounding explicit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
F32 = torch.float32


def tf32_nearest(x: Tensor) -> Tensor:
    """x rounded to the 10 fraction bits of TF32."""
    bits = x.contiguous().view(torch.int32)
    rounded = (((bits + (((bits >> 13) & 1) + 0x0FFF)) >> 13) << 13).view(F32)
    return torch.where(torch.isfinite(x), rounded, x)


def truncated(x: Tensor, dropped_bits: int) -> Tensor:
    """x with the last bits of its float32 fraction cleared."""
    return ((x.contiguous().view(torch.int32) >> dropped_bits) << dropped_bits).view(F32)


def through(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """x rounded to dtype, as float32."""
    return x if dtype in (None, F32) else x.to(dtype).float()


def polynomial_exp2(x: Tensor, *coefficients: float) -> Tensor:
    """2**x by a polynomial on [0, 1): degree 3 is off by 1e-4, degree 2 by 2e-3."""
    clipped = x.clamp_min(-127.0)
    whole = torch.floor(clipped)
    y = torch.zeros_like(x)
    for c in coefficients:
        y = y * (clipped - whole) + c
    return torch.ldexp(y, whole.clamp(-150, 127).to(torch.int32)) * (x > -126)


EXP2: dict[str, Callable[[Tensor], Tensor]] = {
    "exp2": torch.exp2,
    "exp": lambda x: torch.exp(x * LN2),
    "cubic": lambda x: polynomial_exp2(x, 0.0771190896, 0.2275643944, 0.6951461434, 1.0),
    "quadratic": lambda x: polynomial_exp2(x, 0.3301070332, 0.6657850742, 1.0),
    "half": lambda x: torch.exp2(x.half().float()).half().float(),
}


def fused_dot(a: Tensor, b: Tensor, bits: int, block: int) -> Tensor:
    """a @ b as a chain of tensor-core steps.

    `block` products and the accumulator are aligned to the largest, truncated to `bits` fraction bits, added exactly, and
    truncated to float32 (13 bits in the FP8 mode of Hopper).
    """
    a, b = a.double(), b.double()
    acc = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=torch.float64)
    for start in range(0, a.shape[-1], block):
        terms = a[..., start : start + block].unsqueeze(-1) * b[..., start : start + block, :].unsqueeze(-3)
        terms = torch.cat([terms, acc.unsqueeze(-2)], -2)
        exponent = torch.floor(torch.log2(terms.abs().amax(-2, keepdim=True).clamp_min(1e-300)))
        grid = torch.exp2(bits - exponent)
        total = (torch.trunc(terms * grid) / grid).sum(-2)
        grid = torch.exp2((13 if bits == 13 else 23) - torch.floor(torch.log2(total.abs().clamp_min(1e-300))))
        acc = torch.trunc(total * grid) / grid
    return acc.float()
