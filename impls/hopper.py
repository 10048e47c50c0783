"""FlashAttention for Hopper in Gluon: warps that copy, warpgroups that compute. It needs a GPU of compute capability 9.0.

This module holds the host side: what is refused and why, how the work is cut, descriptors, launches, autograd. The kernels are in
hopper_forward and hopper_backward, imported at the first call, so that listing implementations needs neither Gluon nor a GPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..fuzz.masks import Causal, Full, Mask, Window
from ..fuzz.region import Region
from . import register

OPEN = 1 << 30
"""A band edge beyond every key: sums with an index stay below 2**31."""

KV_BYTES, ROW_BYTES = 12 << 20, 24 << 20
"""What heads that are worked on together may need of the L2 cache (50 MB on an H100): of k and v, of q, do and the float32 dq.

The rest is for what streams through. 12 MB of k and v are 1 to 2 % faster than 24, and 24 than 40, at lengths up to 2048 on an H200.
"""

HEAD_DIMS = (64, 128, 256)
FORWARD: dict[int, dict[str, int]] = {
    64: {"CONSUMERS": 3, "BN": 128, "K_SLOTS": 2, "V_SLOTS": 2, "Q_SLOTS": 2, "REGISTERS": 160, "PRODUCER_REGISTERS": 32},
    128: {"CONSUMERS": 2, "BN": 128, "K_SLOTS": 2, "V_SLOTS": 2, "Q_SLOTS": 2, "REGISTERS": 240, "PRODUCER_REGISTERS": 24},
    256: {"CONSUMERS": 2, "BN": 64, "K_SLOTS": 2, "V_SLOTS": 2, "Q_SLOTS": 1, "REGISTERS": 232, "PRODUCER_REGISTERS": 40},
}  # fmt: skip
"""By head dim. All slots fit in 227 KB of shared memory; registers per thread, of the 65,536 of a multiprocessor."""
BACKWARD: dict[int, dict[str, int]] = {
    64: {"BM": 64, "REGISTERS": 240, "WARP_REGISTERS": 24},
    128: {"BM": 64, "REGISTERS": 240, "WARP_REGISTERS": 24},
}

REGION = Region(
    dtypes=("float16", "bfloat16"), head_dims=tuple(BACKWARD), min_len=1, dv_differs=False,
    masks=("none", "causal_top_left", "causal_bottom_right", "window"),
    bias=False, bias_grad=False, negative_scale=False, softcap=False, dropout=False, alibi=False, sinks=False, sinks_grad=False,
)  # fmt: skip


CONTRACT = "hopper,masked_nonfinite=may_leak,kv_tile=64,q_tile=64,deterministic=o+lse+dk+dv"
"""dq is summed by the copy engine, in any order."""


@register(
    name="hopper_256",
    dialect="native",
    supports=replace(REGION, head_dims=(256,), backward=False, lse_grad=False),
    contract=CONTRACT,
    devices=("cuda",),
    summary="hopper at head dim 256, forward only",
)
@register(dialect="native", supports=REGION, contract=CONTRACT, devices=("cuda",))
def hopper(
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
    """softmax(scale q k^T) v on an H100 or H200, differentiable in q, k and v, through o and lse.

    q (B, Hq, Lq, D), k and v (B, Hkv, Lk, D) -> o (B, Hq, Lq, D), in the layout of q, and, asked for, lse (B, Hq, Lq). D is 64, 128
    or 256, forward only for 256. Layouts whose rows begin at 16 bytes, (B, H, L, D) and (B, L, H, D) among them, are read in
    place; others are copied. The mask is none, causal or a window; rows with no allowed key give 0 and lse -inf. Raises
    NotImplementedError with the reason for everything else.
    """
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    if reason := refuses(q, k, v, mask, bias=bias, scale=scale, softcap=softcap, dropout=dropout):
        raise NotImplementedError(f"hopper must {reason}")
    low, high = band(mask, q.shape[2], k.shape[2])
    o, lse = _Hopper.apply(*map(_readable, (q, k, v)), Problem(low, high, scale))  # type: ignore[no-untyped-call]
    return (o, lse) if return_lse else o


def refuses(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    *,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    dropout: float,
) -> str:
    """What a call must have that this one has not, and what it has; empty if it can be served."""
    D = q.shape[3]
    requires_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    for rule, got, holds in (
        ("be called without dropout", f"dropout={dropout}", not dropout),
        ("be called without softcap", f"softcap={softcap}", not softcap),
        ("be called without bias", "a bias", bias is None),
        (
            "get a mask that is none, causal or a window",
            f"mask={mask}",
            isinstance(mask, None | Full | Causal | Window),
        ),
        ("get float16 or bfloat16", f"dtype={q.dtype}", q.dtype in (torch.float16, torch.bfloat16)),
        (f"get a head dim in {HEAD_DIMS}", f"D={D}", D in HEAD_DIMS),
        ("get v as wide as q", f"D={D}, Dv={v.shape[3]}", v.shape[3] == D),
        ("get no gradients for D=256", "requires_grad", D in BACKWARD or not requires_grad),
        ("get a scale above 0", f"scale={scale}", scale > 0),
        ("get at least one batch, query and key", f"q of shape {tuple(q.shape)}", min(q.numel(), k.numel()) > 0),
        ("run on a CUDA device", f"device={q.device}", q.is_cuda),
        ("run on compute capability 9.0", f"{_capability(q)}", _capability(q) == (9, 0)),
    ):
        if not holds:
            return f"{rule}, got {got}"
    return ""


def _capability(x: Tensor) -> tuple[int, int]:
    return torch.cuda.get_device_capability(x.device) if x.is_cuda else (0, 0)


def band(mask: Mask | None, Lq: int, Lk: int) -> tuple[int, int]:
    """(low, high) such that the mask keeps the pairs with low <= j - i <= high."""
    if not isinstance(mask, Causal | Window):
        return -OPEN, OPEN
    diagonal = Lk - Lq if mask.align == "bottom_right" else 0
    if isinstance(mask, Causal):
        return -OPEN, diagonal
    return -OPEN if mask.left < 0 else diagonal - mask.left, OPEN if mask.right < 0 else diagonal + mask.right


@dataclass(frozen=True)
class Problem:
    """What is not a tensor: the band low <= j - i <= high, and the scale."""

    low: int
    high: int
    scale: float

    @property
    def flags(self) -> dict[str, bool]:
        """Which edges of the band the kernels must look at."""
        return {"HAS_LOW": self.low > -OPEN, "HAS_HIGH": self.high < OPEN}


def _readable(x: Tensor) -> Tensor:
    """The tensor, copied if the copy engine cannot read it: rows of adjacent elements that begin at 16 bytes, no stride of 0."""
    aligned = x.data_ptr() % 16 == 0 and all(
        n == 1 or (s > 0 and s % 8 == 0) for n, s in zip(x.shape, x.stride()[:3], strict=False)
    )
    return x if aligned and x.stride(3) == 1 else x.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class _Address:
    """Where a tensor lies, for a descriptor: one that held the tensor would keep its memory while the descriptor is cached."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        """As a tensor's."""
        return self.address


