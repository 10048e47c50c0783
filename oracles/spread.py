"""Expected size of the error of every element when roundings are independent: the scale of the statistical tier.

The same propagation as the limits with variances for absolute values. A rounding of relative size up to u has variance
NU u^2; the sum of n terms t with total S adds NU u^2 (n/3 S^2 + n/2 sum t^2). Where errors of scores are not small the
first order says nothing and the scale is infinite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from .contract import Contract
from .exact import Array, Bools, Reference, any_of
from .limits_backward import per_head

NU = 0.541 / 3
"""Mean of (rounding error / u)^2: 1/3 for an error uniform in +-u/significand, times the mean of 1/significand^2 = 0.541
over significands in [1, 2) with log-uniform density."""
BIAS_RZ = 0.72
"""Mean relative error of truncation in units of 2u (log-uniform significands: 1/(2 ln 2))."""
FIRST_ORDER = 0.1
MANY_PAIRS = 1 << 16


@dataclass(frozen=True)
class _Units:
    """Squared units that many formulas share."""

    acc: float  # accumulation, u^2
    low: float  # elementwise float32, u^2
    rz: float  # mean bias of truncated operands, squared
    exp: float  # exponential: an approximation error, not a rounding

    @classmethod
    def of(cls, c: Contract) -> _Units:
        return cls(c.acc_u**2 * c.acc_k, c.u**2, (BIAS_RZ * c.dot_u) ** 2 if c.dot_rz else 0.0, 0.5 * c.exp_u**2)


@dataclass(frozen=True)
class _Forward:
    """Variances of scores, log weights, o (before its own rounding) and lse; tie fractions; where first order fails."""

    scores: Array
    log_weights: Array
    lse: Array
    o: Array
    row_ties: Array
    key_ties: Array
    wild: Bools


@np.errstate(all="ignore")
def sigmas(r: Reference, c: Contract, *, backward: bool = True) -> dict[str, Array]:
    """Expected standard deviation of the error of o, lse and, when wanted, dq, dk, dv, dbias, in the outputs' shapes."""
    units = _Units.of(c)
    f = _forward(r, c, units)
    out = {"o": r.heads(_hide(f.wild, f.o)), "lse": r.heads(_hide(f.wild, f.lse))[..., 0]}
    if backward and r.problem.do is not None:
        out |= _backward(r, c, units, f)
    return {name: np.sqrt(np.maximum(v, 0.0)) for name, v in out.items()}


def _hide(wild: Bools, variance: Array) -> Array:
    return np.where(wild, np.inf, variance) if wild.any() else variance


def tie_fraction(x: Array) -> Array:
    """1 - distinct / count along the last axis, nan left out: equal numbers round alike, so their errors add up."""
    if x.shape[-1] < 2:
        return np.zeros((*x.shape[:-1], 1))
    y = np.sort(x, -1)
    a, b = y[..., 1:], y[..., :-1]
    equal = (np.abs(a - b) <= 2.0**-30 * (np.abs(a) + np.abs(b))).sum(-1, keepdims=True)
    return cast(Array, equal / np.maximum((~np.isnan(x)).sum(-1, keepdims=True), 1))


def _ties(r: Reference) -> tuple[Array, Array]:
    """Fractions of tied scores in each row and tied weights of each key; of many pairs only all-equal rows are looked for."""
    if r.p.size > MANY_PAIRS:
        flat = (r.m - r.s) * r.kf
        rows = (flat.max(-1, keepdims=True, initial=0.0) == 0).astype(float)
        return rows, np.broadcast_to(rows.max(-2, keepdims=True, initial=0.0), (*rows.shape[:2], r.Lk, 1))
    masked = bool(r.live.all())
    rows = tie_fraction(r.s if masked else np.where(r.live, r.s, np.nan))
    p = np.ascontiguousarray((r.p if masked else np.where(r.live, r.p, np.nan)).swapaxes(-1, -2))
    return rows, tie_fraction(p)


