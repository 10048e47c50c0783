"""Limits of o and lse: how far conforming arithmetic can be from the float64 answer, element by element.

docs/limits.md derives every line; names there and here agree. All arrays are float64, rows as in exact.Reference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np

from .contract import MAX32, Contract
from .exact import Array, Bools, Reference, any_of

SAFE = 300.0
"""Log weights may be off by this much before exp could overflow float64 in the direct formula."""
UNKNOWN = 1e300
"""A log weight that is off by more may be anything; finite, so that differences of two of them are numbers."""


def comb(*units: float | Array) -> float | Array:
    """(1 + a)(1 + b)... - 1: the relative error of a product of perturbed factors."""
    product: float | Array = 1.0
    for unit in units:
        product = product * (1.0 + unit)
    return product - 1.0


def summed(c: Contract, n: float | Array) -> float | Array:
    """Relative to the sum of absolute values: the error of accumulating n terms in any order."""
    return c.acc_k * c.acc_u * n


def log_sum(x: Array) -> Array:
    """log(sum(exp(x))) over keys, safe for any x; 0 where every x is -inf."""
    top = x.max(-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isneginf(top), 0.0, top)
    total = np.exp(x - top).sum(-1, keepdims=True)
    return cast(Array, top + np.log(np.where(total > 0, total, 1.0)))


@dataclass(frozen=True)
class Weights:
    """How far the softmax of perturbed scores can be from p: |log weight error| of key j is at most E_j.

    up: the largest weight; off: a bound on |weight - p| that is exact to first order (both before dropout);
    log_norm: the largest |log| of the perturbed normaliser over the exact one; off_sink: as off, of the sink, if any.
    """

    up: Array
    off: Array
    log_norm: Array
    off_sink: Array | float = 0.0


def inflate(p: Array, lp: Array, E: Array) -> tuple[Array, Array]:
    """(p e^E, p (e^E - 1)), finite for every E: a weight of e^600 is as good as infinite."""
    if E.max(initial=0.0) < SAFE:
        off = p * np.expm1(E)
        return p + off, off
    up = np.exp(np.minimum(lp + E, 600.0))
    return up, up * -np.expm1(-E)


def weights(r: Reference, E: Array, E_sink: Array | None = None) -> Weights:
    """The exact identity sum_j (w_j - p_j) v_j = sum_j p_j expm1(e_j) (v_j - o) / sum_k p_k exp(e_k), maximised over |e| <= E.

    A sink is a key like the others, with a value of zero and an error of its own.
    """
    if E_sink is None:
        return _weights(r.p, r.lp, r.dead, E)
    p, lp = np.concatenate([r.p, r.p_sink], -1), np.concatenate([r.lp, r.lp_sink], -1)
    w = _weights(p, lp, r.dead, np.concatenate([E, E_sink], -1))
    return Weights(w.up[..., :-1], w.off[..., :-1], w.log_norm, w.off[..., -1:])


def _weights(p: Array, lp: Array, dead: Bools, E: Array) -> Weights:
    if E.max(initial=0.0) < SAFE:
        up, off = inflate(p, lp, E)
        low = (p / (1.0 + np.expm1(E))).sum(-1, keepdims=True)
        low = np.where(dead, 1.0, low)
        high = np.where(dead, 1.0, up.sum(-1, keepdims=True))
        return Weights(up / low, off / low, np.maximum(np.log(high), -np.log(low)))
    log_low, log_high = log_sum(lp - E), log_sum(lp + E)
    up = np.exp(np.minimum(lp + E - log_low, 70.0))
    return Weights(up, up * -np.expm1(-E), np.maximum(log_high, -log_low))


@dataclass(frozen=True)
class Forward:
    """Limits of o and lse as rows, and what the backward limits need: errors of the scores and of their scaled form."""

    o: Array
    lse: Array
    scores: Array
    scaled: Array
    rescales: Array
    loose: Bools | None


def forward_limits(r: Reference, c: Contract, *, centred: bool = True) -> Forward:
    """Limits of o and lse; `centred` uses that score errors cannot move o where v is constant."""
    scaled = scaled_scores(r, c)
    scores = final_scores(r, c, scaled)
    one = 0 if r.sinks is None else 1  # a sink is a term and a tile more
    T = np.ceil(r.n / c.kv_tile) + one
    w = weights(r, log_weight_errors(r, c, scores, T), None if r.sinks is None else sink_error(r, c, T))
    normaliser = summed(c, r.n + one) + T * c.u + (c.p_u if c.l_from_rounded_p else 0.0)
    normaliser = normaliser / np.maximum(1.0 - normaliser, 1e-3)
    return Forward(
        np.where(r.n == 0, 0.0, output_limit(r, c, w, T, normaliser, centred)),
        np.where(r.dead, 0.0, lse_limit(r, c, w, normaliser)),
        scores, scaled, T, overflowing_rows(r, c),
    )  # fmt: skip


def scaled_scores(r: Reference, c: Contract) -> Array:
    """Error of scale * q.k: operand and accumulation roundings on |q||k|, storage, and flushed subnormal products."""
    size = abs(r.scale)
    unit = size * cast(float, comb(c.dot_u, c.dot_u, c.q_u, summed(c, r.D), 6 * c.u + c.constant_u))
    sums = r.aq.sum(-1).max(initial=0.0) + r.ak.sum(-1).max(initial=0.0) + r.D
    floor = (1.0 + size) * c.ftz * sums + 2 * c.s_eta * max(1.0, size)
    error = unit * r.qk + floor
    return cast(Array, error + c.s_u * np.abs(r.zs) if c.s_u else error)


def final_scores(r: Reference, c: Contract, scaled: Array) -> Array:
    """Error of the final score: through the softcap, which damps it where it saturates, and the bias on top."""
    error = scaled
    if r.softcap:
        low, high = softcap_range(r, scaled)
        exact = np.abs(r.s0)
        moved = np.maximum(r.softcap * high - exact, exact - r.softcap * low)
        error = np.minimum(moved, scaled) + (c.tanh_u + 3 * c.u + c.s_u + c.constant_u) * exact
    if r.bias is not None:
        error = error + (2 * c.u + c.s_u) * np.abs(r.s) + 2 * c.u * np.abs(r.s0)
    if r.alibi is not None:
        error = error + alibi_error(r, c)
    return error


def alibi_error(r: Reference, c: Contract) -> Array:
    """Error that adding -slope * distance makes: slope over scale, product, conversion of base, and the sums.

    Distances are exact integers. Added before a bias or after it, the partial sum is at most |s| + |alibi| + |s0|.
    """
    size = np.abs(cast(Array, r.alibi))
    return cast(
        Array, (6 * c.u + c.s_u + c.constant_u) * size + (2 * c.u + c.s_u) * np.abs(r.s) + 2 * c.u * np.abs(r.s0)
    )


def softcap_range(r: Reference, scaled: Array) -> tuple[Array, Array]:
    """tanh of the least and the greatest that |scale q.k| / softcap can be computed as; the least may be negative."""
    x, error = np.abs(r.zs), scaled
    return np.tanh((x - error) / r.softcap), np.tanh((x + error) / r.softcap)


def log_weight_errors(r: Reference, c: Contract, scores: Array, T: Array) -> Array:
    """E: error of the log of the weight of key j, apart from what is common to the row.

    Key j is only ever compared with a running maximum between its own score and the row's (minus `rescale_slack`), and
    the rescale exponents telescope, so nothing grows with the number of tiles but their exponentials, or with the size of
    scores that other keys have: a bias of finfo.min on one key costs the others nothing.
    """
    s, m = np.abs(r.s), np.abs(r.m)
    gap = np.maximum(r.m - r.s, 0.0)
    rounding = 2 * c.u * s + 2 * c.u * np.maximum(s, m) + 3 * c.u * gap
    constants = c.constant_u * s + c.constant_u * m if c.constant_u else 0.0
    E = scores + rounding + constants + ((1 + T) * c.exp_u + 5 * c.u * c.rescale_slack)
    return cast(Array, np.minimum(E, UNKNOWN))


def sink_error(r: Reference, c: Contract, T: Array) -> Array:
    """E of the sink, (B, Hkv, R, 1): it is compared with a maximum that knows it or not, or with the lse of the keys."""
    given = cast(Array, r.sinks)
    sink = np.where(np.isneginf(given), 0.0, given)
    size, keys, lse = np.abs(sink), np.abs(r.keys_m), np.abs(r.keys_lse)
    rounding = (
        2 * c.u * size + 2 * c.u * np.maximum(np.maximum(size, keys), np.abs(r.m)) + 3 * c.u * np.abs(sink - r.keys_m)
    )
    through_lse = c.log_abs + (5 * c.u + c.lse_u) * lse
    # through the lse: log2(e) on the keys' maximum, ln(2) on the lse, log2(e) on what lies between it and the sink
    constants = c.constant_u * (size + np.maximum(np.abs(r.m), keys + 2 * lse))
    E = rounding + through_lse + constants + c.s_u * size + ((1 + T) * c.exp_u + 5 * c.u * c.rescale_slack)
    return cast(Array, np.minimum(E, UNKNOWN))


def output_limit(r: Reference, c: Contract, w: Weights, T: Array, normaliser: float | Array, centred: bool) -> Array:
    """Score errors through the softmax, the cast of P and its sum, the normaliser, the output's own rounding."""
    off, up = w.off, np.minimum(w.up, 1.0)
    once_more = 0.0
    if r.z is not None:
        off, up, once_more = off * r.z, up * r.z, 2 * c.u + c.constant_u
    moved = score_effect(r, off, w.off.sum(-1, keepdims=True), centred, w.off_sink)
    added = r.bias is not None or r.alibi is not None
    if added and r.m.min(initial=0.0) <= -lowest_lse(c):  # in base 2 every score of the row may be -inf
        moved = np.where(r.m <= -lowest_lse(c), largest_v(r) + r.ao, moved)
    cast_and_sum = comb(c.p_u, c.dot_u, summed(c, r.n) + T * c.u, once_more)
    term = moved + (up @ r.av) * cast_and_sum + small_terms(r, max(c.p_eta, c.ftz), c.ftz) + r.n * c.ftz
    before = term + (r.ao + term) * comb(normaliser, (3 if r.sinks is None else 5) * c.u + c.constant_u)
    return cast(Array, before + c.out_u * (r.ao + before) + c.out_eta)