@functools.lru_cache(maxsize=4096)
def _descriptor(
    _device: int,
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    block: tuple[int, ...],
    swizzled: bool,
) -> Any:
    """The descriptor of a tensor for tiles of shape `block`; everything that it depends on is an argument."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .hopper_ops import gl

    names = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}
    plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * dtype.itemsize, rank=len(block))
    layout = gl.NVMMASharedLayout.get_default_for(list(block), names[dtype]) if swizzled else plain
    # The copy engine does not read strides of axes of size 1, yet they must be multiples of 16 bytes.
    outer = [shape[-1] if n == 1 else s for n, s in zip(shape[:-1], strides[:-1], strict=True)]
    return TensorDescriptor(_Address(dtype, address), list(shape), [*outer, 1], list(block), layout)


def describe(x: Tensor, rows: int, columns: int = 0) -> Any:
    """A descriptor of x for tiles of `rows` of its last but one axis and `columns` of its last, all by default."""
    block = (1,) * (x.dim() - 2) + (rows, columns or x.shape[-1])
    return _descriptor(x.get_device(), x.data_ptr(), x.dtype, tuple(x.shape), x.stride(), block, True)


def _describe_vector(x: Tensor, columns: int) -> Any:
    """A descriptor of the (rows, length) tensor x for pieces of one row."""
    return _descriptor(x.get_device(), x.data_ptr(), x.dtype, tuple(x.shape), x.stride(), (1, columns), False)


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _shared_counter(_device: int, _stream: int) -> Tensor:
    """The int32 zero from which the blocks of a launch draw tiles, and which they leave zero: one for each stream."""
    return torch.zeros(1, dtype=torch.int32, device="cuda")


def _counter(x: Tensor) -> Tensor:
    """A counter that no launch uses at the same time; a graph gets its own, as it may be replayed on any stream."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=x.device)
    return _shared_counter(x.get_device(), torch.cuda.current_stream(x.device).cuda_stream)


