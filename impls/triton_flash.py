"""FlashAttention in Triton, forward and backward: the same source interpreted on a CPU and compiled on a GPU.

This module holds the host side: which band or dense mask a Mask becomes, tile sizes, launches, autograd. The kernels are in
triton_forward and triton_backward, imported at the first call, so that listing implementations does not import triton.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..fuzz.masks import Causal, Full, Mask, Window
from ..fuzz.region import Region
from . import register

OPEN = 1 << 30
"""A band edge beyond every key: sums with an index stay below 2**31."""

HEADS = 16
"""Query heads that a tile of a few queries takes on a GPU, however many there are: a number for each would be compiled for each."""

GRID_LIMIT = 65535
"""What CUDA allows on the second and third axis of a grid: heads and batches."""


@register(
    dialect="native",
    supports=Region(dropout=False, alibi=False, sinks=False, sinks_grad=False),
    contract="masked_nonfinite=may_leak,kv_tile=16,q_tile=16,deterministic=o+lse+dq+dk+dv",  # dbias is summed by atomics
    triton=True,
)
def triton_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout: float = 0.0,
    dropout_seed: int = 0,  # noqa: ARG001 - part of the dialect
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v by Triton kernels, differentiable in q, k, v and the bias, through o and lse.

    q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv) in any strides -> o (B, Hq, Lq, Dv) and, asked for, lse (B, Hq, Lq).
    Causal masks and windows are applied by index, every other mask as a dense boolean tensor. Rows with no allowed key give
    0 and lse -inf. Raises NotImplementedError for dropout, dtypes other than float32, float16, bfloat16, and D or Dv above 256.
    """
    if dropout:
        raise NotImplementedError(f"triton_flash must be called without dropout, got dropout={dropout}")
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise NotImplementedError(f"triton_flash must get float32, float16 or bfloat16, got dtype={q.dtype}")
    if max(q.shape[3], v.shape[3]) > 256:
        raise NotImplementedError(f"triton_flash must get head dims up to 256, got D={q.shape[3]}, Dv={v.shape[3]}")
    if max(q.shape[0], q.shape[1]) > GRID_LIMIT:
        raise NotImplementedError(
            f"triton_flash must get at most {GRID_LIMIT} batches and query heads, got q of shape {tuple(q.shape)}"
        )
    problem = Problem.of(q, k, mask, q.shape[3] ** -0.5 if scale is None else scale, softcap)
    o, lse = _TritonFlash.apply(q, k, v, bias, problem)  # type: ignore[no-untyped-call]
    return (o, lse) if return_lse else o


@dataclass(frozen=True)
class Problem:
    """What is not a differentiable tensor: the band low <= j - i <= high, the dense mask, and two numbers."""

    low: int
    high: int
    mask: Tensor | None
    scale: float
    softcap: float

    @classmethod
    def of(cls, q: Tensor, k: Tensor, mask: Mask | None, scale: float, softcap: float) -> Problem:
        """A causal mask or window as a band; any other mask dense, one byte a pair, with size 1 where it is the same."""
        B, Hq, Lq, _ = q.shape
        scale, softcap = float(scale), float(softcap)  # an integer would be another kernel
        match mask:
            case None | Full():
                return cls(-OPEN, OPEN, None, scale, softcap)
            case Causal(align):
                return cls(-OPEN, _diagonal(align, q, k), None, scale, softcap)
            case Window(left, right, align):
                diagonal = _diagonal(align, q, k)
                low, high = -OPEN if left < 0 else diagonal - left, OPEN if right < 0 else diagonal + right
                return cls(low, high, None, scale, softcap)
        return cls(-OPEN, OPEN, mask.dense(B, Hq, Lq, k.shape[2], q.device).view(torch.uint8), scale, softcap)

    @property
    def has_band(self) -> bool:
        """Some pair may lie outside the band."""
        return self.low > -OPEN or self.high < OPEN


def _diagonal(align: str, q: Tensor, k: Tensor) -> int:
    return k.shape[2] - q.shape[2] if align == "bottom_right" else 0


def _strides(x: Tensor | None) -> tuple[int, int, int, int]:
    """The four strides with 0 on axes of size 1, so that a kernel may index them at full size."""
    if x is None:
        return 0, 0, 0, 0
    b, h, i, j = (0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True))
    return b, h, i, j


