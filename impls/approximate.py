"""Attention that is approximate on purpose, as negative controls: a harness for exact attention must reject it.

Performer: Choromanski et al., Rethinking Attention with Performers, ICLR 2021 (arXiv 2009.14794), positive orthogonal random features.
Linformer: Wang et al., Linformer: Self-Attention with Linear Complexity, 2020 (arXiv 2006.04768), keys and values projected along the
length.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ..fuzz.region import Region
from . import register

FEATURES = 256
"""Random features of Performer: its error falls with one over the root of them."""
PROJECTED = 64
"""Keys that Linformer keeps."""
REGION = Region(
    masks=("none",), bias=False, bias_grad=False, softcap=False, dropout=False, lse=False, lse_grad=False,
    alibi=False, sinks=False, sinks_grad=False, min_len=1, max_len=4096,
)  # fmt: skip


@register(dialect="native", supports=REGION, contract="ieee,masked_nonfinite=may_leak")
def performer(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """phi(q) (phi(k)^T v) over phi(q) (phi(k)^T 1), with exp(q.k) = E phi(q).phi(k); linear in the lengths.

    q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv) -> o (B, Hq, Lq, Dv).
    """
    scale = q.shape[3] ** -0.5 if scale is None else scale
    wq, wk, wv = _wide(q, k, v)
    w = _orthogonal(q.shape[3]).to(q.device)
    root = math.sqrt(abs(scale))
    phi_q, phi_k = _features(wq * root * (-1 if scale < 0 else 1), w), _features(wk * root, w)
    o = phi_q @ (phi_k.mT @ wv) / (phi_q @ phi_k.sum(-2).unsqueeze(-1))
    return o.to(q.dtype)


@register(dialect="native", supports=REGION, contract="ieee,masked_nonfinite=may_leak")
def linformer(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """softmax(scale q (E k)^T) E v, with E a random projection of Lk keys onto at most PROJECTED.

    q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv) -> o (B, Hq, Lq, Dv).
    """
    wq, wk, wv = _wide(q, k, v)
    E = _projection(k.shape[2]).to(q.device)
    s = wq @ (E @ wk).mT * (q.shape[3] ** -0.5 if scale is None else scale)
    return (s.softmax(-1) @ (E @ wv)).to(q.dtype)


def _wide(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float32 tensors with the keys and values of each query head."""
    group = q.shape[1] // k.shape[1]
    return q.float(), k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)


def _features(x: Tensor, w: Tensor) -> Tensor:
    """exp(w x - |x|^2 / 2), up to a factor that cancels: positive features of the softmax kernel."""
    return torch.exp(x @ w.mT - x.square().sum(-1, keepdim=True) / 2)


@lru_cache(maxsize=64)
def _orthogonal(D: int) -> Tensor:
    """(FEATURES, D): rows orthogonal within blocks of D, with the lengths of normal vectors."""
    generator = torch.Generator().manual_seed(D)
    blocks = [
        torch.linalg.qr(torch.randn(D, D, generator=generator)).Q
        * torch.randn(D, D, generator=generator).norm(dim=1, keepdim=True)
        for _ in range(-(-FEATURES // D))
    ]
    return torch.cat(blocks)[:FEATURES]


@lru_cache(maxsize=64)
def _projection(Lk: int) -> Tensor:
    """(min(PROJECTED, Lk), Lk), normal with variance one over its rows."""
    rows = min(PROJECTED, Lk)
    return torch.randn(rows, Lk, generator=torch.Generator().manual_seed(Lk)) / math.sqrt(rows)
