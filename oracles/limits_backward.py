"""Limits of dq, dk, dv and dbias, given those of the forward pass.

P is recomputed from the stored lse, so its error contains that of lse. docs/limits.md derives every line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from .contract import MAX32, Contract
from .exact import Array, Bools, Reference, any_of
from .limits_forward import UNKNOWN, Forward, comb, inflate, sink_error, softcap_range, summed

LOG_MAX32 = 88.0
"""exp of more than this may overflow float32."""


@dataclass(frozen=True)
class Recomputed:
    """P of the backward pass: up bounds it from above, off bounds its error; with dropout applied where named z."""

    up: Array
    off: Array
    up_z: Array
    off_z: Array
    overflow: Bools | None


@dataclass(frozen=True)
class Scores:
    """Error of dS: `own` per pair, `row` the part that delta's error makes common to a row; `size` bounds |dS| computed.

    `bias` is the error of dS before the softcap's derivative, `weight` the p (times g) that delta multiplies.
    """

    own: Array
    row: Array
    delta: Array
    total: Array
    size: Array
    bias: Array
    weight: Array


def backward_limits(r: Reference, c: Contract, f: Forward) -> tuple[dict[str, Array], dict[str, Bools]]:
    """Limits of dq, dk, dv (dbias) in the outputs' shapes, and where overflow leaves them unconstrained."""
    p = recomputed(r, c, f)
    dp_error = products(r, c)
    s = scores(r, c, f, p, delta_limit(r, c, f, p, dp_error), dp_error)
    seen = r.nq > 0
    out = {
        "dq": r.heads(np.where(r.n == 0, 0.0, dq_limit(r, c, f, s))),
        "dk": np.where(seen, dk_limit(r, c, s), 0.0),
        "dv": np.where(seen, dv_limit(r, c, p), 0.0),
    }
    if r.bias is not None:
        out["dbias"] = dbias_limit(r, c, s)
    if r.sinks is not None:
        out["dsinks"] = dsinks_limit(r, c, f, s)
    return cast("dict[str, Array]", out), loose_gradients(r, c, f, p, s, dp_error, cast("dict[str, Array]", out))


def recomputed(r: Reference, c: Contract, f: Forward) -> Recomputed:
    """exp(s - lse): errors of the score, of lse, and of the subtraction."""
    s, common = np.abs(r.s), np.maximum(np.abs(r.m), r.alse)
    E = f.scores + (2 * c.u + c.constant_u) * s + (2 * c.u + c.constant_u) * common + (f.lse + (c.exp_u + 3 * c.u))
    E = np.minimum(E, UNKNOWN)
    up, off = inflate(r.p, r.lp, E)
    overflow = (r.lp + E >= LOG_MAX32) if E.max(initial=0.0) >= LOG_MAX32 else None
    if r.z is None:
        return Recomputed(up, off, up, off, overflow)
    return Recomputed(up, off, up * r.z, off * r.z, overflow)


def products(r: Reference, c: Contract) -> Array:
    """Error of dP = do v^T (times the dropout multiplier)."""
    unit = cast(float, comb(c.dot_u, c.dot_u, summed(c, r.Dv)))
    if r.z is None:
        return cast(Array, r.dov * unit + (c.dp_u + c.u) * r.adp + (r.Dv * c.ftz + c.dp_eta))
    own = r.dov * unit + (c.dp_u + c.u) * np.abs(r.dp_raw) + (r.Dv * c.ftz + c.dp_eta)
    return cast(Array, own * r.z * (1 + 2 * c.u) + (2 * c.u + c.constant_u) * r.adp)