def _layout(*tensors: Tensor) -> tuple[list[tuple[int, ...]], dict[str, bool]]:
    """Strides as the kernels take them, and what is known of all of them when a kernel is compiled.

    UNIT: last strides are 1. ALIGNED: the others are multiples of 8 elements and passed divided by 8, from which the compiler
    learns that rows begin at 16 bytes. The interpreter has no use for either.
    """
    strides = [x.stride() for x in tensors]
    compiled = os.environ.get("TRITON_INTERPRET") != "1"
    aligned = compiled and all(s % 8 == 0 for row in strides for s in row[:3])
    if aligned:
        strides = [(b // 8, h // 8, i // 8, d) for b, h, i, d in strides]
    return list(strides), {"UNIT": compiled and all(row[3] == 1 for row in strides), "ALIGNED": aligned}


def _power_of_2(n: int, low: int, high: int) -> int:
    """The smallest power of two that holds n, in [low, high]."""
    return min(high, max(low, 1 << max(n - 1, 0).bit_length()))


def tiles(q: Tensor, k: Tensor, Dv: int) -> dict[str, int]:
    """Tile sizes, a function of shapes and dtype alone: BLOCK_N keys; BLOCK_M rows, which are ROWS queries of several heads.

    A short query tile takes further query heads of its group, which read the same keys. On a GPU only the largest tiles are
    compiled, for one head or for HEADS. The largest tile keeps two stages of k and v, q and do, in the 99 KB of shared memory of
    consumer GPUs.
    """
    (_, Hq, Lq, D), (Hkv, Lk) = q.shape, k.shape[1:3]
    width = max(_power_of_2(D, 16, 256), _power_of_2(Dv, 16, 256))
    largest = max(16, min(64, 64 * 128 // (width * (q.element_size() // 2))))
    if q.is_cuda and q.dtype == torch.float32:
        largest = min(
            largest, 32
        )  # without tensor cores a dot is unrolled into multiply-adds: compilation is cubic in this
    rows = _power_of_2(Lq, 1, largest)
    heads = _power_of_2(Hq // Hkv, 1, largest // rows)
    if q.is_cuda:
        heads = HEADS if heads > 1 and rows * HEADS <= largest else 1
    block_m = largest if q.is_cuda else max(16, rows * heads)
    return {
        "ROWS": block_m // heads,
        "BLOCK_M": block_m,
        "BLOCK_N": _power_of_2(Lk, largest if q.is_cuda else 16, largest),
        "BLOCK_D": _power_of_2(D, 16, 256),
        "BLOCK_DV": _power_of_2(Dv, 16, 256),
    }


def _query_tiles(size: dict[str, int], Lq: int, G: int) -> tuple[int, int]:
    """How many tiles hold the queries, and how many the query heads of a group."""
    return -(-Lq // size["ROWS"]), -(-G // (size["BLOCK_M"] // size["ROWS"]))


def _flags(problem: Problem, bias: Tensor | None) -> dict[str, bool]:
    return {
        "HAS_BAND": problem.has_band,
        "HAS_MASK": problem.mask is not None,
        "HAS_BIAS": bias is not None,
        "HAS_SOFTCAP": problem.softcap > 0,
    }


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """(o, lse), both contiguous."""
    from .triton_forward import forward_kernel

    (B, Hq, Lq, D), (Hkv, Lk), Dv = q.shape, k.shape[1:3], v.shape[3]
    o = q.new_empty(B, Hq, Lq, Dv)
    lse = q.new_empty(B, Hq, Lq, dtype=torch.float32)
    size = tiles(q, k, Dv)
    q_tiles, head_tiles = _query_tiles(size, Lq, Hq // Hkv)
    at, layout = _layout(q, k, v)
    if lse.numel():
        forward_kernel[(q_tiles, Hkv * head_tiles, B)](
            q, *at[0], k, *at[1], v, *at[2], o, lse, problem.mask, *_strides(problem.mask), bias, *_strides(bias),
            problem.scale, problem.softcap, problem.low, problem.high, Hq, Hq // Hkv, head_tiles, Lq, Lk, D, Dv,
            **size, **layout, **_flags(problem, bias), num_warps=4, num_stages=2,
        )  # fmt: skip
    return o, lse


def backward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(dq, dk, dv, dbias), contiguous; a broadcast bias is summed in float32, then rounded once."""
    from .triton_backward import dkdv_kernel, dq_kernel

    (B, Hq, Lq, D), (Hkv, Lk), Dv = q.shape, k.shape[1:3], v.shape[3]
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    delta = torch.empty_like(lse)
    broadcast = bias is not None and bias.shape != (B, Hq, Lq, Lk)
    dbias = (
        bias.new_zeros(bias.shape, dtype=torch.float32 if broadcast else bias.dtype)
        if bias is not None and bias_grad
        else None
    )
    size, flags = tiles(q, k, Dv), _flags(problem, bias)
    q_tiles, head_tiles = _query_tiles(size, Lq, Hq // Hkv)
    k_tiles = -(-Lk // size["BLOCK_N"])
    at, layout = _layout(q, k, v, do)
    mask = (problem.mask, *_strides(problem.mask), bias, *_strides(bias))
    numbers = (problem.scale, problem.softcap, problem.low, problem.high)
    if lse.numel():
        dq_kernel[(q_tiles, Hkv * head_tiles, B)](
            q, *at[0], k, *at[1], v, *at[2], o, do, *at[3], lse, dlse, delta, dq, *mask, dbias, *_strides(dbias),
            *numbers, Hq, Hq // Hkv, head_tiles, Lq, Lk, D, Dv, **size, **layout, **flags,
            HAS_DLSE=dlse is not None, HAS_DBIAS=dbias is not None, BROADCAST_BIAS=broadcast, num_warps=4, num_stages=2,
        )  # fmt: skip
    if dk.numel():
        dkdv_kernel[(k_tiles, Hkv, B)](
            q, *at[0], k, *at[1], v, *at[2], do, *at[3], lse, delta, dk, dv, *mask,
            *numbers, Hkv, Hq // Hkv, Lq, Lk, D, Dv, **size, **layout, **flags, num_warps=4, num_stages=2,
        )  # fmt: skip
    return dq, dk, dv, None if dbias is None or bias is None else dbias.to(bias.dtype)


class _TritonFlash(torch.autograd.Function):
    """Ties `forward` and `backward` to autograd; outputs o and lse are both differentiable."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, problem: Problem
    ) -> tuple[Tensor, Tensor]:
        with torch.cuda.device_of(q):
            o, lse = forward(problem, q, k, v, bias)
        ctx.save_for_backward(q, k, v, bias, o, lse)
        ctx.problem = problem
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, bias, o, lse = ctx.saved_tensors
        do = o.new_zeros(()).expand(o.shape) if do is None else do
        dlse = None if dlse is None else dlse.contiguous()
        with torch.cuda.device_of(q):
            grads = backward(ctx.problem, q, k, v, bias, o, lse, do, dlse, ctx.needs_input_grad[3])
        return *(g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)), None
