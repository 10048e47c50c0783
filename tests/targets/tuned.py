"""An autotuned Triton kernel whose second configuration is wrong: it leaves out the last key of a tile that is not full."""

import torch
import triton
import triton.language as tl


@triton.autotune(configs=[triton.Config({"N": 16, "LOST": 0}), triton.Config({"N": 32, "LOST": 1})], key=["Lk"])
@triton.jit
def kernel(Q, K, V, O, scale, Lq, Lk, D: tl.constexpr, N: tl.constexpr, LOST: tl.constexpr):
    h, i = tl.program_id(1), tl.program_id(0)
    d, m, l = tl.arange(0, D), float("-inf"), 0.0
    acc = tl.full([D], 0.0, tl.float32)
    q = tl.load(Q + (h * Lq + i) * D + d)
    for start in range(0, Lk, N):
        j = start + tl.arange(0, N)
        inside = j < Lk - (LOST if Lk > 1 else 0)
        at = (h * Lk + j)[:, None] * D + d[None, :]
        k = tl.load(K + at, mask=inside[:, None], other=0.0)
        v = tl.load(V + at, mask=inside[:, None], other=0.0)
        s = tl.where(inside, tl.sum(k * q[None, :], 1) * scale, float("-inf"))
        new = tl.maximum(m, tl.max(s, 0))
        p = tl.exp(s - new)
        l = l * tl.exp(m - new) + tl.sum(p, 0)
        acc = acc * tl.exp(m - new) + tl.sum(p[:, None] * v, 0)
        m = new
    tl.store(O + (h * Lq + i) * D + d, acc / l)


def attention(q, k, v, scale=None):
    (B, H, Lq, D), Lk = q.shape, k.shape[2]
    if q.dtype != torch.float32 or D not in (16, 32) or v.shape[3] != D or k.shape[1] != H or not (B and Lq and Lk):
        raise ValueError(f"must get float32, as many key heads, head dim 16 or 32, got q {tuple(q.shape)}")
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    o = torch.empty_like(q)
    kernel[lambda _: (Lq, B * H)](q, k, v, o, D**-0.5 if scale is None else scale, Lq, Lk, D)
    return o