def score_effect(r: Reference, off: Array, mass: Array, centred: bool, sink: Array | float = 0.0) -> Array:
    """Bound on sum_j off_j |v_j - o|: the least of the triangle, Cauchy-Schwarz about the mean of v, and v's range.

    The sink's v is zero, so it adds sink * |o|.
    """
    mass = mass + sink
    triangle = off @ r.av + r.ao * mass
    bound = np.minimum(triangle, largest_v(r) + r.ao)
    if r.z is not None or not centred or not r.Lk:
        return cast(Array, bound)
    mean = r.v.mean(-2, keepdims=True)
    v, o = r.v - mean, r.o - mean
    square, around = off @ (v * v), o * o * (mass - sink)
    spread = np.maximum(square - 2 * o * (off @ v) + around, 0.0) + 64 * 2.0**-53 * (square + around)
    spread = spread + sink * r.o * r.o
    return cast(Array, np.minimum(bound, np.sqrt(mass * spread)))


def largest_v(r: Reference) -> Array:
    """The largest |v| of each column, times the largest dropout multiplier (B, Hkv, 1, Dv)."""
    return cast(Array, r.av.max(-2, keepdims=True, initial=0.0) * (1.0 if r.z is None else r.z.max(initial=0.0)))


def small_terms(r: Reference, eta: float, ftz: float) -> Array | float:
    """eta * sum over live keys of |v|: weights that underflow. By the largest |v| when eta is only a flush to zero."""
    if eta <= ftz:
        return r.n * (eta * r.av.max(initial=0.0) * (1.0 if r.z is None else r.z.max(initial=0.0)))
    return cast(Array, eta * ((r.kf if r.z is None else r.kf * r.z) @ r.av))


