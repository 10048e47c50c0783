"""The backward Triton kernels of `triton_flash`: dq (with delta and the gradient of the bias) by query tile, dk and dv by key tile.

No program writes what another one reads or writes, so gradients are the same in every run; only a broadcast bias is
summed by atomic additions. A query tile is ROWS queries of BLOCK_M / ROWS query heads that share a key head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_scores import RUNTIME, final_scores


@triton.jit(do_not_specialize=RUNTIME)
def dq_kernel(
    Q, q0, q1, q2, q3, K, k0, k1, k2, k3, V, v0, v1, v2, v3, O, DO, g0, g1, g2, g3, LSE, DLSE, DELTA, DQ,
    MASK, m0, m1, m2, m3, BIAS, a0, a1, a2, a3, DBIAS, e0, e1, e2, e3,
    scale, softcap, band_low, band_high, Hq, G, head_tiles, Lq, Lk, D, Dv,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    UNIT: tl.constexpr, ALIGNED: tl.constexpr,
    HAS_BAND: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_DLSE: tl.constexpr, HAS_DBIAS: tl.constexpr, BROADCAST_BIAS: tl.constexpr,
):  # fmt: skip
    """Writes the tile's rows of DQ and DELTA (both contiguous) and its part of DBIAS (strides 0 on broadcast axes).

    Grid: (query tiles, Hkv head_tiles, B).
    """
    # 0. Strides: UNIT says that the last ones are 1, ALIGNED that the others are passed divided by 8.
    if UNIT:
        q3, k3, v3, g3 = 1, 1, 1, 1
    if ALIGNED:
        q0, q1, q2 = 8 * q0, 8 * q1, 8 * q2
        k0, k1, k2 = 8 * k0, 8 * k1, 8 * k2
        v0, v1, v2 = 8 * v0, 8 * v1, 8 * v2
        g0, g1, g2 = 8 * g0, 8 * g1, 8 * g2
    q_strides, k_strides, v_strides = (q0, q1, q2, q3), (k0, k1, k2, k3), (v0, v1, v2, v3)
    do_strides, mask_strides, bias_strides = (g0, g1, g2, g3), (m0, m1, m2, m3), (a0, a1, a2, a3)
    dbias_strides = (e0, e1, e2, e3)

    # 1. Which rows of q, do, lse.
    i0, b = tl.program_id(0) * ROWS, tl.program_id(2).to(tl.int64)
    hk = (tl.program_id(1) // head_tiles).to(tl.int64)
    row, d, dv = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    i, g = i0 + row % ROWS, tl.program_id(1) % head_tiles * (BLOCK_M // ROWS) + row // ROWS
    in_row, in_d, in_dv = (i < Lq) & (g < G), (d < D)[None, :], dv < Dv
    h, at_i = hk * G + g, i.to(tl.int64)
    line = (b * Hq + h) * Lq + i
    in_q, in_o = in_row[:, None] & in_d, in_row[:, None] & in_dv[None, :]
    q_at = Q + b * q_strides[0] + (h * q_strides[1] + at_i * q_strides[2])[:, None] + d[None, :] * q_strides[3]
    do_at = DO + b * do_strides[0] + (h * do_strides[1] + at_i * do_strides[2])[:, None] + dv[None, :] * do_strides[3]
    q = tl.load(q_at, mask=in_q, other=0.0)
    do = tl.load(do_at, mask=in_o, other=0.0)
    lse = tl.load(LSE + line, mask=in_row, other=float("-inf"))
    lse = tl.where(lse == float("-inf"), 0.0, lse)  # a row with no key has scores of -inf only

    # 2. delta = rowsum(do * o) - dlse, for the other kernel too.
    o = tl.load(O + line[:, None] * Dv + dv[None, :], mask=in_o, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(DLSE + line, mask=in_row, other=0.0)
    tl.store(DELTA + line, delta, mask=in_row)

    # 3. Key tiles that the band leaves: v is read transposed.
    start, end = 0, Lk
    if HAS_BAND:
        start = tl.maximum(i0 + band_low, 0) // BLOCK_N * BLOCK_N
        end = tl.minimum(i0 + ROWS + band_high, Lk)
    j = start + tl.arange(0, BLOCK_N)
    at_j = j.to(tl.int64)
    k_at = K + b * k_strides[0] + hk * k_strides[1] + at_j[:, None] * k_strides[2] + d[None, :] * k_strides[3]
    v_at = V + b * v_strides[0] + hk * v_strides[1] + dv[:, None] * v_strides[3] + at_j[None, :] * v_strides[2]
    if HAS_MASK:
        MASK += b * mask_strides[0]
    if HAS_BIAS:
        BIAS += b * bias_strides[0]
    if HAS_DBIAS:
        dbias_at = DBIAS + b * dbias_strides[0] + (h * dbias_strides[1] + at_i * dbias_strides[2])[:, None]
        dbias_at += at_j[None, :] * dbias_strides[3]

    # 4. Recompute the probabilities tile by tile.
    dq = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
    for _ in tl.range(start, end, BLOCK_N):
        in_j = j < Lk
        k = tl.load(k_at, mask=in_j[:, None] & in_d, other=0.0)
        v = tl.load(v_at, mask=in_dv[:, None] & in_j[None, :], other=0.0)
        qk = tl.dot(q, tl.trans(k), input_precision="ieee")
        s, t = final_scores(
            qk, h[:, None], i[:, None], j[None, :], in_row[:, None], in_j[None, :], scale, softcap, band_low, band_high,
            MASK, mask_strides, BIAS, bias_strides, HAS_BAND, HAS_MASK, HAS_BIAS, HAS_SOFTCAP,
        )  # fmt: skip
        p = tl.exp(s - lse[:, None])
        ds = p * (tl.dot(do, v, input_precision="ieee") - delta[:, None])
        if HAS_DBIAS:
            if BROADCAST_BIAS:
                tl.atomic_add(dbias_at, ds, mask=in_row[:, None] & in_j[None, :], sem="relaxed")
            else:
                tl.store(dbias_at, ds.to(DBIAS.dtype.element_ty), mask=in_row[:, None] & in_j[None, :])
            dbias_at += BLOCK_N * dbias_strides[3]
        if HAS_SOFTCAP:
            ds = ds * (1.0 - t * t)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
        j += BLOCK_N
        k_at += BLOCK_N * k_strides[2]
        v_at += BLOCK_N * v_strides[2]
    tl.store(DQ + line[:, None] * D + d[None, :], (dq * scale).to(DQ.dtype.element_ty), mask=in_q)


@triton.jit(do_not_specialize=RUNTIME)
def dkdv_kernel(
    Q, q0, q1, q2, q3, K, k0, k1, k2, k3, V, v0, v1, v2, v3, DO, g0, g1, g2, g3, LSE, DELTA, DK, DV,
    MASK, m0, m1, m2, m3, BIAS, a0, a1, a2, a3,
    scale, softcap, band_low, band_high, Hkv, G, Lq, Lk, D, Dv,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    UNIT: tl.constexpr, ALIGNED: tl.constexpr,
    HAS_BAND: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Writes the key tile's rows of DK and DV (both contiguous), summed over the query heads of the group in float32.

    Grid: (key tiles, Hkv, B).
    """
    # 0. Strides: UNIT says that the last ones are 1, ALIGNED that the others are passed divided by 8.
    if UNIT:
        q3, k3, v3, g3 = 1, 1, 1, 1
    if ALIGNED:
        q0, q1, q2 = 8 * q0, 8 * q1, 8 * q2
        k0, k1, k2 = 8 * k0, 8 * k1, 8 * k2
        v0, v1, v2 = 8 * v0, 8 * v1, 8 * v2
        g0, g1, g2 = 8 * g0, 8 * g1, 8 * g2
    q_strides, k_strides, v_strides = (q0, q1, q2, q3), (k0, k1, k2, k3), (v0, v1, v2, v3)
    do_strides, mask_strides, bias_strides = (g0, g1, g2, g3), (m0, m1, m2, m3), (a0, a1, a2, a3)

    # 1. Which rows of k and v. Tiles of scores are transposed: keys are rows.
    j0, hk, b = tl.program_id(0) * BLOCK_N, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    j, d, dv = j0 + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    in_j, in_d, in_dv = (j < Lk)[:, None], (d < D)[None, :], (dv < Dv)[None, :]
    at_j = j.to(tl.int64)[:, None]
    k_at = K + b * k_strides[0] + hk * k_strides[1] + at_j * k_strides[2] + d[None, :] * k_strides[3]
    v_at = V + b * v_strides[0] + hk * v_strides[1] + at_j * v_strides[2] + dv[None, :] * v_strides[3]
    k = tl.load(k_at, mask=in_j & in_d, other=0.0)
    v = tl.load(v_at, mask=in_j & in_dv, other=0.0)
    if HAS_MASK:
        MASK += b * mask_strides[0]
    if HAS_BIAS:
        BIAS += b * bias_strides[0]

    # 2. Query tiles that the band leaves, for each few query heads of the group.
    start, end = 0, Lq
    if HAS_BAND:
        start = tl.maximum(j0 - band_high, 0) // ROWS * ROWS
        end = tl.minimum(j0 + BLOCK_N - band_low, Lq)
    row = tl.arange(0, BLOCK_M)
    dk = tl.full([BLOCK_N, BLOCK_D], 0.0, tl.float32)
    dv_acc = tl.full([BLOCK_N, BLOCK_DV], 0.0, tl.float32)
    for g0 in tl.range(0, G, BLOCK_M // ROWS):
        i, g = start + row % ROWS, g0 + row // ROWS
        h, at_i = hk * G + g, i.to(tl.int64)
        line = (b * Hkv * G + h) * Lq + i
        q_at = Q + b * q_strides[0] + (h * q_strides[1] + at_i * q_strides[2])[:, None] + d[None, :] * q_strides[3]
        do_at = (
            DO + b * do_strides[0] + (h * do_strides[1] + at_i * do_strides[2])[:, None] + dv[None, :] * do_strides[3]
        )
        for _ in tl.range(start, end, ROWS):
            in_row = (i < Lq) & (g < G)
            q = tl.load(q_at, mask=in_row[:, None] & in_d, other=0.0)
            do = tl.load(do_at, mask=in_row[:, None] & in_dv, other=0.0)
            lse = tl.load(LSE + line, mask=in_row, other=float("inf"))  # rows that do not exist get p = 0
            lse = tl.where(lse == float("-inf"), 0.0, lse)
            delta = tl.load(DELTA + line, mask=in_row, other=0.0)
            qk = tl.dot(k, tl.trans(q), input_precision="ieee")
            s, t = final_scores(
                qk, h[None, :], i[None, :], j[:, None], in_row[None, :], in_j, scale, softcap, band_low, band_high,
                MASK, mask_strides, BIAS, bias_strides, HAS_BAND, HAS_MASK, HAS_BIAS, HAS_SOFTCAP,
            )  # fmt: skip
            p = tl.exp(s - lse[None, :])
            dv_acc = tl.dot(p.to(do.dtype), do, dv_acc, input_precision="ieee")
            ds = p * (tl.dot(v, tl.trans(do), input_precision="ieee") - delta[None, :])
            if HAS_SOFTCAP:
                ds = ds * (1.0 - t * t)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
            i += ROWS
            line += ROWS
            q_at += ROWS * q_strides[2]
            do_at += ROWS * do_strides[2]

    # 3. Masked keys have p = 0, so their rows are 0.
    first = (b * Hkv + hk) * Lk
    tl.store(DK + (first + at_j) * D + d[None, :], (dk * scale).to(DK.dtype.element_ty), mask=in_j & in_d)
    tl.store(DV + (first + at_j) * Dv + dv[None, :], dv_acc.to(DV.dtype.element_ty), mask=in_j & in_dv)
