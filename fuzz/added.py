"""What a case adds to scores beyond a bias: ALiBi told as a bias, and gradients of inputs that no output depends on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .tensors import TORCH_DTYPES, Inputs


def as_bias(inputs: Inputs) -> Inputs | None:
    """The same inputs with the slopes said by a dense bias; None where the dtype cannot hold it exactly, or there is one.

    A bias that rounds would pose another problem than the slopes do. Powers of two (the standard slopes of 1, 2, 4 or 8
    heads) times short distances are exact.
    """
    if inputs.bias is not None or inputs.alibi is None:
        return None
    if inputs.told is None:
        exact = distances(inputs.alibi.cpu(), inputs.case.Lq, inputs.case.Lk)
        dtype = TORCH_DTYPES[inputs.case.dtype]
        if not torch.equal(exact.to(dtype).double(), exact):
            return None
        inputs.told = replace(inputs, bias=inputs.hold("alibi", exact, dtype), alibi=None)
    return inputs.told


def distances(slopes: Tensor, Lq: int, Lk: int) -> Tensor:
    """-slope * |i + Lk - Lq - j| in float64, (B|1, Hq, Lq, Lk), of slopes (Hq,) or (B, Hq)."""
    apart = (torch.arange(Lq)[:, None] + (Lk - Lq) - torch.arange(Lk)).abs()
    return -torch.atleast_2d(slopes).double()[:, :, None, None] * apart


def zero_of(inputs: Inputs, name: str, leaf: Tensor, turned: Callable[[Tensor, str], Tensor]) -> Tensor:
    """The gradient of an input where there are no pairs, which autograd may leave out: zeros.

    Only the sinks still have one there: lse is the sink in a row without keys, so dlse reaches it.
    """
    if name == "sinks" and inputs.dlse is not None:
        live = ~torch.isneginf(leaf.detach())
        total = inputs.dlse.double().sum((0, 2))
        return torch.where(live, total, torch.zeros((), dtype=total.dtype, device=total.device)).to(leaf.dtype)
    zero = torch.zeros_like(leaf)
    return zero if name in ("bias", "sinks") else turned(zero, name)
