"""The forward Triton kernel of `triton_flash`: one program per query tile, an online softmax over the key tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_scores import RUNTIME, final_scores


@triton.jit(do_not_specialize=RUNTIME)
def forward_kernel(
    Q, q0, q1, q2, q3, K, k0, k1, k2, k3, V, v0, v1, v2, v3, O, LSE, MASK, m0, m1, m2, m3, BIAS, a0, a1, a2, a3,
    scale, softcap, band_low, band_high, Hq, G, head_tiles, Lq, Lk, D, Dv,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    UNIT: tl.constexpr, ALIGNED: tl.constexpr,
    HAS_BAND: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Writes the tile's rows of O (contiguous) and of LSE (natural logarithm, float32, contiguous).

    A tile is ROWS queries of BLOCK_M / ROWS query heads that share a key head. Grid: (query tiles, Hkv head_tiles, B).
    """
    # 0. Strides: UNIT says that the last ones are 1, ALIGNED that the others are passed divided by 8.
    if UNIT:
        q3, k3, v3 = 1, 1, 1
    if ALIGNED:
        q0, q1, q2 = 8 * q0, 8 * q1, 8 * q2
        k0, k1, k2 = 8 * k0, 8 * k1, 8 * k2
        v0, v1, v2 = 8 * v0, 8 * v1, 8 * v2
    q_strides, k_strides, v_strides = (q0, q1, q2, q3), (k0, k1, k2, k3), (v0, v1, v2, v3)
    mask_strides, bias_strides = (m0, m1, m2, m3), (a0, a1, a2, a3)

    # 1. Which rows. Offsets are 64-bit wherever a long sequence or a large batch could pass 2**31 elements.
    i0, b = tl.program_id(0) * ROWS, tl.program_id(2).to(tl.int64)
    hk = (tl.program_id(1) // head_tiles).to(tl.int64)
    row, d, dv = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    i, g = i0 + row % ROWS, tl.program_id(1) % head_tiles * (BLOCK_M // ROWS) + row // ROWS
    in_row, in_d, in_dv = (i < Lq) & (g < G), d < D, (dv < Dv)[None, :]
    h, at_i = hk * G + g, i.to(tl.int64)
    q_at = Q + b * q_strides[0] + (h * q_strides[1] + at_i * q_strides[2])[:, None] + d[None, :] * q_strides[3]
    q = tl.load(q_at, mask=in_row[:, None] & in_d[None, :], other=0.0)

    # 2. Key tiles that the band leaves: k is read transposed.
    start, end = 0, Lk
    if HAS_BAND:
        start = tl.maximum(i0 + band_low, 0) // BLOCK_N * BLOCK_N
        end = tl.minimum(i0 + ROWS + band_high, Lk)
    j = start + tl.arange(0, BLOCK_N)
    at_j = j.to(tl.int64)
    k_at = K + b * k_strides[0] + hk * k_strides[1] + d[:, None] * k_strides[3] + at_j[None, :] * k_strides[2]
    v_at = V + b * v_strides[0] + hk * v_strides[1] + at_j[:, None] * v_strides[2] + dv[None, :] * v_strides[3]
    if HAS_MASK:
        MASK += b * mask_strides[0]
    if HAS_BIAS:
        BIAS += b * bias_strides[0]

    # 3. Online softmax: running maximum m and sum l. Scores stay natural: finfo.min * log2(e) would be -inf.
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, BLOCK_DV], 0.0, tl.float32)
    for _ in tl.range(start, end, BLOCK_N):
        in_j = j < Lk
        k = tl.load(k_at, mask=in_d[:, None] & in_j[None, :], other=0.0)
        v = tl.load(v_at, mask=in_j[:, None] & in_dv, other=0.0)
        qk = tl.dot(q, k, input_precision="ieee")
        s, _t = final_scores(
            qk, h[:, None], i[:, None], j[None, :], in_row[:, None], in_j[None, :], scale, softcap, band_low, band_high,
            MASK, mask_strides, BIAS, bias_strides, HAS_BAND, HAS_MASK, HAS_BIAS, HAS_SOFTCAP,
        )  # fmt: skip
        m_new = tl.maximum(m, tl.max(s, 1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # exp(-inf - -inf) is nan
        p = tl.exp(s - m_safe[:, None])
        decay = tl.exp(m - m_safe)
        l = l * decay + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        m = m_new
        j += BLOCK_N
        k_at += BLOCK_N * k_strides[2]
        v_at += BLOCK_N * v_strides[2]

    # 4. Rows with no allowed key have l = 0: they give 0 and -inf.
    l = tl.where(l == 0.0, 1.0, l)
    acc = acc / l[:, None]
    line = (b * Hq + h) * Lq + i
    tl.store(O + line[:, None] * Dv + dv[None, :], acc.to(O.dtype.element_ty), mask=in_row[:, None] & in_dv)
    tl.store(LSE + line, m + tl.log(l), mask=in_row)