def section(heads: int, bytes_of_a_head: int, limit: int, flags: dict[str, bool]) -> int:
    """How many heads have their tiles taken together, longest first: what `limit` bytes hold; one where tiles are equally long."""
    return max(1, min(heads, limit // bytes_of_a_head)) if flags["HAS_HIGH"] else 1


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(o, lse): o in the layout of q, lse contiguous."""
    from .hopper_forward import forward_kernel

    (B, Hq, Lq, D), (Hkv, Lk) = q.shape, k.shape[1:3]
    o = torch.empty_like(q)
    lse = q.new_empty(B, Hq, Lq, dtype=torch.float32)
    setting = FORWARD[D]
    tiles = -(-Lq // (64 * setting["CONSUMERS"])) * B * Hq
    together = section(B * Hq, -(-2 * Lk * D * q.element_size() * Hkv // Hq), KV_BYTES, problem.flags)
    forward_kernel[(min(tiles, _multiprocessors(q.get_device())),)](
        describe(q, 64), describe(k, setting["BN"]), describe(v, setting["BN"]), describe(o, 64), lse, _counter(q),
        problem.scale, B * Hq, Hq, Hq // Hkv, Lq, Lk, problem.low, problem.high, together, tiles,
        D=D, **setting, **problem.flags, num_warps=4,
    )  # fmt: skip
    return o, lse


def backward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the layouts of q, k and v."""
    from .hopper_backward import backward_kernel
    from .hopper_rows import prepare_kernel, round_kernel

    (B, Hq, Lq, D), (Hkv, Lk) = q.shape, k.shape[1:3]
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    setting = BACKWARD[D]
    BM = setting["BM"]
    padded = -(-Lq // BM) * BM
    total = q.new_empty(B, Hq, Lq, D, dtype=torch.float32)
    lse2, delta = (q.new_empty(B * Hq, padded, dtype=torch.float32) for _ in range(2))
    rows = (B * Hq, padded // BM)
    o_strides, do_strides, dq_strides = ([s // 8 for s in x.stride()[:3]] for x in (o, do, dq))
    prepare_kernel[rows](
        o, *o_strides, do, *do_strides, lse, dlse, lse2, delta, total, Hq, Lq, padded, D=D, BM=BM, HAS_DLSE=dlse is not None, num_warps=4,
    )  # fmt: skip
    together = section(B * Hkv, 8 * Lq * D * Hq // Hkv, ROW_BYTES, problem.flags)
    backward_kernel[(-(-Lk // 128) * B * Hkv,)](
        describe(q, BM), describe(k, 64), describe(v, 64), describe(do, BM), _describe_vector(lse2, BM), _describe_vector(delta, BM),
        describe(total, 64, D if BM == 128 else D // 2), describe(dk, 64), describe(dv, 64),
        problem.scale, Hkv, Hq // Hkv, Lq, Lk, problem.low, problem.high, B * Hkv, together,
        D=D, **setting, **problem.flags, num_warps=4,
    )  # fmt: skip
    round_kernel[rows](total, dq, *dq_strides, problem.scale, Hq, Lq, D=D, BM=BM, num_warps=4)
    return dq, dk, dv


class _Hopper(torch.autograd.Function):
    """Ties `forward` and `backward` to autograd; outputs o and lse are both differentiable."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        with torch.cuda.device_of(q):
            o, lse = forward(problem, q, k, v)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.problem = problem
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else _readable(do)
        dlse = None if dlse is None else dlse.contiguous()
        with torch.cuda.device_of(q):
            grads = backward(ctx.problem, q, k, v, o, lse, do, dlse)
        return *(g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)), None