def _forward(r: Reference, c: Contract, units: _Units) -> _Forward:
    n, p2, v2 = r.n, r.p * r.p, r.v * r.v
    T = np.ceil(n / c.kv_tile)
    scores = _scores(r, c, units)
    log_weights = scores + NU * units.low * (2 * r.s**2 + 2 * r.m**2) + units.exp * (1 + T) + _constants(r, c)
    row_ties, key_ties = _ties(r)
    wild = (
        np.sqrt(log_weights.max(-1, keepdims=True, initial=0.0, where=np.broadcast_to(r.live, log_weights.shape)))
    ) > FIRST_ORDER
    pz2 = p2 if r.z is None else r.pz * r.pz
    pv, pv2, o2 = r.pz @ r.av, pz2 @ v2, r.o * r.o
    o = _centred(r, p2 * log_weights) + NU * (c.p_u**2 + c.dot_u**2) * pv2
    o = o + NU * units.acc * (n / 2 * pv2 + (2 * n / 3 + 4) * o2)
    o = o + _underflow(c, r.kf, v2, n)
    o = o + (NU * max(c.p_u, 2 * c.u) ** 2 + units.exp + units.rz) * (row_ties * (pv + r.ao)) ** 2
    if c.l_from_rounded_p:
        o = o + NU * c.p_u**2 * p2.sum(-1, keepdims=True) * o2
    o = o + NU * c.out_u**2 * o2 + c.out_eta**2 / 3 + units.rz * o2
    if r.sinks is not None:
        o = o + r.p_sink**2 * _sink(r, c, units, T) * o2 + NU * 4 * units.low * o2
    lse = _lse(r, c, units, scores, log_weights, p2, row_ties)
    return _Forward(scores, log_weights, lse, o, row_ties, key_ties, wild)


def _underflow(c: Contract, pairs: Array, squares: Array, count: Array) -> Array:
    """Variance from weights below the smallest number of their format; by the largest factor when that is only a flush to zero."""
    if c.p_eta <= c.ftz:
        return count * (c.ftz**2 / 3 * squares.max(initial=0.0))
    return cast(Array, c.p_eta**2 / 3 * (pairs @ squares))


def _scores(r: Reference, c: Contract, units: _Units) -> Array:
    """Variance of the final score."""
    squares = r.scale**2 * ((r.q * r.q) @ (r.k * r.k).swapaxes(-1, -2))
    v = NU * ((2 * c.dot_u**2 + c.q_u**2 + units.acc * r.D / 2 + 2 * units.low) * squares)
    v = v + (NU * (units.acc * r.D / 3 + 4 * units.low + c.s_u**2) + units.rz) * r.zs**2
    if r.g is not None:
        v = v * r.g**2 + NU * (c.tanh_u**2 + 3 * units.low + c.s_u**2) * r.s0**2
    if r.bias is not None:
        v = v + NU * (2 * units.low + c.s_u**2) * r.s**2
    if r.alibi is not None:
        v = v + NU * ((2 * units.low + c.s_u**2) * r.s**2 + (4 * units.low + c.s_u**2) * r.alibi**2)
    return cast(Array, v)


def _sink(r: Reference, c: Contract, units: _Units, T: Array) -> Array:
    """Variance of the log of the sink's weight."""
    sink = np.where(r.p_sink > 0, cast(Array, r.sinks), 0.0)
    v = NU * units.low * (4 * sink**2 + 2 * r.m**2 + 5 * r.keys_lse**2) + units.exp * (2 + T) + c.log_abs**2 / 12
    return cast(
        Array, v + NU * (c.s_u**2 * sink**2 + c.lse_u**2 * r.keys_lse**2) + c.constant_u**2 / 3 * (r.m - sink) ** 2
    )


def _constants(r: Reference, c: Contract) -> Array | float:
    """Variance of the log of a weight from constants that are off by constant_u: exp2 of (s - m) * log2(e)."""
    return c.constant_u**2 / 3 * (r.m - r.s) ** 2 if c.constant_u else 0.0


def _centred(r: Reference, w: Array) -> Array:
    """sum_j w_j (v_j - o)^2."""
    if r.z is not None:
        total = (w * r.z * r.z) @ (r.v * r.v) - 2 * r.o * ((w * r.z) @ r.v)
        return np.maximum(total + r.o * r.o * w.sum(-1, keepdims=True), 0.0)
    mean = r.v.mean(-2, keepdims=True) if r.Lk else 0.0
    v, o = r.v - mean, r.o - mean
    return cast(Array, np.maximum(w @ (v * v) - 2 * o * (w @ v) + o * o * w.sum(-1, keepdims=True), 0.0))


