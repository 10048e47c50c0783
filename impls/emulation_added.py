"""ALiBi and sinks of the emulated kernels: the ways in which kernels compute them, and faults in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .emulation_formats import LOG2E

Posed = Any
Faults = frozenset[str]


def alibi(p: Posed, faults: Faults, before: float = 1.0) -> Tensor | None:
    """-slope * distance in float32, (B|1, Hq, Lq, Lk); `before`: divided by the scale that multiplies it later."""
    if p.alibi is None:
        return None
    (_, Hq, Lq, _), (_, Hkv, Lk, _) = p.q.shape, p.k.shape
    slopes = torch.atleast_2d(p.alibi)
    if "alibi_kv_head" in faults:
        slopes = slopes[:, torch.arange(Hq) // (Hq // Hkv)]
    if "alibi_bf16" in faults:
        slopes = slopes.bfloat16().float()
    at = torch.arange(Lq)[:, None] + (0 if "alibi_top_left" in faults else Lk - Lq)
    apart = at - torch.arange(Lk)
    apart = apart if "alibi_signed" in faults else apart.abs()
    return -(slopes / before)[:, :, None, None] * apart


def sinks(p: Posed, faults: Faults) -> Tensor | None:
    """The logits in float32, (1, Hq, 1, 1)."""
    if p.sinks is None:
        return None
    s: Tensor = p.sinks.float().view(1, -1, 1, 1)
    return s * p.scale if "sink_scaled" in faults else s


def sink_first(sink: Tensor | None, m: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """The running maximum (base 2) and sum as they begin: at the sink."""
    if sink is None:
        return m, total
    return (sink * LOG2E).expand_as(m), (sink > -torch.inf).float().expand_as(total)


def sink_joined(sink: Tensor, m: Tensor, total: Tensor, acc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, sum and accumulator with the sink as one more tile."""
    x = sink * LOG2E
    new = torch.maximum(m, x)
    base = torch.where(torch.isfinite(new), new, torch.zeros(()))
    alpha = torch.where(torch.isfinite(m), torch.exp2(m - base), torch.zeros(()))
    return new, total * alpha + torch.exp2(x - base), acc * alpha


def sink_after(sink: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """o and lse of the keys alone, with the sink put in afterwards."""
    o = o * torch.where(torch.isfinite(lse), torch.sigmoid(lse - sink), torch.zeros(()))
    return o, torch.logaddexp(lse, sink.expand_as(lse))


def sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """dsinks (Hq,): minus the sum over rows of the sink's weight times delta (minus dlse), lse (B, Hq, Lq, 1)."""
    weight = torch.exp2((sink - lse) * LOG2E)
    return -torch.where(weight > 0, weight * delta, torch.zeros(())).sum((0, 2, 3))


def sink_lse(lse: Tensor, sink: Tensor) -> Tensor:
    """lse without the sink: a fault."""
    return lse + torch.log1p(-torch.exp((sink - lse).clamp_max(-1e-7)))
