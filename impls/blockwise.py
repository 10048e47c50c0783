"""FlashAttention in PyTorch: tiles, online softmax, and a backward pass that recomputes the probabilities.

Dao, Fu, Ermon, Rudra, Re 2022, algorithms 1, 2 and 4, with what they leave out: grouped heads, values of another width,
softcap, additive bias and its gradient, hashed dropout, and the gradient through lse. Tiles are Br x Bc, the paper's names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..fuzz.masks import Full, Mask
from ..fuzz.region import Region
from ..fuzz.tensors import dropout_keep
from . import register

BR, BC = 64, 16
"""Default tile height and width: narrow, so that small cases take several key tiles."""
REGION = Region(dtypes=("float32", "float16", "bfloat16", "float64"), max_head_dim=1 << 30)


@register(dialect="native", supports=REGION, contract=f"ieee,masked_nonfinite=may_leak,kv_tile={BC},q_tile={BR}")
def blockwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout: float = 0.0,
    dropout_seed: int = 0,
    return_lse: bool = False,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
    Br: int = BR,
    Bc: int = BC,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v, never holding more than a Br x Bc tile of scores per head; differentiable by hand.

    q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv) -> o (B, Hq, Lq, Dv) and, asked for, lse (B, Hq, Lq).
    Scores are softcap * tanh(scale q.k / softcap), plus bias, minus slope * distance for alibi (Hq,) or (B, Hq), then masked.
    sinks (Hq,) are logits of one key more in each row, of value zero, that lse counts. Rows with no allowed key give 0 and
    lse -inf.
    """
    B, Hq, Lq, D = q.shape
    hidden = None if mask is None or mask == Full() else ~mask.dense(B, Hq, Lq, k.shape[2], q.device)
    scale = D**-0.5 if scale is None else scale
    problem = Problem(B, Hq, k.shape[1], Lq, k.shape[2], hidden, scale, softcap, dropout, dropout_seed, Br, Bc, alibi)
    o, lse = _Blockwise.apply(q, k, v, bias, sinks, problem)  # type: ignore[no-untyped-call]
    return (o, lse) if return_lse else o