def _lse(r: Reference, c: Contract, units: _Units, scores: Array, log_weights: Array, p2: Array, ties: Array) -> Array:
    slope = r.p if r.g is None else r.p * r.g
    v = (p2 * log_weights).sum(-1, keepdims=True) + (scores * r.p).sum(-1, keepdims=True) * ties**2 + units.exp
    v = v + NU * units.low * (2 * r.m**2 + 3 * r.lse**2 + r.n / 2 + 4) + c.log_abs**2 / 12 + NU * c.lse_u**2 * r.lse**2
    if c.constant_u:
        v = v + c.constant_u**2 / 3 * ((r.p * (r.m - r.s)).sum(-1, keepdims=True) ** 2 + r.lse**2)
    if c.l_from_rounded_p:
        v = v + NU * c.p_u**2 * (p2.sum(-1, keepdims=True) + ties**2)
    if c.dot_u or c.q_u:  # the rounding of a row of q is common to its scores
        common = (r.q * r.q * (slope @ r.k) ** 2).sum(-1, keepdims=True)
        v = v + NU * (c.dot_u**2 + c.q_u**2) * r.scale**2 * common
    if units.rz:
        v = v + units.rz * ((slope * r.zs).sum(-1, keepdims=True)) ** 2
    if c.acc_k > 1:  # a truncating accumulator shrinks every score of the row
        shrink = 0.1 * c.acc_k * r.D / 16 * 2 * c.acc_u * abs(r.scale)
        v = v + (shrink * (slope * r.qk).sum(-1, keepdims=True)) ** 2
    if r.sinks is not None:
        keys = 1.0 - r.p_sink  # what an error of the keys' own lse moves
        v = (
            v
            + r.p_sink**2 * _sink(r, c, units, np.ones_like(r.m))
            + keys**2 * (c.log_abs**2 / 12 + NU * units.low * 3 * r.keys_lse**2)
        )
    return cast(Array, v)


def _backward(r: Reference, c: Contract, units: _Units, f: _Forward) -> dict[str, Array]:
    p2 = r.p * r.p
    weights = f.scores + NU * units.low * (2 * r.s**2 + 2 * r.lse**2) + units.exp + _constants(r, c)
    dp = _products(r, c, units)
    delta = _delta(r, c, units, f, p2, dp)
    own = _ds(r, c, units, f, p2, weights, dp)
    head = any_of(np.broadcast_to(f.wild, f.lse.shape), -2)
    out = {
        "dq": r.heads(_hide(f.wild, _dq(r, c, units, f, own, delta))),
        "dk": _hide(head, _dk(r, c, units, f, own, delta, p2)),
        "dv": _hide(head, _dv(r, c, units, f, p2, weights)),
    }
    if r.bias is not None:
        before = p2 * ((weights + f.lse + NU * c.p_in_ds_u**2) * r.t**2 + dp) + NU * 6 * units.low * r.ds_bias**2
        before = before + max(c.p_in_ds_eta, c.ftz) ** 2 / 3 * r.kf * r.t**2
        total = r.over_bias(before) + _row_errors(r, delta) + NU * (c.dbias_u**2 * r.over_bias(r.ds_bias**2))
        total = total + c.dbias_eta**2 / 3 * r.over_bias(r.kf)
        out["dbias"] = total + NU * (c.out_u**2 + 4 * units.low) * r.arrays["dbias"] ** 2 + c.out_eta**2 / 3
        if f.wild.any():
            out["dbias"] = np.where(r.over_bias(f.wild * r.kf) > 0, np.inf, out["dbias"])
    if r.sinks is not None:
        out["dsinks"] = _dsinks(r, c, units, f, delta)
    return out


