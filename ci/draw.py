"""Seeded small problems over adversarial data, for testing the verdict itself.

Independent of fuzz/strategies.py on purpose: what calibrates the oracle is not what feeds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from ..oracles.exact import Problem

F64 = torch.float64
DATA = (
    "normal", "heavy", "outlier", "const_rows", "ties", "huge", "tiny", "altcancel", "onehot", "denormal",
    "offset", "lowrank", "dpcancel", "mixedscale",
)  # fmt: skip
GENERIC = frozenset({"normal", "outlier", "offset", "mixedscale", "heavy"})
KINDS = (
    "none", "none", "causal", "causal", "pad", "random", "block", "bias", "biasinf", "softcap", "causal_softcap", "deadrows",
)  # fmt: skip
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
T = TypeVar("T")


@dataclass(frozen=True)
class Drawn:
    """A problem and what it is: `diagonal` is the key of query 0 when the mask is causal."""

    problem: Problem
    dtype: str
    data: str
    kind: str
    seed: int
    diagonal: int | None = None
    extras: tuple[str, ...] = ()

    @property
    def generic(self) -> bool:
        """Data without ties or structure: the statistical tier judges it."""
        return self.data in GENERIC and not self.extras

    def __str__(self) -> str:
        B, Hq, Hkv, Lq, Lk, D, Dv = self.problem.sizes
        extras = "".join(f" +{e}" for e in self.extras)
        return f"seed {self.seed} {self.dtype} {self.data} {self.kind}{extras} B{B} H{Hq}/{Hkv} L{Lq}x{Lk} D{D}/{Dv}"


class Source:
    """A seeded source of choices and normal numbers."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def integer(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=self.generator))

    def choice(self, options: Sequence[T]) -> T:
        return options[self.integer(0, len(options) - 1)]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=F64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator)


def draw(
    seed: int, dtype: str, *, data: str = "", kind: str = "", group: int = 0, longest: int = 52, shortest: int = 1
) -> Drawn:
    """The problem of a seed: the same everywhere. `group` fixes the query heads per key head."""
    s = Source(seed)
    data = data or s.choice(DATA)
    B, Hkv, G = s.choice([1, 1, 2]), s.choice([1, 1, 2]), s.choice([1, 1, 2, 3])
    if group:
        G, Hkv = group, 2
    Hq, Lq, Lk = Hkv * G, s.integer(shortest, longest), s.integer(shortest, longest)
    if s.integer(0, 2) == 0:
        Lq = Lk
    D = s.choice([4, 8, 16, 24, 32, 64])
    Dv = D if s.integer(0, 3) else s.choice([4, 8, 16, 32])
    tensors = [s.normal(B, Hq, Lq, D), s.normal(B, Hkv, Lk, D), s.normal(B, Hkv, Lk, Dv), s.normal(B, Hq, Lq, Dv)]
    limit = 6.0e4 if dtype == "float16" else 1e6
    q, k, v, do = (x.clamp(-limit, limit).to(DTYPES[dtype]) for x in shaped(s, data, dtype, *tensors))
    scale = s.choice([1 / math.sqrt(D), 1 / math.sqrt(D), 1 / math.sqrt(D), 1.0 / D, 0.37])
    drawn_kind = s.choice(KINDS)
    return _masked(s, Problem(q, k, v, do, scale=scale), Drawn(Problem(q, k, v), dtype, data, kind or drawn_kind, seed))


