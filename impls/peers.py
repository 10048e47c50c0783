"""Attention of other projects as targets: the backends of torch's scaled_dot_product_attention, and FlexAttention.

Each declares the region it was seen to serve and how it rounds. A backend is asked for alone: nothing falls back to another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..fuzz.region import Region
from . import register

SDPA = Region(min_len=1, softcap=False, lse=False, lse_grad=False)
"""What its signature can say. Without keys torch gives q times 0, which is nan for an infinite q: no empty tensors."""
FLEX = Region(min_len=1, dropout=False, backward=False, bias_grad=False, lse_grad=False)
FLEX_CONTRACT = "torch-cpu-math,forward_only=true,nonfinite=any"
"""nonfinite: a bfloat16 matmul of torch 2.13 on a CPU carries the NaN of one row into the row beside it (241 x 17 by 17 x 1)."""


def _sdpa(backend: str, q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
    """scaled_dot_product_attention by one backend; NotImplementedError where that backend declines."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if reason := _fault(backend, q, k, **keywords):
        raise NotImplementedError(reason)
    q, k, v = (_rows(x) for x in (q, k, v))
    with sdpa_kernel(getattr(SDPBackend, backend)):
        try:
            o = functional.scaled_dot_product_attention(q, k, v, **keywords)
        except RuntimeError as error:
            if "No available kernel" not in str(error) and "must be contiguous" not in str(error):
                raise
            raise NotImplementedError(
                f"the {backend} backend of scaled_dot_product_attention declines this call"
            ) from error
    return o if backend == "MATH" or not q.is_cuda else _RowsOfGradient.apply(o)  # type: ignore[no-untyped-call]


def _fault(
    backend: str,
    q: Tensor,
    k: Tensor,
    *,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    **_: Any,
) -> str:
    """What is known to be wrong with such a call, seen with torch 2.13 on a CPU and 2.11 on an H200; empty if nothing is."""
    if not k.shape[2]:
        return "without keys scaled_dot_product_attention answers q times 0"
    if not q.is_cuda:
        faulty = backend == "FLASH_ATTENTION" and is_causal and scale is not None and scale <= 0
        return "is_causal with a scale of 0 or below gives nan in the flash backend on a CPU" if faulty else ""
    if not q.numel() and backend != "MATH":
        return "of an empty batch the memory-efficient backend dies (SIGFPE) and the cuDNN backend returns None"
    if backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION") and scale is not None and scale <= 0:
        return f"a scale of 0 or below gives nan in the {backend} backend"
    if backend == "CUDNN_ATTENTION" and attn_mask is not None:
        return "the cuDNN backend answers the mean of v where a mask leaves no key, and crashes on rows not aligned to 16 bytes"
    if backend == "EFFICIENT_ATTENTION" and attn_mask is not None and attn_mask.data_ptr() % 16:
        return "the memory-efficient backend crashes on a mask that is not aligned to 16 bytes"
    alone = attn_mask is not None and attn_mask.requires_grad and not (q.requires_grad or k.requires_grad)
    if backend == "EFFICIENT_ATTENTION" and alone:
        return "the memory-efficient backend reads outside its memory where the mask alone requires a gradient"
    if backend == "EFFICIENT_ATTENTION" and dropout_p and q.dtype != torch.float32:
        return "the memory-efficient backend rounds P once more after dropout"
    return ""


def _rows(x: Tensor) -> Tensor:
    """The tensor with adjacent elements in its last dimension, which most backends insist on; copied if they are not.

    On a GPU rows must begin at 16 bytes too: the memory-efficient and cuDNN backends of torch 2.11 do not check it and die of a
    misaligned address, which no later call in the process survives. Nor may a stride be 0: the cuDNN backend then gives its
    output strides that cuDNN refuses, or dies (SIGSEGV).
    """
    aligned = x.data_ptr() % 16 == 0 and all(s and s * x.element_size() % 16 == 0 for s in x.stride()[:-1])
    right = x.stride(-1) == 1 and (aligned or not x.is_cuda)
    return x if right else x.clone(memory_format=torch.contiguous_format)


class _RowsOfGradient(torch.autograd.Function):
    """The identity, whose incoming gradient is made fit by `_rows`."""

    @staticmethod
    def forward(ctx: Any, o: Tensor) -> Tensor:
        """The output itself."""
        return o.view_as(o)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Tensor:
        """The gradient, copied if a kernel could not read it."""
        return _rows(do)


def _backend(
    name: str, backend: str, supports: Region | None, contract: str, devices: tuple[str, ...], summary: str
) -> Callable[..., Tensor]:
    """Register one backend as a target with the signature of scaled_dot_product_attention."""

    @register(name=name, dialect="sdpa", supports=supports, contract=contract, devices=devices, summary=summary)
    def sdpa(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        keywords = {
            "attn_mask": attn_mask,
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
        }
        return _sdpa(backend, query, key, value, **keywords)

    return sdpa


sdpa_math = _backend("sdpa_math", "MATH", SDPA, "torch-cpu-math", ("cpu", "cuda"), "torch SDPA, math backend")
CPU_FLASH = replace(SDPA, dv_differs=False, dropout=False, bias_grad=False, negative_scale=False)
"""No scale of 0 or below: with is_causal torch 2.13 answers nan there, as it multiplies scores that it has set to -inf by it."""
sdpa_cpu_flash = _backend(
    "sdpa_cpu_flash",
    "FLASH_ATTENTION",
    CPU_FLASH,
    "torch-cpu-flash,nonfinite=any",  # in bfloat16 the NaN of one row may reach another; a NaN row may give 0
    ("cpu",),
    "torch SDPA, flash backend on a CPU",
)


sdpa_flash = _backend(
    "sdpa_flash",
    "FLASH_ATTENTION",
    None,
    "torch-cuda-flash,deterministic=o",
    ("cuda",),
    "torch SDPA, FlashAttention backend",
)
sdpa_efficient = _backend(
    "sdpa_efficient",
    "EFFICIENT_ATTENTION",
    None,
    "efficient,deterministic=o",
    ("cuda",),
    "torch SDPA, memory-efficient backend",
)
sdpa_cudnn = _backend(
    "sdpa_cudnn", "CUDNN_ATTENTION", None, "cudnn,deterministic=o", ("cuda",), "torch SDPA, cuDNN backend"
)


@register(dialect="flex", supports=FLEX, contract=FLEX_CONTRACT, devices=("cpu",))
def flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """torch's FlexAttention without compilation; torch has no backward pass for it on a CPU."""
    from torch.nn.attention import flex_attention as module

    if 0 in (query.shape[0], query.shape[2], key.shape[2]):
        raise NotImplementedError("FlexAttention takes no batch or length of 0")
    switch = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"  # else every call is traced anew, 0.3 s; torch's own advice for debugging
    before = getattr(module, switch, None)
    setattr(module, switch, True)
    try:
        o, aux = module.flex_attention(
            query, key, value, score_mod, block_mask, scale, enable_gqa, return_aux=module.AuxRequest(lse=return_lse)
        )
    finally:
        setattr(module, switch, before)
    return (o, aux.lse) if return_lse else o  # type: ignore[return-value]