def delta_limit(r: Reference, c: Contract, f: Forward, p: Recomputed, dp_error: Array) -> Array:
    """Error of delta (minus dlse), whichever of the two formulas the contract allows."""
    options = []
    if c.delta != "p.dp":
        stored = r.ado * (r.ao + f.o)
        options.append((r.ado * f.o + (summed(c, r.Dv) + 2 * c.u) * stored).sum(-1, keepdims=True))
    if c.delta != "do.o":
        per_pair = p.off * r.adp + p.up * (dp_error + (r.n * c.u + 2 * c.u + c.p_in_ds_u) * r.adp)
        small = max(c.p_in_ds_eta, c.ftz) * (r.kf * (r.adp + dp_error)).sum(-1, keepdims=True)
        options.append(per_pair.sum(-1, keepdims=True) + small)
    error = options[0] if len(options) == 1 else np.maximum(*options)
    if r.dlse is not None:
        error = error + 2 * c.u * (np.abs(r.delta) + np.abs(r.dlse))
    return cast(Array, error + c.ftz)


def scores(r: Reference, c: Contract, f: Forward, p: Recomputed, delta: Array, dp_error: Array) -> Scores:
    """Error of dS = P * (dP - delta + dlse), and of its product with the softcap's derivative."""
    t = r.at if r.dlse is None else r.at + 2 * np.abs(r.dlse)  # the two parts may be scaled by different roundings of P
    span = t + delta
    own = p.off * span + p.up * (dp_error + 5 * c.u * (span + dp_error))
    if c.p_in_ds_u:
        own = own + p.up * (c.p_in_ds_u * span)
    own = (own + max(c.p_in_ds_eta, c.ftz) * (span + dp_error)) * r.kf
    row = r.p * delta
    bias = own + row
    if r.g is None:
        return Scores(own, row, delta, bias, r.ads + bias, bias, r.p)
    own, row = (own * np.abs(r.g) + (r.p * t + bias) * slope_error(r, c, f)) * r.kf, row * np.abs(r.g)
    return Scores(own, row, delta, own + row, r.ads + own + row, bias, r.p * r.g)


def slope_error(r: Reference, c: Contract, f: Forward) -> Array:
    """Error of the softcap's derivative 1 - tanh^2: its argument may be anywhere in an interval, and both are rounded."""
    g = cast(Array, r.g)
    low, high = softcap_range(r, f.scaled)
    greatest = 1.0 - np.maximum(low, 0.0) ** 2
    moved = np.maximum(greatest - g, g - (1.0 - high * high))
    tau = np.abs(r.s0 / r.softcap)
    return cast(Array, moved + 2 * tau * ((c.tanh_u + c.constant_u) * tau + 2 * c.u) + 2 * c.u)


def dq_limit(r: Reference, c: Contract, f: Forward, s: Scores) -> Array:
    """dq = scale * dS k: delta's error is common to a row, so dq sees it through the signed product P k."""
    size = abs(r.scale)
    rounding = comb(c.ds_u, c.dot_u, summed(c, r.n), 5 * c.u + c.constant_u)
    error = size * ((s.own + s.size * rounding) @ r.ak + s.delta * np.abs(s.weight @ r.k))
    error = error + small_products(r, c, r.kf, r.ak, r.n) + r.n * c.ftz
    if c.dq_acc_u:
        error = error + f.rescales * (c.dq_acc_u * (size * (s.size @ r.ak) + error) + max(1.0, size) * c.acc_eta)
    return stored(c, np.abs(r.dq), error)


def dk_limit(r: Reference, c: Contract, s: Scores) -> Array:
    """dk = scale * dS^T q, summed over the group."""
    size = abs(r.scale)
    rounding = comb(c.ds_u, c.dot_u, c.q_u, summed(c, r.nq), 5 * c.u + c.constant_u)
    error = size * ((s.total + s.size * _column(rounding)).swapaxes(-1, -2) @ r.aq)
    error = error + small_products(r, c, r.kf.swapaxes(-1, -2), r.aq, r.nq) + r.nq * c.ftz
    error = partial_sums(r, c, error, r.ds, r.q, s.size, r.aq, size)
    return stored(c, np.abs(r.dk), error)