def lse_limit(r: Reference, c: Contract, w: Weights, normaliser: float | Array) -> Array:
    """Error of the log of the normaliser, and of m + log(l) in the base of the exponential."""
    m = np.abs(r.m)
    rounding = c.u * (2 * m + 3 * r.alse) + c.constant_u * (m + r.alse)
    if r.sinks is not None:  # the lse of the keys may be rounded before the sink is added to it
        keys = np.abs(r.keys_lse)
        rounding = rounding + (1.0 - r.p_sink) * (c.log_abs + (5 * c.u + c.lse_u + c.constant_u) * keys)
    return cast(Array, w.log_norm + normaliser + rounding + c.log_abs + c.lse_u * r.alse)


def overflowing_rows(r: Reference, c: Contract) -> Bools | None:
    """Rows (B, Hkv, R, 1) with a score that may overflow where it is stored, so that nothing is promised; None if none.

    q.k and scale * q.k count in masked pairs too (0 * inf). A bias may push a score to -inf, which is its own weight 0,
    unless it does so to every key of the row.
    """
    size = max(1.0, abs(r.scale))
    reach = c.s_max / (1.0 + 2.0**-8)
    narrow_bias = r.bias is not None and c.s_max < MAX32
    if r.qk.max(initial=0.0) * size < reach and not narrow_bias:
        return None
    bad = np.abs(r.raw) * size + r.qk * size * 2.0**-9 >= c.s_max
    rows = any_of(bad, -1)
    if narrow_bias:
        high = np.where(r.live, r.s, 0.0).max(-1, keepdims=True, initial=0.0)
        rows = rows | (high >= reach) | (r.m <= -reach)
    return rows if rows.any() else None


def lowest_lse(c: Contract) -> float:
    """An lse below minus this may be -inf: in base 2 the scores of the whole row overflowed."""
    return c.s_max * math.log(2.0)
