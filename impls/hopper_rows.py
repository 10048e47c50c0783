"""What comes before and after the backward kernel of `hopper`: row sums and a zero dq, and dq rounded to the dtype of q."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["heads", "q_len", "padded"])
def prepare_kernel(
    o_at, o0, o1, o2, do_at, g0, g1, g2, lse_at, dlse_at, lse2_at, delta_at, dq_at, heads, q_len, padded,
    D: tl.constexpr, BM: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """Writes lse in base 2 (inf where P is 0) and delta = sum(do o) - dlse, both padded, and zeros to a float32 dq.

    Strides are passed divided by 8, from which the compiler learns that rows begin at 16 bytes. Grid: (B Hq, query tiles).
    """
    bh, i = tl.program_id(0).to(tl.int64), (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    b, h = bh // heads, bh % heads
    d = tl.arange(0, D)[None, :]
    there = i < q_len
    o = tl.load(o_at + 8 * (b * o0 + h * o1 + i[:, None] * o2) + d, mask=there[:, None], other=0.0).to(tl.float32)
    do = tl.load(do_at + 8 * (b * g0 + h * g1 + i[:, None] * g2) + d, mask=there[:, None], other=0.0).to(tl.float32)
    delta = tl.sum(o * do, 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_at + bh * q_len + i, mask=there, other=0.0)
    lse = tl.load(lse_at + bh * q_len + i, mask=there, other=float("-inf"))
    dead = lse == float("-inf")
    tl.store(lse2_at + bh * padded + i, tl.where(dead, float("inf"), lse * 1.4426950408889634), mask=i < padded)
    tl.store(delta_at + bh * padded + i, tl.where(dead, 0.0, delta), mask=i < padded)
    tl.store(dq_at + (bh * q_len + i[:, None]) * D + d, tl.zeros([BM, D], tl.float32), mask=there[:, None])


@triton.jit(do_not_specialize=["heads", "q_len"])
def round_kernel(
    sum_at, dq_at, q0, q1, q2, scale, heads, q_len, D: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """Writes dq = scale times the float32 sum. Strides divided by 8, grid (B Hq, query tiles)."""
    bh, i = tl.program_id(0).to(tl.int64), (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    b, h = bh // heads, bh % heads
    d, there = tl.arange(0, D)[None, :], (i < q_len)[:, None]
    total = tl.load(sum_at + (bh * q_len + i[:, None]) * D + d, mask=there) * scale
    tl.store(dq_at + 8 * (b * q0 + h * q1 + i[:, None] * q2) + d, total.to(dq_at.dtype.element_ty), mask=there)