def _dsinks(r: Reference, c: Contract, units: _Units, f: _Forward, delta: Array) -> Array:
    """Variance of dsinks: the sink's weight, delta, the sum over rows and the output's rounding."""
    term = r.p_sink * r.t_sink
    parts = r.delta**2 + (0.0 if r.dlse is None else r.dlse**2)
    rows = r.p_sink**2 * ((_sink(r, c, units, np.ones_like(r.m)) + f.lse + 6 * NU * units.low) * parts + delta)
    rows = rows + NU * (c.dbias_u**2 + units.acc * r.B * r.Lq / 2) * term**2 + c.dbias_eta**2 / 3
    total = r.over_sinks(_hide(np.broadcast_to(f.wild, rows.shape), rows)) + c.out_eta**2 / 3
    return cast(Array, total + NU * (units.acc * r.B * r.Lq / 3 + c.out_u**2) * r.arrays["dsinks"] ** 2)


def _row_errors(r: Reference, delta: Array) -> Array:
    """Variance of dbias from that of delta, whose error is common to the keys of a row and adds up where they are summed."""
    assert r.problem.bias is not None
    if r.problem.bias.shape[3] == r.Lk or not r.Lk:
        return r.over_bias(r.p * r.p * delta)
    once = np.zeros_like(r.p)
    once[..., :1] = r.p.sum(-1, keepdims=True) ** 2 * delta
    return r.over_bias(once)


def _products(r: Reference, c: Contract, units: _Units) -> Array:
    """Variance of dP."""
    squares = (r.do * r.do) @ (r.v * r.v).swapaxes(-1, -2)
    if r.z is not None:
        squares = squares * r.z * r.z
    return cast(
        Array,
        NU
        * (
            (2 * c.dot_u**2 + units.acc * r.Dv / 2) * squares + (units.acc * r.Dv / 3 + units.low + c.dp_u**2) * r.dp**2
        ),
    )


def _delta(r: Reference, c: Contract, units: _Units, f: _Forward, p2: Array, dp: Array) -> Array:
    """Variance of delta, covering both formulas for it."""
    stored = ((r.do * r.do) * (r.o * r.o)).sum(-1, keepdims=True)
    v = (p2 * (NU * c.p_u**2 * r.dp**2 + f.log_weights * r.t**2 + dp)).sum(-1, keepdims=True)
    v = v + NU * (c.out_u**2 + units.acc * r.Dv / 2) * stored
    v = v + NU * (units.acc * (r.Dv + r.n) / 3 + 4 * units.low) * r.delta**2
    v = (
        v
        + c.out_eta**2 / 3 * (r.do * r.do).sum(-1, keepdims=True)
        + c.p_eta**2 / 3 * (r.dp * r.dp).sum(-1, keepdims=True)
    )
    tied = f.row_ties * (r.p * r.adp).sum(-1, keepdims=True)
    v = v + (NU * max(c.p_u, 2 * c.u) ** 2 + units.exp) * tied**2
    common = units.rz if c.delta == "do.o" else f.lse + units.rz
    if r.dlse is not None:
        v = v + NU * 2 * units.low * r.dlse**2
    return cast(Array, v + common * r.delta**2)


def _ds(r: Reference, c: Contract, units: _Units, f: _Forward, p2: Array, weights: Array, dp: Array) -> Array:
    """Variance of dS, apart from what lse and delta make common to a row."""
    t2 = r.t * r.t
    w = p2 * ((weights + NU * (c.p_in_ds_u**2 + 4 * units.low)) * t2 + dp + c.dp_eta**2 / 3)
    w = w + max(c.p_in_ds_eta, c.ftz) ** 2 / 3 * t2
    if r.g is not None:
        tau = r.s0 / r.softcap
        w = w * r.g**2 + (r.p * r.t) ** 2 * 4 * tau**2 * (f.scores / r.softcap**2 + NU * c.tanh_u**2)
    eta = c.ds_eta * max(1.0, 1.0 / abs(r.scale)) if c.ds_scaled and r.scale else c.ds_eta
    return cast(Array, w + NU * (c.ds_u**2 + c.dot_u**2) * r.ds**2 + eta**2 / 3 * r.kf)