def shaped(s: Source, data: str, dtype: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    """Normal tensors turned into the data of that name."""
    D, Dv, (B, Hkv, Lk, _), (_, Hq, Lq, _) = q.shape[3], v.shape[3], k.shape, q.shape
    match data:
        case "heavy":
            return tuple(x / (s.normal(*x.shape).abs() ** 0.7 + 0.02) for x in (q, k, v, do))
        case "outlier":
            channel = s.integer(0, D - 1)
            q[..., channel] *= 20
            k[..., channel] *= 10
            v[..., s.integer(0, Dv - 1)] *= 100
        case "const_rows":
            q, k = q[..., :1, :].expand_as(q).clone(), k[..., :1, :].expand_as(k).clone()
            v = v[..., :1, :].expand_as(v).clone() if s.integer(0, 1) else v
        case "ties":
            q, k, v = torch.sign(q) * (q.abs() > 0.7), torch.sign(k) * (k.abs() > 0.7), v.round()
        case "huge":
            q, k = q * s.choice([10, 30, 100]), k * s.choice([10, 30, 100])
        case "tiny":
            e = s.choice([1e-2, 1e-4, 1e-6])
            q, k, v, do = q * e, k * e, v * e, do * e
        case "altcancel":
            sign = torch.tensor([1.0 if j % 2 else -1.0 for j in range(Lk)], dtype=F64)
            v, k = sign[:, None] * 1000 + v, k * 0.05
        case "onehot":
            at_k = torch.randint(0, D, (B, Hkv, Lk), generator=s.generator)
            k = torch.nn.functional.one_hot(at_k, D).double() * (12.0 * math.sqrt(D))
            q = torch.nn.functional.one_hot(torch.randint(0, D, (B, Hq, Lq), generator=s.generator), D).double() * 3
        case _:
            return _shaped_values(s, data, dtype, q, k, v, do)
    return q, k, v, do


def _shaped_values(s: Source, data: str, dtype: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    """The regimes that are about v and do, or about both sides."""
    (B, Hkv, Lk, D), (_, Hq, Lq, _) = k.shape, q.shape
    match data:
        case "denormal":
            e = 3e-6 if dtype == "float16" else 1e-39
            v, do = v * e, do * s.choice([1.0, e])
        case "offset":
            v, do = v + s.choice([10, 100, 1000]), do + s.choice([0, 3])
        case "lowrank":
            base = s.normal(B, Hkv, 1, D)
            q, k, v = base.repeat_interleave(Hq // Hkv, 1) + 0.01 * q, base + 0.01 * k, -v.abs()
        case "dpcancel":
            v, do = v + 100, do * 0.1 + 10
        case "mixedscale":
            q = q * torch.exp(2 * s.normal(B, Hq, Lq, 1))
            v, do = v * torch.exp(3 * s.normal(B, Hkv, Lk, 1)), do * torch.exp(2 * s.normal(B, Hq, Lq, 1))
    return q, k, v, do


def _masked(s: Source, p: Problem, drawn: Drawn) -> Drawn:
    """With the mask, bias or softcap of its kind."""
    B, Hq, _, Lq, Lk, _, _ = p.sizes
    kind = drawn.kind
    bottom_right = bool(s.integer(0, 2))
    diagonal = None
    if kind.startswith("causal"):
        diagonal = Lk - Lq if bottom_right else 0
        p = replace(p, keep=torch.ones(1, 1, Lq, Lk, dtype=torch.bool).tril(diagonal))
    elif kind == "pad":
        p = replace(p, keep=(torch.arange(Lk) < s.integer(1, Lk)).view(1, 1, 1, Lk))
    elif kind == "random":
        p = replace(p, keep=s.uniform(B, 1, Lq, Lk) < s.choice([0.1, 0.5, 0.9]))
    elif kind == "block":
        size = s.choice([4, 16])
        tiles = s.uniform(-(-Lq // size), -(-Lk // size)) < 0.5
        p = replace(p, keep=tiles.repeat_interleave(size, 0)[:Lq].repeat_interleave(size, 1)[:, :Lk].view(1, 1, Lq, Lk))
    elif kind == "deadrows":
        p = replace(p, keep=(s.uniform(1, 1, Lq, 1) < 0.6).expand(1, 1, Lq, Lk))
    elif kind in ("bias", "biasinf"):
        p = replace(p, bias=(s.normal(1, s.choice([1, Hq]), Lq, Lk) * s.choice([0.1, 1, 8])).to(p.q.dtype))
        if kind == "biasinf":
            assert p.bias is not None
            p = replace(p, bias=p.bias.masked_fill(s.uniform(*p.bias.shape) < 0.3, -math.inf))
    elif kind == "sinks":
        p = replace(p, sinks=s.normal(Hq).to(p.q.dtype))
    elif kind.startswith("alibi"):
        p = replace(p, alibi=s.uniform(Hq))
    if "softcap" in kind:
        p = replace(p, softcap=s.choice([5.0, 30.0]))
    return replace(drawn, problem=p, diagonal=diagonal)


EXTRAS = ("dlse", "dropout", "fill_min", "fill_-1e4", "scale", "softcap", "broadcast_bias", "large_rows")


MORE = ("alibi", "sinks")
"""Extras with a generator of their own, so that a seed means what it meant without them."""


def with_extras(drawn: Drawn) -> Drawn:
    """The same problem with features on top, chosen by its seed.

    Gradient through lse, dropout, additive masks of finite values, other scales, a small softcap, a broadcast bias, rows
    whose scores are larger by up to 1e3, ALiBi, sinks.
    """
    chosen: tuple[str, ...] = ()
    for s, extras in ((Source(drawn.seed + (1 << 40)), EXTRAS), (Source(drawn.seed + (1 << 43)), MORE)):
        some = tuple(e for e in extras if s.integer(0, 4) == 0)
        for extra in some:
            drawn = replace(drawn, problem=_extra(s, drawn.problem, extra))
        chosen += some
    return replace(drawn, extras=chosen)


def _extra(s: Source, p: Problem, extra: str) -> Problem:
    B, Hq, _, Lq, Lk, D, _ = p.sizes
    match extra:
        case "dlse":
            return replace(p, dlse=s.normal(B, Hq, Lq).float() * s.choice([0.1, 1.0, 30.0]))
        case "dropout":
            rate = s.choice([0.1, 0.5, 0.9])
            return replace(p, dropout=(s.uniform(B, Hq, Lq, Lk) >= rate).to(F64) / (1 - rate))
        case "fill_min" | "fill_-1e4":
            fill = torch.finfo(p.q.dtype).min if extra == "fill_min" else -1e4
            base = torch.zeros(1, 1, Lq, Lk, dtype=p.q.dtype) if p.bias is None else p.bias
            return replace(p, bias=base.masked_fill(s.uniform(*base.shape) < s.choice([0.2, 0.8]), fill))
        case "scale":
            return replace(p, scale=s.choice([0.0, -(D**-0.5), 1e-20, 50.0, -3.0]))
        case "softcap":
            return replace(p, softcap=s.choice([0.1, 1.0, 50.0]))
        case "broadcast_bias" if p.bias is None:
            shape = [s.choice([1, n]) for n in (B, Hq, Lq, Lk)]
            return replace(p, bias=s.normal(*shape).to(p.q.dtype))
        case "large_rows":
            shift = 10.0 ** torch.randint(0, 4, (B, Hq, Lq, 1), generator=s.generator)
            return replace(p, q=(p.q.double() * shift).clamp(-6e4, 6e4).to(p.q.dtype))
        case "alibi":
            slopes = s.uniform(*s.choice([(Hq,), (B, Hq)])) * s.choice([0.1, 1.0, 1.0, -1.0, 30.0])
            return replace(p, alibi=slopes)
        case "sinks":
            logits = s.normal(Hq) * s.choice([1, 1, 8, 60, 1e3]) + s.choice([0, 0, -8])
            hidden = s.uniform(Hq) < s.choice([0.0, 0.0, 0.5])
            return replace(p, sinks=logits.masked_fill(hidden, -math.inf).to(p.q.dtype))
    return p
