"""Device functions that the forward and the backward Triton kernels share: what the final score of a tile is."""

from __future__ import annotations

import triton
import triton.language as tl

RUNTIME = [
    *(
        f"{tensor}{axis}" for tensor in "qkvgmae" for axis in range(4)
    ),  # strides: of q, k, v, do, mask, bias (a), dbias (e)
    *("band_low", "band_high", "Hq", "Hkv", "G", "head_tiles", "Lq", "Lk", "D", "Dv"),
]
"""Arguments whose values must not start another compilation: a new length or stride runs the kernel that is there."""


@triton.jit
def tanh(x):
    """The hyperbolic tangent with a small relative error everywhere, from exp and log alone.

    expm1(y) = (u - 1) y / log(u) with u = exp(y) as rounded (Kahan): what u lost to rounding cancels, where
    1 - 2 / (u + 1) would lose every digit of a small x. Beyond |x| = 20 tanh is 1; the comparisons let nan through.
    """
    y = 2.0 * tl.where(x > 20.0, 20.0, tl.where(x < -20.0, -20.0, x))
    u = tl.exp(y)
    expm1 = tl.where(u == 1.0, y, (u - 1.0) * y / tl.where(u == 1.0, 1.0, tl.log(u)))
    return expm1 / (expm1 + 2.0)


@triton.jit
def final_scores(
    qk, h, i, j, in_row, in_j, scale, softcap, band_low, band_high, MASK, mask_strides, BIAS, bias_strides,
    HAS_BAND: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """(s, t): the tile's final scores, -inf where masked, and tanh(scale qk / softcap), the scores if there is no softcap.

    h, i and j are the query head, query and key of each score, in_row and in_j whether they exist, all broadcastable to the tile, so
    that it may be transposed. MASK and BIAS point at this batch; their strides are (b, h, i, j), 0 on a broadcast axis. The band
    keeps band_low <= j - i <= band_high.
    """
    if HAS_SOFTCAP:
        t = tanh(qk * (scale / softcap))
        s = t * softcap
    else:
        s = qk * scale
        t = s
    keep = in_j
    if HAS_BIAS:
        bias_at = BIAS + (h * bias_strides[1] + i.to(tl.int64) * bias_strides[2]) + j.to(tl.int64) * bias_strides[3]
        s += tl.load(bias_at, mask=in_row & in_j, other=0.0).to(tl.float32)
    if HAS_BAND:
        distance = j - i
        keep = keep & (distance >= band_low) & (distance <= band_high)
    if HAS_MASK:
        mask_at = MASK + (h * mask_strides[1] + i.to(tl.int64) * mask_strides[2]) + j.to(tl.int64) * mask_strides[3]
        keep = keep & (tl.load(mask_at, mask=in_row & in_j, other=0) != 0)
    return tl.where(keep, s, float("-inf")), t