@dataclass(frozen=True)
class Problem:
    """Sizes, mask and numbers that every tile needs; `hidden` and the bias have size 1 on axes they do not depend on."""

    B: int
    Hq: int
    Hkv: int
    Lq: int
    Lk: int
    hidden: Tensor | None
    scale: float
    softcap: float
    dropout: float
    seed: int
    Br: int
    Bc: int
    alibi: Tensor | None = None

    def query_tiles(self) -> Iterator[slice]:
        """Rows of each query tile."""
        return (slice(i, min(i + self.Br, self.Lq)) for i in range(0, self.Lq, self.Br))

    def key_tiles(self) -> Iterator[slice]:
        """Columns of each key tile."""
        return (slice(j, min(j + self.Bc, self.Lk)) for j in range(0, self.Lk, self.Bc))

    def skips(self, i: slice, j: slice) -> bool:
        """No query of the tile may see a key of the tile."""
        return self.hidden is not None and bool(_part(self.hidden, i, j).all())

    def distance(self, i: slice, j: slice, dtype: torch.dtype) -> Tensor:
        """-slope * distance of the tile, (B|1, Hq, Br, Bc)."""
        assert self.alibi is not None
        rows, keys = (torch.arange(x.start, x.stop, device=self.alibi.device) for x in (i, j))
        slopes = torch.atleast_2d(self.alibi).to(dtype)[..., None, None]
        return -slopes * (rows[:, None] + (self.Lk - self.Lq) - keys).abs()

    def drop(self, i: slice, j: slice, like: Tensor) -> Tensor:
        """What dropout multiplies the tile's probabilities by, grouped like them: 0 or 1/(1 - dropout)."""
        sizes = (self.B, self.Hq, i.stop - i.start, j.stop - j.start)
        keep = dropout_keep(self.seed, *sizes, self.dropout, like.device, first=(0, 0, i.start, j.start))
        return self.grouped(keep.to(like.dtype) / (1 - self.dropout))

    def grouped(self, x: Tensor) -> Tensor:
        """(B, Hq, L, n) as (B Hkv, G L, n): the query heads of a key head under one another, so that nothing is repeated."""
        return x.reshape(self.B * self.Hkv, self.Hq // self.Hkv * x.shape[2], x.shape[3])

    def heads(self, x: Tensor) -> Tensor:
        """The inverse of `grouped`."""
        return x.view(self.B, self.Hq, x.shape[1] * self.Hkv // self.Hq, x.shape[2])


def _part(x: Tensor, i: slice, j: slice) -> Tensor:
    """The tile of a (B|1, Hq|1, Lq|1, Lk|1) tensor."""
    return x[:, :, i if x.shape[2] > 1 else slice(None), j if x.shape[3] > 1 else slice(None)]


def _wide(x: Tensor) -> Tensor:
    """In the dtype of scores and accumulators; products of two 16-bit numbers are exact in it."""
    return x.double() if x.dtype == torch.float64 else x.float()


def _keys(x: Tensor) -> Tensor:
    """(B, Hkv, Lk, n) as (B Hkv, Lk, n)."""
    return _wide(x).flatten(0, 1)


def _by_keys(p: Problem, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """For every key tile its columns, and of each tensor (B Hkv, Lk, n) the part (B Hkv, Bc, n), a view."""
    return zip(p.key_tiles(), *(x.split(p.Bc, 1) for x in tensors), strict=False)


class Scores(NamedTuple):
    """A tile's final scores (masked ones -inf) and tanh(scaled / softcap), None without softcap."""

    s: Tensor
    tanh: Tensor | None


def _scores(p: Problem, q: Tensor, k: Tensor, bias: Tensor | None, i: slice, j: slice) -> Scores:
    """Scores of the tile from grouped queries q (B Hkv, G Br, D) and keys k (B Hkv, Bc, D)."""
    s = torch.bmm(q, k.mT) * p.scale
    tanh = None
    if p.softcap:
        tanh = torch.tanh(s / p.softcap)
        s = p.softcap * tanh
    if bias is None and p.hidden is None and p.alibi is None:
        return Scores(s, tanh)
    s = p.heads(s)
    if p.alibi is not None:
        s = s + p.distance(i, j, s.dtype)
    if bias is not None:
        s = s + _part(bias, i, j)
    if p.hidden is not None:
        s = s.masked_fill(_part(p.hidden, i, j), -math.inf)
    return Scores(p.grouped(s), tanh)


def forward(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(o, lse): for each query tile, one pass over the key tiles with a running maximum m and sum l (algorithm 2).

    A sink is where m and l begin: the sink itself, and 1.
    """
    wq, wk, wv, wbias = _wide(q), _keys(k), _keys(v), None if bias is None else _wide(bias)
    o = q.new_empty(p.B, p.Hq, p.Lq, v.shape[3])
    lse = wq.new_empty(p.B, p.Hq, p.Lq)
    for i in p.query_tiles():
        qi = p.grouped(wq[:, :, i])
        m = wq.new_full((*qi.shape[:2], 1), -math.inf)
        l = torch.zeros_like(m)
        if sinks is not None:
            m = p.grouped(_wide(sinks).view(1, -1, 1, 1).expand(p.B, p.Hq, i.stop - i.start, 1))
            l = (m > -math.inf).to(m.dtype)
        acc = wq.new_zeros(*qi.shape[:2], v.shape[3])
        for j, kj, vj in _by_keys(p, wk, wv):
            if p.skips(i, j):
                continue
            s = _scores(p, qi, kj, wbias, i, j).s
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            m_safe = m_new.masked_fill(m_new == -math.inf, 0.0)  # exp(-inf - -inf) is nan
            prob = torch.exp(s - m_safe)
            decay = torch.exp(m - m_safe)
            l = l * decay + prob.sum(-1, keepdim=True)
            if p.dropout:
                prob = prob * p.drop(i, j, prob)
            acc = torch.baddbmm(acc * decay, _wide(prob.to(q.dtype)), vj)
            m = m_new
        o[:, :, i] = p.heads(acc / l.masked_fill(l == 0, 1.0))
        lse[:, :, i] = p.heads(m + torch.log(l)).squeeze(-1)
    return o, lse


class Rows(NamedTuple):
    """What the backward pass keeps of a query tile, grouped: q, do, and per row lse (0 in dead rows) and delta; and dq."""

    i: slice
    q: Tensor
    do: Tensor
    lse: Tensor
    delta: Tensor
    dq: Tensor


def _rows(p: Problem, q: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> list[Rows]:
    """Every query tile; delta = rowsum(do * o) - dlse, since d lse / d s is p."""
    wq, wdo = _wide(q), _wide(do)
    delta = (wdo * o).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse.unsqueeze(-1)
    safe = lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)
    whole = (wq, wdo, safe, delta, torch.zeros_like(wq))
    tiles = zip(*(x.split(p.Br, 2) for x in whole), strict=True)
    return [Rows(i, *map(p.grouped, tile)) for i, tile in zip(p.query_tiles(), tiles, strict=False)]


def backward(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(dq, dk, dv, dbias): for each key tile, one pass over the query tiles (algorithm 4); accumulators stay wide."""
    wbias = None if bias is None else _wide(bias)
    rows = _rows(p, q, o, lse, do, dlse)
    wk, wv = _keys(k), _keys(v)
    dk, dv = torch.zeros_like(wk), torch.zeros_like(wv)
    dbias = None if wbias is None else wbias.new_zeros(wbias.shape)
    for j, kj, vj, dkj, dvj in _by_keys(p, wk, wv, dk, dv):
        for r in rows:
            if p.skips(r.i, j):
                continue
            s, tanh = _scores(p, r.q, kj, wbias, r.i, j)
            prob = torch.exp(s - r.lse)
            dprob = torch.bmm(r.do, vj.mT)
            dropped = prob
            if p.dropout:
                drop = p.drop(r.i, j, prob)
                dropped, dprob = prob * drop, dprob * drop
            dvj.baddbmm_(_wide(dropped.to(q.dtype)).mT, r.do)
            ds = prob * (dprob - r.delta)
            if dbias is not None:
                part = _part(dbias, r.i, j)
                part += p.heads(ds).sum_to_size(part.shape)
            if tanh is not None:
                ds = ds * (1 - tanh * tanh)
            ds = _wide(ds.to(q.dtype))
            r.dq.baddbmm_(ds, kj)
            dkj.baddbmm_(ds.mT, r.q)
    dk, dv = (dk * p.scale).view(k.shape).to(k.dtype), dv.view(v.shape).to(v.dtype)
    return _join(p, q, rows), dk, dv, None if dbias is None or bias is None else dbias.to(bias.dtype)


def sink_gradient(sinks: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> Tensor:
    """dsinks (Hq,): minus the sum over rows of the sink's probability times delta."""
    delta = (_wide(do) * o).sum(-1)
    delta = delta if dlse is None else delta - dlse
    prob = torch.exp(_wide(sinks)[:, None] - lse).masked_fill(lse == -math.inf, 0.0)
    return -(prob * delta).sum((0, 2)).to(sinks.dtype)


def _join(p: Problem, q: Tensor, rows: list[Rows]) -> Tensor:
    """dq from the grouped accumulators of its query tiles."""
    if not rows:
        return torch.zeros_like(q)
    return (torch.cat([p.heads(r.dq) for r in rows], 2) * p.scale).to(q.dtype)


class _Blockwise(torch.autograd.Function):
    """Ties `forward` and `backward` to autograd; outputs o and lse are both differentiable."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, problem: Problem
    ) -> tuple[Tensor, Tensor]:
        o, lse = forward(problem, q, k, v, bias, sinks)
        ctx.save_for_backward(q, k, v, bias, sinks, o, lse)
        ctx.problem = problem
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, bias, sinks, o, lse = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        grads: tuple[Tensor | None, ...] = backward(ctx.problem, q, k, v, bias, o, lse, do, dlse)
        grads = (*grads, None if sinks is None else sink_gradient(sinks, o, lse, do, dlse))
        return *(g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)), None