def _dq(r: Reference, c: Contract, units: _Units, f: _Forward, own: Array, delta: Array) -> Array:
    k2, weight, square = r.k * r.k, r.p if r.g is None else r.p * r.g, r.scale**2
    v = own @ k2 + delta * (weight @ r.k) ** 2 + NU * units.acc * r.n / 2 * ((r.ds * r.ds) @ k2)
    if c.ds_u:
        v = v + NU * (c.ds_u * f.row_ties * (r.ads @ r.ak)) ** 2
    dq2 = r.dq * r.dq
    common = f.lse + NU * (units.acc * r.n / 3 + 4 * units.low + c.out_u**2) + 4 * units.rz
    v = square * v + common * dq2 + c.out_eta**2 / 3
    if c.dq_acc_u:
        tiles = np.maximum(np.ceil(r.n / c.kv_tile), 1.0)
        v = v + NU * c.dq_acc_u**2 * partial_sums(tiles, dq2, square * ((r.ds * r.ds) @ k2)) + tiles * c.acc_eta**2 / 3
    return cast(Array, v)


def _dk(r: Reference, c: Contract, units: _Units, f: _Forward, own: Array, delta: Array, p2: Array) -> Array:
    q2, square, slope2 = r.q * r.q, r.scale**2, p2 if r.g is None else p2 * r.g**2
    ds2 = r.ds * r.ds
    each = own + slope2 * delta + (f.lse + NU * units.acc * r.n.max(initial=0.0) / 2) * ds2
    v = each.swapaxes(-1, -2) @ q2 + NU * units.acc * r.nq / 2 * (ds2.swapaxes(-1, -2) @ q2)
    if c.ds_u:
        v = v + NU * (c.ds_u * f.key_ties * (r.ads.swapaxes(-1, -2) @ r.aq)) ** 2
    if c.gqa_u and r.G > 1:
        v = v + NU * c.gqa_u**2 * per_head(r, r.ds, r.q) ** 2
    common = NU * (units.acc * r.nq / 3 + 4 * units.low + c.out_u**2) + 4 * units.rz
    eta = (c.out_eta**2 + (r.G * c.gqa_eta**2 if r.G > 1 else 0.0)) / 3
    return _low_accumulator(r, c, square * v + common * r.dk**2 + eta, r.dk, r.ds * abs(r.scale), q2)


def _dv(r: Reference, c: Contract, units: _Units, f: _Forward, p2: Array, weights: Array) -> Array:
    do2, z2 = r.do * r.do, 1.0 if r.z is None else r.z * r.z
    pz2 = p2 * z2
    each = pz2 * (weights + f.lse + NU * (c.p_u**2 + c.dot_u**2))
    v = each.swapaxes(-1, -2) @ do2 + NU * units.acc * r.nq / 2 * (pz2.swapaxes(-1, -2) @ do2)
    v = v + _underflow(c, r.kf.swapaxes(-1, -2), do2, r.nq)
    if c.p_u:
        v = v + NU * (c.p_u * f.key_ties * (r.pz.swapaxes(-1, -2) @ r.ado)) ** 2
    if c.gqa_u and r.G > 1:
        v = v + NU * c.gqa_u**2 * per_head(r, r.pz, r.do) ** 2 + r.G * c.gqa_eta**2 / 3
    common = NU * (units.acc * r.nq / 3 + c.out_u**2) + units.rz
    return _low_accumulator(r, c, v + common * r.dv**2 + c.out_eta**2 / 3, r.dv, r.pz, do2)


def _low_accumulator(r: Reference, c: Contract, v: Array, total: Array, weights: Array, squares: Array) -> Array:
    """With the rounding of partial sums."""
    if not c.dkv_acc_u:
        return v
    tiles = r.G * -(-r.Lq // c.q_tile)
    partial = partial_sums(tiles, total**2, (weights * weights).swapaxes(-1, -2) @ squares)
    return cast(Array, v + NU * c.dkv_acc_u**2 * partial + tiles * c.acc_eta**2 / 3)


def partial_sums(tiles: float | Array, total: Array, walk: Array) -> Array:
    """The squares of all partial sums but the last, which is the output, added up.

    Of a random walk of T equal steps that ends at the total, the mean square after k of them is (k/T)^2 of the total's square
    and (k/T)(1 - k/T) of the walk's variance (the variance of a Brownian bridge).
    """
    tiles = np.maximum(tiles, 1)  # without a tile there is no partial sum either
    even = (tiles + 1) * (2 * tiles + 1) / (6 * tiles) - 1
    return cast(Array, even * total + ((tiles - 1) / 2 - even) * walk)