def dv_limit(r: Reference, c: Contract, p: Recomputed) -> Array:
    """dv = P^T do, summed over the group."""
    rounding = comb(c.p_u, c.dot_u, summed(c, r.nq), 2 * c.u, 0.0 if r.z is None else 2 * c.u + c.constant_u)
    error = (p.off_z + p.up_z * _column(rounding)).swapaxes(-1, -2) @ r.ado + r.nq * c.ftz
    eta, z = max(c.p_eta, c.ftz), 1.0 if r.z is None else r.z
    if eta > c.ftz:
        error = error + eta * ((r.kf * z).swapaxes(-1, -2) @ r.ado)
    else:
        error = error + r.nq * (eta * r.ado.max(initial=0.0) * np.max(z, initial=0.0))
    error = partial_sums(r, c, error, r.pz, r.do, p.up_z, r.ado, 1.0)
    return stored(c, np.abs(r.dv), error)


def dbias_limit(r: Reference, c: Contract, s: Scores) -> Array:
    """dbias = dS before the softcap's derivative, summed over the axes that the bias broadcasts."""
    terms = r.over_bias(r.kf)
    error, size = r.over_bias(s.bias), np.abs(r.arrays["dbias"])
    if terms.size < r.B * r.Hq * r.Lq * r.Lk:
        absolute = r.over_bias(np.abs(r.ds_bias)) + error
        error = error + absolute * (terms * c.u + c.dbias_u) + terms * (c.dbias_eta + c.ftz)
    return cast(Array, np.where(terms > 0, stored(c, size, error), 0.0))


def dsinks_limit(r: Reference, c: Contract, f: Forward, s: Scores) -> Array:
    """dsinks = sum over rows of p (dlse - delta), p the sink's weight; the rows may be summed in the dtype of the sinks."""
    E = sink_error(r, c, f.rescales) + f.lse + (2 * c.u + c.constant_u) * np.maximum(np.abs(r.m), r.alse) + 3 * c.u
    up, off = inflate(r.p_sink, r.lp_sink, np.minimum(E, UNKNOWN))
    size = np.abs(r.delta) + (0.0 if r.dlse is None else np.abs(r.dlse))  # parts may meet different roundings of p
    rows = off * (size + s.delta) + r.p_sink * s.delta + up * 5 * c.u * (size + s.delta) + c.ftz * (1.0 + size)
    absolute, terms = r.over_sinks(up * (size + s.delta)), r.B * r.Lq
    error = r.over_sinks(rows) + absolute * (comb(summed(c, terms), c.dbias_u)) + terms * (c.dbias_eta + c.ftz)
    return cast(
        Array, np.where(np.isneginf(r.problem.array("sinks")), 0.0, stored(c, np.abs(r.arrays["dsinks"]), error))
    )


def small_products(r: Reference, c: Contract, pairs: Array, other: Array, count: Array) -> Array | float:
    """dS below the smallest number of its format, times the other operand; a scaled dS underflows at another place."""
    size = abs(r.scale)
    eta = c.ds_eta * (max(size, 1.0) if c.ds_scaled else size) + (1.0 + size) * c.ftz
    if c.ds_eta <= c.ftz:
        return count * (eta * other.max(initial=0.0))
    return cast(Array, eta * (pairs @ other))


