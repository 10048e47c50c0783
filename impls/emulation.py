"""Attention in float32 with every rounding explicit: conforming kernels of many kinds, and the same with one fault.

These stand in for real kernels where the verdict itself is tested: their arithmetic is known exactly, so the limits must
accept every conforming one and reject a faulty one. They are not registered as targets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .emulation_added import alibi, sink_after, sink_first, sink_gradient, sink_joined, sink_lse, sinks
from .emulation_formats import EXP2, F32, LN2, LOG2E, fused_dot, tf32_nearest, through, truncated

Posed = Any  # a problem as oracles/exact.py states it; implementations do not import oracles


@dataclass(frozen=True)
class Arithmetic:
    """How an emulation computes. Every combination without faults conforms to the contract that states it.

    `algorithm`: flash (tiles, online softmax, recomputing backward), textbook (whole matrices, float32 inside), narrow
    (textbook with every intermediate in the dtype of q). `dots`: operands of float32 dots. `fused_bits`: fraction bits of
    a truncating tensor core (25 on Hopper), 0 for float32 sums. `lazy`: the running maximum may lag by this, in base 2.
    `delta`: do.o from the stored o, do.o32 from the float32 o, p.dp. `diagonal`: key of query 0 in a causal mask, which
    the causal faults move.
    """

    algorithm: str = "flash"
    q_tile: int = 16
    kv_tile: int = 16
    order: str = "forward"  # of the key tiles: forward, reverse, random
    p_dtype: torch.dtype | None = None  # None: the dtype of q
    ds_dtype: torch.dtype | None = None
    dots: str = "ieee"  # ieee, tf32, tf32_rz, bf16
    fused_bits: int = 0
    fused_k: int = 16
    l_rounded: bool = False
    exp: str = "exp2"  # exp2, exp, cubic, quadratic, half
    lazy: float = 0.0
    delta: str = "do.o"
    q_prescaled: bool = False
    faults: frozenset[str] = frozenset()
    seed: int = 0
    diagonal: int | None = None
    sink: str = "first"  # the running maximum begins at the sink; last: a tile more; after: o and lse corrected by it
    ds_scaled: bool = False  # dS is multiplied by the scale before its cast
    alibi_scaled: bool = False  # slopes are divided by the scale and added before it


class _Run:
    """One problem under one arithmetic: operands in float32, key and value heads repeated, results accumulated."""

    def __init__(self, p: Posed, a: Arithmetic) -> None:
        self.p, self.a, self.faults = p, a, a.faults
        self.io = p.q.dtype
        self.B, self.Hq, self.Lq, self.D = p.q.shape
        self.Hkv, self.Lk, self.Dv = p.k.shape[1], p.k.shape[2], p.v.shape[3]
        self.G = self.Hq // self.Hkv
        self.q, self.k, self.v = p.q.float(), self.spread(p.k.float()), self.spread(p.v.float())
        self.do = torch.zeros(self.B, self.Hq, self.Lq, self.Dv) if p.do is None else p.do.float()
        self.keep = self.mask()
        self.z = None if p.dropout is None else p.dropout.float()
        self.dlse = None if p.dlse is None else p.dlse.float().unsqueeze(-1)
        self.scale = float(torch.tensor(p.scale).bfloat16()) if "scale_bf16const" in self.faults else p.scale
        self.sink = sinks(p, a.faults)
        early = a.alibi_scaled and 1e-3 < abs(p.scale) < 1e3 and not p.softcap
        early = early or "alibi_before_softcap" in a.faults
        self.early = alibi(p, a.faults, self.scale) if early else None
        self.late = None if early else alibi(p, a.faults)
        self.p_dtype = torch.bfloat16 if "p_bf16" in self.faults else a.p_dtype or self.io
        self.ds_dtype = torch.bfloat16 if "ds_bf16" in self.faults else a.ds_dtype or self.io

    def spread(self, x: Tensor) -> Tensor:
        """Key heads repeated to query heads."""
        wrong = "gqa_map" in self.faults and self.G > 1
        return x if self.G == 1 else x.repeat(1, self.G, 1, 1) if wrong else x.repeat_interleave(self.G, 1)

    def fold(self, x: Tensor) -> Tensor:
        """Query heads summed to key heads."""
        if self.G == 1:
            return x
        if "gqa_map" in self.faults:
            return x.view(self.B, self.G, self.Hkv, *x.shape[2:]).sum(1)
        groups = x.view(self.B, self.Hkv, self.G, *x.shape[2:])
        if "gqa_first" in self.faults:
            return groups[:, :, 0]
        if "gqa_lowp" in self.faults:
            return groups.to(torch.bfloat16 if self.io == F32 else self.io).sum(2).float()
        return groups.sum(2)

    def mask(self) -> Tensor:
        """Who may attend whom, (B, Hq, Lq, Lk), with the faults that move it."""
        keep = torch.ones(self.B, self.Hq, self.Lq, self.Lk, dtype=torch.bool)
        keep = keep if self.p.keep is None else self.p.keep.expand_as(keep).clone()
        if self.p.bias is not None:
            keep &= self.p.bias > -math.inf
        keep = self.moved_diagonal(keep)
        if "miss_last_key" in self.faults and self.Lk:
            keep[..., self.Lk - 1] = False
        if "drop_one" in self.faults:
            keep[0, 0, self.Lq // 2, self.Lk // 2] = False
        return keep

    def moved_diagonal(self, keep: Tensor) -> Tensor:
        at = self.a.diagonal
        if at is None:
            return keep
        moves = {"causal_plus1": at + 1, "causal_minus1": at - 1, "causal_tl": self.Lk - self.Lq - at}
        for fault, diagonal in moves.items():
            if fault in self.faults:
                return torch.ones_like(keep).tril(diagonal)
        if "causal_tile_edge" in self.faults and self.Lk > self.a.kv_tile:
            for i in range(0, self.Lq, self.a.q_tile):
                if 0 <= i + at < self.Lk:
                    keep[..., i, i + at] = False
        return keep

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        """x @ y with the operands and the accumulation of the arithmetic."""
        dots = "tf32" if "tf32" in self.faults else self.a.dots
        if dots == "tf32":
            x, y = tf32_nearest(x), tf32_nearest(y)
        elif dots == "tf32_rz":
            x, y = truncated(x, 13), truncated(y, 13)
        elif dots == "bf16":
            x, y = x.bfloat16().float(), y.bfloat16().float()
        return fused_dot(x, y, self.a.fused_bits, self.a.fused_k) if self.a.fused_bits else x @ y

    def exp2(self, x: Tensor) -> Tensor:
        kinds = {"exp_fp16": "half", "exp_poly3": "cubic", "exp_poly2": "quadratic"}
        return EXP2[next((kind for fault, kind in kinds.items() if fault in self.faults), self.a.exp)](x)

    def scores(self, rows: slice, keys: slice) -> tuple[Tensor, Tensor | None]:
        """Masked scores of a tile, and the derivative of the softcap."""
        q, k = self.q[..., rows, :], self.k[..., keys, :].transpose(-1, -2)
        if self.a.q_prescaled or "q_prescale" in self.faults:
            z = self.dot(through(q * self.scale, torch.bfloat16 if self.io == F32 else self.io), k)
        else:
            z = self.dot(q, k)
            z = (z if self.early is None else z + self.early[..., rows, keys]) * self.scale
        z = through(z, torch.bfloat16 if "s_lowp" in self.faults else None)
        s, g = z, None
        if self.p.softcap:
            tanh = torch.tanh(z / self.p.softcap)
            s, g = tanh * self.p.softcap, torch.ones_like(tanh) if "no_dtanh" in self.faults else 1 - tanh * tanh
        if self.late is not None:
            s = s + self.late[..., rows, keys]
        if self.p.bias is not None:
            bias = self.p.bias.expand(self.B, self.Hq, self.Lq, self.Lk)[..., rows, keys].float()
            s = s + (torch.where(torch.isinf(bias), bias, bias * LN2) if "bias_log2" in self.faults else bias)
        forbidden = -1e4 if "mask_finite" in self.faults else -math.inf
        return torch.where(self.keep[..., rows, keys], s, torch.tensor(forbidden)), g

    def cast_p(self, p: Tensor) -> Tensor:
        if "p_e4m3" in self.faults:
            return p.to(torch.float8_e4m3fn).float()
        if "p_rz" in self.faults:
            return truncated(p, 16 if self.io == torch.bfloat16 else 13)
        return through(p, self.p_dtype)

    def cast_ds(self, ds: Tensor) -> Tensor:
        if self.a.ds_scaled and self.p.scale:
            return through(ds * self.p.scale, self.ds_dtype) / self.p.scale
        return (
            truncated(ds, 16 if self.io == torch.bfloat16 else 13)
            if "ds_rz" in self.faults
            else through(ds, self.ds_dtype)
        )

    def tiles(self, length: int, size: int) -> list[slice]:
        return [slice(i, min(length, i + size)) for i in range(0, length, size)]

    def key_tiles(self) -> list[slice]:
        tiles = self.tiles(self.Lk, self.a.kv_tile)
        order = torch.arange(len(tiles)).flip(0) if self.a.order == "reverse" else torch.arange(len(tiles))
        if self.a.order == "random":
            order = torch.randperm(len(tiles), generator=torch.Generator().manual_seed(self.a.seed))
        return [tiles[i] for i in order.tolist()]

    def drop(self, x: Tensor, rows: slice, keys: slice) -> Tensor:
        """Times the dropout multiplier."""
        return x if self.z is None else x * self.z[..., rows, keys]

    def forward(self) -> tuple[Tensor, Tensor]:
        """o in float32 and lse (B, Hq, Lq, 1)."""
        o, lse = torch.zeros(self.B, self.Hq, self.Lq, self.Dv), torch.full((self.B, self.Hq, self.Lq, 1), -math.inf)
        for rows in self.tiles(self.Lq, self.a.q_tile):
            o[..., rows, :], lse[..., rows, :] = self.row_tile(rows)
        if self.sink is not None and "sink_not_in_lse" in self.faults:
            lse = sink_lse(lse, self.sink)
        for fault, dtype in (("lse_bf16", torch.bfloat16), ("lse_fp16", torch.float16)):
            lse = through(lse, dtype) if fault in self.faults else lse
        return o, lse

    def row_tile(self, rows: slice) -> tuple[Tensor, Tensor]:
        shape = (self.B, self.Hq, rows.stop - rows.start)
        m, total, acc = torch.full((*shape, 1), -math.inf), torch.zeros(*shape, 1), torch.zeros(*shape, self.Dv)
        tiles = self.key_tiles()
        if self.a.sink == "first":
            m, total = sink_first(self.sink, m, total)
        for index, keys in enumerate(tiles):
            x = self.padded(self.scores(rows, keys)[0] * LOG2E, keys, 0.0)
            new = torch.maximum(m, x.amax(-1, keepdim=True))
            if self.a.lazy and index:
                new = torch.where((new - m <= self.a.lazy) & torch.isfinite(m), m, new)
            base = torch.where(torch.isfinite(new), new, torch.zeros(()))
            p = self.exp2(x - base)
            alpha = torch.where(torch.isfinite(m), self.exp2(m - base), torch.zeros(()))
            last = len(tiles) > 1 and index == len(tiles) - 1
            rounded = self.a.l_rounded or "l_rounded" in self.faults
            summed = (self.cast_p(p) if rounded else p).sum(-1, keepdim=True)
            total = summed + (total if last and "l_norescale_last" in self.faults else total * alpha)
            acc = acc if last and "acc_norescale_last" in self.faults else acc * alpha
            pv = self.dot(self.cast_p(self.drop(p, rows, keys)), self.padded(self.v[..., keys, :].mT, keys, 0.0).mT)
            acc, m = self.accumulator(acc + pv, "acc"), new
            if self.sink is not None and index and "sink_per_tile" in self.faults:
                total = total + self.exp2(self.sink * LOG2E - base)
        if self.sink is not None and self.a.sink == "last":
            m, total, acc = sink_joined(self.sink, m, total, acc)
        return self.finished(acc, total, m, len(tiles))

    def padded(self, x: Tensor, keys: slice, fill: float) -> Tensor:
        """The tail tile with padding keys that nobody masked, when that is the fault."""
        short = self.a.kv_tile - (keys.stop - keys.start)
        return torch.nn.functional.pad(x, (0, short), value=fill) if short and "tail_pad" in self.faults else x

    def accumulator(self, x: Tensor, name: str) -> Tensor:
        for fault, dtype in (
            (f"{name}_bf16", torch.bfloat16),
            (f"{name}_fp16", torch.float16),
            (f"{name}_bf16acc", torch.bfloat16),
        ):
            x = through(x, dtype) if fault in self.faults else x
        return x

    def finished(self, acc: Tensor, total: Tensor, m: Tensor, tiles: int) -> tuple[Tensor, Tensor]:
        dead = total == 0
        divisor = torch.where(dead, torch.ones(()), total)
        base = torch.where(torch.isfinite(m), m, torch.zeros(()))
        io = torch.bfloat16 if self.io == F32 else self.io
        o = acc * through(1 / divisor, io) if "o_norm_lowp" in self.faults else acc / divisor
        lse = (
            base * LN2 + torch.log2(divisor)
            if "lse_ln2" in self.faults and tiles > 1
            else (base + torch.log2(divisor)) * LN2
        )
        o, lse = torch.where(dead, torch.zeros(()), o), torch.where(dead, torch.full((), -math.inf), lse)
        return sink_after(self.sink, o, lse) if self.sink is not None and self.a.sink == "after" else (o, lse)

    def stored_o(self, o: Tensor) -> Tensor:
        dropped = {torch.bfloat16: 16, torch.float16: 13}.get(self.io, 0)
        return (truncated(o, dropped) if "o_rz" in self.faults and dropped else o).to(self.io)

    def delta(self, o: Tensor, stored: Tensor, lse: Tensor) -> Tensor:
        if self.a.delta == "p.dp":
            delta = torch.zeros_like(lse)
            for rows, keys in self.pairs():
                p = torch.exp2((self.scores(rows, keys)[0] - lse[..., rows, :]) * LOG2E)
                dp = self.drop(self.dot(self.do[..., rows, :], self.v[..., keys, :].mT), rows, keys)
                delta[..., rows, :] += (p * dp).sum(-1, keepdim=True)
        else:
            delta = (self.do * (stored.float() if self.a.delta == "do.o" else o)).sum(-1, keepdim=True)
        delta = torch.zeros_like(delta) if "no_delta" in self.faults else delta
        delta = delta if self.dlse is None else delta - self.dlse
        return through(delta, torch.bfloat16) if "delta_bf16" in self.faults else delta

    def pairs(self) -> Iterator[tuple[slice, slice]]:
        for keys in self.key_tiles():
            for rows in self.tiles(self.Lq, self.a.q_tile):
                yield rows, keys

    def backward(self, o: Tensor, stored: Tensor, lse: Tensor) -> dict[str, Tensor]:
        lse = through(lse, torch.bfloat16) if "lse_bwd_bf16" in self.faults else lse
        lse = torch.where(torch.isfinite(lse), lse, torch.full((), math.inf))
        delta = self.delta(o, stored, lse)
        dq = torch.zeros(self.B, self.Hq, self.Lq, self.D)
        dk, dv = torch.zeros(self.B, self.Hq, self.Lk, self.D), torch.zeros(self.B, self.Hq, self.Lk, self.Dv)
        dbias = None if self.p.bias is None else torch.zeros(self.B, self.Hq, self.Lq, self.Lk)
        last_rows, key_tiles = self.tiles(self.Lq, self.a.q_tile)[-1:], self.key_tiles()
        for rows, keys in self.pairs():
            s, g = self.scores(rows, keys)
            p = self.exp2(s * LOG2E - lse[..., rows, :] * LOG2E)
            do, final = self.do[..., rows, :], [rows] == last_rows
            used = -1 if "dv_miss_row" in self.faults and final else None
            dv[..., keys, :] += self.dot(self.cast_p(self.drop(p, rows, keys))[..., :used, :].mT, do[..., :used, :])
            dp = self.dot(do, self.v[..., keys, :].mT)
            dp = self.drop(through(dp, torch.bfloat16 if "dp_bf16" in self.faults else None), rows, keys)
            ds = (self.cast_p(p) if "ds_from_pc" in self.faults else p) * (dp - delta[..., rows, :])
            if dbias is not None:
                dbias[..., rows, keys] = ds
            ds = self.cast_ds(ds if g is None else ds * g)
            scale = 1.0 if "dk_noscale_tile" in self.faults and final and keys == key_tiles[-1] else self.p.scale
            if not ("dk_miss_qtile" in self.faults and final):
                dk[..., keys, :] += self.dot(ds.mT, self.q[..., rows, :]) * scale
            step = self.dot(ds, self.k[..., keys, :]) * self.p.scale
            lost = "dq_race" in self.faults and rows.start == 0 and keys == (key_tiles + key_tiles)[1]
            dq[..., rows, :] = self.accumulator(step if lost else dq[..., rows, :] + step, "dq")
            dk[..., keys, :] = self.accumulator(dk[..., keys, :], "dk")
            dv[..., keys, :] = self.accumulator(dv[..., keys, :], "dv")
        out = {"dq": dq, "dk": self.fold(dk), "dv": self.fold(dv)}
        if dbias is not None and self.p.bias is not None:
            out["dbias"] = dbias.sum_to_size(self.p.bias.shape)
        if self.sink is not None:
            out["dsinks"] = sink_gradient(self.sink, lse, delta)
        return {name: x.to(self.io) for name, x in out.items()}

    def textbook(self) -> dict[str, Tensor]:
        """Unblocked; `narrow` stores scores, P, dP and dS in the dtype of q."""
        kept = self.io if self.a.algorithm == "narrow" else None
        z = through(through(self.dot(self.q, self.k.mT), kept) * self.scale, kept)
        s, g = z, None
        if self.p.softcap:
            tanh = torch.tanh(z / self.p.softcap)
            s, g = through(tanh * self.p.softcap, kept), 1 - tanh * tanh
        alibi_term = alibi(self.p, self.faults)
        s = s if alibi_term is None else through(s + alibi_term, kept)
        if self.p.bias is not None:
            s = through(s + self.p.bias.float().nan_to_num(neginf=0.0), kept)
        s = torch.where(self.keep, s, torch.tensor(-math.inf))
        m = s.amax(-1, keepdim=True) if self.Lk else torch.full((self.B, self.Hq, self.Lq, 1), -math.inf)
        m = m if self.sink is None else torch.maximum(m, self.sink)
        m = torch.where(torch.isfinite(m), m, torch.zeros(()))
        e = torch.exp(s - m)
        total = e.sum(-1, keepdim=True)
        total = total if self.sink is None else total + torch.exp(self.sink - m)
        dead = total == 0
        divisor = torch.where(dead, torch.ones(()), total)
        p = e / divisor
        pz = self.cast_p(p if self.z is None else p * self.z)
        o = self.dot(pz, self.v)
        lse = torch.where(dead, torch.full((), -math.inf), m + torch.log(divisor))
        out = {"o": self.stored_o(o), "lse": lse.squeeze(-1)}
        self.textbook_lse = lse
        return out | self.textbook_backward(self.cast_p(p) if kept else p, pz, o, out["o"], g, kept)

    def textbook_backward(
        self, p: Tensor, pz: Tensor, o: Tensor, stored: Tensor, g: Tensor | None, kept: torch.dtype | None
    ) -> dict[str, Tensor]:
        dp = through(self.dot(self.do, self.v.mT), kept)
        dp = dp if self.z is None else dp * self.z
        if self.a.delta == "p.dp":
            delta = (p * dp).sum(-1, keepdim=True)
        else:
            delta = (self.do * (stored.float() if self.a.delta == "do.o" else o)).sum(-1, keepdim=True)
        delta = delta if self.dlse is None else delta - self.dlse
        ds = p * (dp - delta)
        out = {"dv": self.fold(self.dot(pz.mT, self.do))}
        if self.p.bias is not None:
            out["dbias"] = ds.sum_to_size(self.p.bias.shape)
        if self.sink is not None:
            out["dsinks"] = sink_gradient(self.sink, self.textbook_lse, delta)
        ds = self.cast_ds(ds if g is None else ds * g)
        out["dq"] = self.dot(ds, self.k) * self.p.scale
        out["dk"] = self.fold(self.dot(ds.mT, self.q) * self.p.scale)
        return {name: x.to(self.io) for name, x in out.items()}


def run(problem: Posed, arithmetic: Arithmetic) -> dict[str, Tensor]:
    """o, lse and the gradients of a problem; o and gradients in the dtype of q, lse in float32."""
    e = _Run(problem, arithmetic)
    out = e.textbook() if arithmetic.algorithm != "flash" else {}
    if not out:
        o, lse = e.forward()
        stored = e.stored_o(o)
        out = {"o": stored, "lse": lse.squeeze(-1)} | e.backward(o, stored, lse)
    return out if problem.do is not None else {name: out[name] for name in ("o", "lse")}


def broken(arithmetic: Arithmetic, *faults: str) -> Arithmetic:
    """The same arithmetic with faults."""
    return replace(arithmetic, faults=arithmetic.faults | set(faults))
