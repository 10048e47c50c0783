"""float64 attention by its definition: o, lse and the gradients dq, dk, dv, dbias, dsinks in closed form.

Inside, the G query heads of a key head are one axis of R = G * Lq rows, so that grouped heads need no copies and no sum
over the group: q (B, Hkv, R, D), k (B, Hkv, Lk, D), scores (B, Hkv, R, Lk). numpy, because one small array operation
costs half of what it costs in torch and a case has hundreds of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..fuzz.tensors import Inputs

Array = npt.NDArray[np.float64]
T = TypeVar("T", bound=np.generic)
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Problem:
    """What is to be computed: q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv), do (B, Hq, Lq, Dv) on the CPU.

    `keep` (True: attend) and `bias` are 4-D and broadcast to (B, Hq, Lq, Lk); None means all, and none. `dlse` (B, Hq, Lq)
    is the gradient of lse. `dropout` (B, Hq, Lq, Lk) multiplies P: keep / (1 - p). `do` None asks for the forward only.
    `alibi` (Hq,) or (B, Hq) are slopes: -slope * |i + Lk - Lq - j| is added to the score after the softcap. `sinks` (Hq,)
    are the logits of one key more in each row, whose value is zero: not scaled, capped or masked; lse counts them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor | None = None
    keep: Tensor | None = None
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float = 0.0
    dlse: Tensor | None = None
    dropout: Tensor | None = None
    alibi: Tensor | None = None
    sinks: Tensor | None = None

    @classmethod
    def of(cls, inputs: Inputs, *, dropout_known: bool = True) -> Problem:
        """The problem that the inputs of a case pose."""
        case = inputs.case

        def cpu(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.detach().cpu()

        dropout = None
        if case.dropout and dropout_known and inputs.dropout_keep is not None:
            dropout = inputs.dropout_keep.cpu().to(torch.float64) / (1.0 - case.dropout)
        q, k, v = (t.detach().cpu() for t in (inputs.q, inputs.k, inputs.v))
        do, keep, bias, dlse = map(cpu, (inputs.do, inputs.keep, inputs.bias, inputs.dlse))
        alibi, sinks = map(cpu, (inputs.alibi, inputs.sinks))
        return cls(q, k, v, do, keep, bias, case.resolved_scale, case.softcap, dlse, dropout, alibi, sinks)

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """B, Hq, Hkv, Lq, Lk, D, Dv."""
        B, Hq, Lq, D = self.q.shape
        _, Hkv, Lk, Dv = self.v.shape
        return B, Hq, Hkv, Lq, Lk, D, Dv

    def array(self, name: str) -> Array:
        """The tensor of that name as a float64 array; converted once."""
        if name not in self._arrays:
            self._arrays[name] = doubles(getattr(self, name))
        return self._arrays[name]

    @cached_property
    def _arrays(self) -> dict[str, Array]:
        return {}


def doubles(t: Tensor) -> Array:
    """The values as a float64 numpy array."""
    out: Array = t.detach().to(device="cpu", dtype=torch.float64).numpy()
    return out


def any_of(x: Bools, axis: int) -> Bools:
    """Whether any element along the axis is true, the axis kept with size 1."""
    return cast(Bools, x.any(axis, keepdims=True))


@dataclass(frozen=True)
class Rows:
    """The sizes of a problem, and its arrays with the heads of a group and their rows as one axis."""

    B: int
    Hq: int
    Hkv: int
    Lq: int
    Lk: int
    D: int
    Dv: int

    @property
    def G(self) -> int:
        return self.Hq // self.Hkv

    @property
    def R(self) -> int:
        """Rows of one key head."""
        return self.G * self.Lq

    def rows(self, x: npt.NDArray[T]) -> npt.NDArray[T]:
        """(B, Hq, Lq, X) -> (B, Hkv, G * Lq, X); a size-1 axis b stays, h stays 1, q is spread."""
        b, h, q, n = x.shape
        if h == 1 and self.Hq > 1:
            return np.broadcast_to(x[:, :, None], (b, 1, self.G, self.Lq, n)).reshape(b, 1, self.R, n)
        if q != self.Lq:
            x = np.broadcast_to(x, (b, h, self.Lq, n))
        return x.reshape(b, self.Hkv, self.R, n)

    def heads(self, x: npt.NDArray[T]) -> npt.NDArray[T]:
        """(B, Hkv, G * Lq, X) -> (B, Hq, Lq, X), the inverse of `rows`."""
        return x.reshape(x.shape[0], self.Hq, self.Lq, x.shape[-1])

    def pairs(self, x: npt.NDArray[T]) -> npt.NDArray[T]:
        """What broadcasts to (B, Hq, Lq, Lk), as (B|1, Hkv|1, R, Lk)."""
        if x.shape[3] != self.Lk:
            x = np.broadcast_to(x, (*x.shape[:3], self.Lk))
        return self.rows(x)

    def full(self, x: npt.NDArray[T]) -> npt.NDArray[T]:
        """(B|1, Hkv|1, R, Lk) -> (B, Hq, Lq, Lk)."""
        return np.broadcast_to(x, (self.B, self.Hkv, *x.shape[2:])).reshape(self.B, self.Hq, self.Lq, self.Lk)

    def distances(self, slopes: Array) -> Array:
        """-slope * |i + Lk - Lq - j| of slopes (Hq,) or (B, Hq), as (B|1, Hkv, R, Lk)."""
        apart = np.abs(np.arange(self.Lq)[:, None] + (self.Lk - self.Lq) - np.arange(self.Lk))
        return self.pairs(-np.atleast_2d(slopes)[:, :, None, None] * apart)

    def full_rows(self, x: npt.NDArray[T]) -> npt.NDArray[T]:
        """(B, Hkv, 1, X) -> (B, Hq, 1, X): what is common to the rows of a key head."""
        return np.repeat(x, self.G, axis=1)

    def live(self, problem: Problem) -> Bools:
        """Who may attend whom, (B|1, Hkv|1, R, Lk): `keep`, and no bias of -inf."""
        keep, bias = problem.keep, problem.bias
        live: Bools = np.ones((1, 1, self.R, self.Lk), bool) if keep is None else self.pairs(keep.numpy())
        if bias is not None:
            forbidden = np.isneginf(problem.array("bias"))
            if forbidden.any():
                live = live & ~self.pairs(forbidden)
        return live


class Reference:
    """Forward and, when first asked for, backward of a problem in float64, with the intermediates that the limits need.

    `live` (B|1, Hkv|1, R, Lk) says who may attend whom; `dead` rows have no allowed key. Where not live, s is 0 and p is 0.
    `t` = dP - delta + dlse, so that dS = p * t; `g` is the derivative of the softcap (None without one).
    """

    @np.errstate(all="ignore")
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.at_rows = Rows(*problem.sizes)
        self.B, self.Hq, self.Hkv, self.Lq, self.Lk, self.D, self.Dv = problem.sizes
        self.G = self.at_rows.G
        self.heads, self.rows = self.at_rows.heads, self.at_rows.rows
        self.scale, self.softcap = float(problem.scale), float(problem.softcap)
        self.q, self.k, self.v = self.rows(problem.array("q")), problem.array("k"), problem.array("v")
        self.z: Array | None = None if problem.dropout is None else self.rows(problem.array("dropout"))
        self.bias = None if problem.bias is None else problem.array("bias")
        self.alibi = None if problem.alibi is None else self.at_rows.distances(problem.array("alibi"))
        self.sinks = None if problem.sinks is None else self.rows(problem.array("sinks")[None, :, None, None])
        self.live = self.at_rows.live(problem)
        self.dead: Bools = ~any_of(self.live, -1)
        if self.sinks is not None:
            self.dead = self.dead & np.isneginf(self.sinks)
        self._forward()

    def _forward(self) -> None:
        self.raw = self.q @ self.k.swapaxes(-1, -2)
        self.zs = self.raw * self.scale
        s = self.softcap * np.tanh(self.zs / self.softcap) if self.softcap else self.zs
        self.s0 = s
        if self.bias is not None:
            s = s + self.at_rows.pairs(np.where(np.isneginf(self.bias), 0.0, self.bias))
        if self.alibi is not None:
            s = s + self.alibi
        all_live = bool(self.live.all())
        masked = s if all_live else np.where(self.live, s, -np.inf)
        m = masked.max(-1, keepdims=True, initial=-np.inf)
        if self.sinks is not None:
            m = np.maximum(m, self.sinks)
        self.m: Array = np.where(self.dead, 0.0, m)
        e = np.exp(masked - self.m)
        norm = e.sum(-1, keepdims=True)
        if self.sinks is not None:
            norm = norm + np.exp(self.sinks - self.m)
        norm = np.where(self.dead, 1.0, norm)
        self.p: Array = e / norm
        self.s: Array = s if all_live else np.where(self.live, s, 0.0)
        self.lse: Array = self.m + np.log(norm)  # 0 on dead rows; outputs() gives -inf
        self.lp: Array = masked - self.lse
        self.pz: Array = self.p if self.z is None else self.p * self.z
        self.o: Array = self.pz @ self.v

    # -- the sink: one key more per row, of value zero (None without)
    @cached_property
    def lp_sink(self) -> Array:
        """log of the sink's weight (B, Hkv, R, 1), -inf where the sink is."""
        assert self.sinks is not None
        return np.where(self.dead, -np.inf, self.sinks - self.lse)

    @cached_property
    def p_sink(self) -> Array:
        return np.exp(self.lp_sink)

    @cached_property
    def keys_m(self) -> Array:
        """The greatest score among the row's keys, without the sink; 0 where there is no key."""
        m = np.where(self.live, self.s, -np.inf).max(-1, keepdims=True, initial=-np.inf)
        return np.where(np.isneginf(m), 0.0, m)

    @cached_property
    def keys_lse(self) -> Array:
        """lse without the sink; 0 where there is no key."""
        total = self.p.sum(-1, keepdims=True)
        return np.where(total > 0, self.lse + np.log(total), self.keys_m)

    @cached_property
    def t_sink(self) -> Array:
        """dS of the sink is p_sink * t_sink: its value is zero, so its dP is."""
        return -self.delta if self.dlse is None else self.dlse - self.delta

    # -- absolute values and counts, shared by every contract that is tried on this problem
    @cached_property
    def aq(self) -> Array:
        return np.abs(self.q)

    @cached_property
    def ak(self) -> Array:
        return np.abs(self.k)

    @cached_property
    def av(self) -> Array:
        return np.abs(self.v)

    @cached_property
    def ao(self) -> Array:
        return np.abs(self.o)

    @cached_property
    def qk(self) -> Array:
        """|q| |k|^T."""
        out: Array = self.aq @ self.ak.swapaxes(-1, -2)
        return out

    @cached_property
    def kf(self) -> Array:
        """live as numbers."""
        return self.live.astype(np.float64)

    @cached_property
    def n(self) -> Array:
        """Live keys of each row (B|1, Hkv|1, R, 1)."""
        return self.kf.sum(-1, keepdims=True)

    @cached_property
    def nq(self) -> Array:
        """Live rows of each key, over the group (B|1, Hkv|1, Lk, 1)."""
        return self.kf.sum(-2)[..., None]

    @cached_property
    def alse(self) -> Array:
        return np.abs(self.lse)

    # -- backward
    @cached_property
    def dq(self) -> Array:
        """As rows."""
        return cast(Array, self.scale * (self.ds @ self.k))

    @cached_property
    def dk(self) -> Array:
        return cast(Array, self.scale * (self.ds.swapaxes(-1, -2) @ self.q))

    @cached_property
    def dv(self) -> Array:
        return cast(Array, self.pz.swapaxes(-1, -2) @ self.do)

    @cached_property
    def adp(self) -> Array:
        return np.abs(self.dp)

    @cached_property
    def at(self) -> Array:
        return np.abs(self.t)

    @cached_property
    def ads(self) -> Array:
        return np.abs(self.ds)

    @cached_property
    def do(self) -> Array:
        if self.problem.do is None:
            raise ValueError("a problem without do has no gradients")
        return self.rows(self.problem.array("do"))

    @cached_property
    def ado(self) -> Array:
        return np.abs(self.do)

    @cached_property
    def dov(self) -> Array:
        """|do| |v|^T."""
        out: Array = self.ado @ self.av.swapaxes(-1, -2)
        return out

    @cached_property
    def dlse(self) -> Array | None:
        """(B, Hkv, R, 1), 0 on dead rows, whose lse is constant."""
        if self.problem.dlse is None:
            return None
        return np.where(self.dead, 0.0, self.rows(self.problem.array("dlse")[..., None]))

    @cached_property
    def dp_raw(self) -> Array:
        """do v^T, masked pairs included, before dropout."""
        out: Array = self.do @ self.v.swapaxes(-1, -2)
        return out

    @cached_property
    def dp(self) -> Array:
        dp = self.dp_raw if self.z is None else self.dp_raw * self.z
        return dp * self.kf

    @cached_property
    def delta(self) -> Array:
        out: Array = (self.do * self.o).sum(-1, keepdims=True)
        return out

    @cached_property
    def t(self) -> Array:
        t = self.dp - self.delta
        return (t if self.dlse is None else t + self.dlse) * self.kf

    @cached_property
    def g(self) -> Array | None:
        return 1.0 - (self.s0 / self.softcap) ** 2 if self.softcap else None

    @cached_property
    def ds_bias(self) -> Array:
        """dS with respect to the biased score: the gradient of an unbroadcast bias."""
        return self.p * self.t

    @cached_property
    def ds(self) -> Array:
        """dS with respect to scale * q.k."""
        return self.ds_bias if self.g is None else self.ds_bias * self.g

    def over_sinks(self, x: Array) -> Array:
        """(B, Hkv, R, 1) summed over the rows of every query head: (Hq,)."""
        full = np.broadcast_to(x, (self.B, self.Hkv, self.at_rows.R, 1))
        return cast(Array, self.heads(full).sum((0, 2, 3)))

    def over_bias(self, x: Array) -> Array:
        """(B, Hkv, R, Lk) summed over the axes that the bias broadcasts, in the bias's 4-D shape."""
        assert self.problem.bias is not None
        full = self.at_rows.full(x)
        axes = tuple(i for i, n in enumerate(self.problem.bias.shape) if n == 1 and full.shape[i] != 1)
        return full.sum(axes, keepdims=True) if axes else full

    @np.errstate(all="ignore")
    def forward(self) -> dict[str, Array]:
        """o (B, Hq, Lq, Dv) and lse (B, Hq, Lq)."""
        return {"o": self.heads(self.o), "lse": self.heads(np.where(self.dead, -np.inf, self.lse))[..., 0]}

    @np.errstate(all="ignore")
    def backward(self) -> dict[str, Array]:
        """dq, dk, dv, dbias when there is a bias, and dsinks (Hq,) when there are sinks."""
        out = {"dq": self.heads(self.dq), "dk": self.dk, "dv": self.dv}
        if self.bias is not None:
            out["dbias"] = self.over_bias(self.ds_bias)
        if self.sinks is not None:
            out["dsinks"] = self.over_sinks(self.p_sink * self.t_sink)
        return out

    @cached_property
    def arrays(self) -> dict[str, Array]:
        """Every answer that the problem has, in the outputs' shapes."""
        return self.forward() | ({} if self.problem.do is None else self.backward())

    def outputs(self) -> dict[str, Tensor]:
        """The same as float64 tensors: o, lse, and with `do` dq, dk, dv, dbias and dsinks."""
        return {name: torch.from_numpy(np.array(x)) for name, x in self.arrays.items()}