def partial_sums(
    r: Reference, c: Contract, error: Array, x: Array, y: Array, up: Array, ay: Array, size: float
) -> Array:
    """Sums per query head, or per query tile, that are rounded before they are added up (x^T y, bounded by up^T ay)."""
    if c.gqa_u and r.G > 1:
        error = error + c.gqa_u * (size * per_head(r, x, y) + error) + c.gqa_eta * r.G
    if c.dkv_acc_u:
        tiles = r.G * -(-r.Lq // c.q_tile)  # of every query head of the group
        total = size * (up.swapaxes(-1, -2) @ ay)
        error = error + tiles * (c.dkv_acc_u * (total + error) + max(1.0, size) * c.acc_eta)
    return error


def per_head(r: Reference, x: Array, y: Array) -> Array:
    """Sum over the group of |x^T y| of each query head."""
    x = np.broadcast_to(x, (r.B, r.Hkv, *x.shape[2:])).reshape(r.B, r.Hkv, r.G, r.Lq, r.Lk)
    y = y.reshape(r.B, r.Hkv, r.G, r.Lq, y.shape[-1])
    return cast(Array, np.abs(x.swapaxes(-1, -2) @ y).sum(2))


def stored(c: Contract, size: Array, error: Array) -> Array:
    """The error after rounding to the output's format."""
    return error + c.out_u * (size + error) + c.out_eta


def _column(x: float | Array) -> float | Array:
    """A per-key number (..., Lk, 1) as a factor of rows (..., 1, Lk)."""
    return x.swapaxes(-1, -2) if isinstance(x, np.ndarray) else x


def loose_gradients(
    r: Reference, c: Contract, f: Forward, p: Recomputed, s: Scores, dp_error: Array, limits: dict[str, Array]
) -> dict[str, Bools]:
    """Where a stored intermediate may overflow, so that nothing is promised; tensors without such places are absent."""
    loose: dict[str, Bools] = {}

    def add(name: str, where: Bools) -> None:
        where = np.broadcast_to(where, limits[name].shape)
        loose[name] = loose[name] | where if name in loose else where

    def add_pairs(bad: Bools, names: tuple[str, ...] = ("dk",)) -> None:
        add("dq", r.heads(np.broadcast_to(any_of(bad, -1), (r.B, r.Hkv, r.G * r.Lq, 1))))
        for name in names:
            add(name, any_of(bad, -2).swapaxes(-1, -2))
        if r.bias is not None:
            add("dbias", r.over_bias(bad.astype(np.float64)) > 0)
        if r.sinks is not None:
            add("dsinks", r.over_sinks(any_of(bad, -1).astype(np.float64)) > 0)

    reach = s.size * max(1.0, abs(r.scale)) if c.ds_scaled else s.size
    if reach.max(initial=0.0) >= c.ds_max:
        add_pairs((reach >= c.ds_max) & r.live)
    if p.overflow is not None and p.overflow.any():
        add_pairs(p.overflow, ("dk", "dv"))
    rows = _overflowing_rows(r, c, dp_error)
    if f.loose is not None:
        rows = f.loose if rows is None else rows | f.loose
        add("dv", any_of(f.loose, -2))
    if rows is not None:
        add_pairs(np.broadcast_to(rows, (*rows.shape[:3], r.Lk)))
    if c.dkv_acc_u or (c.gqa_u and r.G > 1):  # partial sums may overflow the io format before they cancel
        add("dk", abs(r.scale) * (s.size.swapaxes(-1, -2) @ r.aq) + limits["dk"] >= c.out_max)
        add("dv", p.up_z.swapaxes(-1, -2) @ r.ado + limits["dv"] >= c.out_max)
    return {name: where for name, where in loose.items() if where.any()}


def _overflowing_rows(r: Reference, c: Contract, dp_error: Array) -> Bools | None:
    """Rows whose dP or delta may overflow where it is stored, masked pairs included (0 * inf)."""
    rows = None
    if r.dov.max(initial=0.0) * 1.01 + c.dp_eta >= c.dp_max:
        size = np.abs(r.dp_raw if r.z is None else r.dp_raw * np.maximum(r.z, 1.0))  # dropped ones too: inf * 0
        rows = any_of(size + dp_error >= c.dp_max, -1)
    products_of_o = (r.ado * r.ao).sum(-1, keepdims=True)
    if products_of_o.max(initial=0.0) >= min(c.dp_max, MAX32) and c.io != "float64":
        big = products_of_o >= MAX32
        rows = big if rows is None else rows | big
    return rows if rows is not None and rows.any() else None
