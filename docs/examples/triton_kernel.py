"""A Triton kernel behind an autograd function: (B, H, L, D), causal aligned bottom-right, D of 16, 32 or 64."""

import torch
import triton
import triton.language as tl

BLOCK = 16


@triton.jit
def scores(q, k, i, j, scale, Lq, Lk, CAUSAL: tl.constexpr):
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    keep = (i[:, None] < Lq) & (j[None, :] < Lk)
    if CAUSAL:
        keep = keep & (j[None, :] <= i[:, None] + Lk - Lq)
    return tl.where(keep, s, float("-inf"))


@triton.jit
def rows(X, at, L, D: tl.constexpr):
    return tl.load(X + at[:, None] * D + tl.arange(0, D)[None, :], mask=at[:, None] < L, other=0.0)


@triton.jit
def forward(Q, K, V, O, LSE, scale, Lq, Lk, D: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    head, i = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    q = rows(Q + head * Lq * D, i, Lq, D)
    m, l = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, D], tl.float32)
    for start in range(0, Lk, BLOCK):
        j = start + tl.arange(0, BLOCK)
        s = scores(q, rows(K + head * Lk * D, j, Lk, D), i, j, scale, Lq, Lk, CAUSAL)
        new = tl.maximum(m, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp(s - safe[:, None])
        rescale = tl.exp(m - safe)
        l = l * rescale + tl.sum(p, 1)
        v = rows(V + head * Lk * D, j, Lk, D)
        acc = acc * rescale[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = new
    o = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    at = i[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(O + head * Lq * D + at, o.to(O.dtype.element_ty), mask=i[:, None] < Lq)
    tl.store(LSE + head * Lq + i, m + tl.log(l), mask=i < Lq)


@triton.jit
def backward(
    Q, K, V, DO, LSE, DELTA, DQ, DK, DV, scale, Lq, Lk, D: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr
):
    head = tl.program_id(0).to(tl.int64)
    for start in range(0, Lk, BLOCK):
        j = start + tl.arange(0, BLOCK)
        k, v = rows(K + head * Lk * D, j, Lk, D), rows(V + head * Lk * D, j, Lk, D)
        dk, dv = tl.zeros([BLOCK, D], tl.float32), tl.zeros([BLOCK, D], tl.float32)
        for first in range(0, Lq, BLOCK):
            i = first + tl.arange(0, BLOCK)
            q, do = rows(Q + head * Lq * D, i, Lq, D), rows(DO + head * Lq * D, i, Lq, D)
            lse = tl.load(LSE + head * Lq + i, mask=i < Lq, other=0.0)
            lse = tl.where(lse == float("-inf"), 0.0, lse)
            p = tl.exp(scores(q, k, i, j, scale, Lq, Lk, CAUSAL) - lse[:, None])
            dp = tl.dot(do, tl.trans(v), input_precision="ieee")
            ds = (p * (dp - tl.load(DELTA + head * Lq + i, mask=i < Lq, other=0.0)[:, None])).to(q.dtype)
            dv += tl.dot(tl.trans(p.to(do.dtype)), do, input_precision="ieee")
            dk += tl.dot(tl.trans(ds), q, input_precision="ieee")
            at, inside = i[:, None] * D + tl.arange(0, D)[None, :], i[:, None] < Lq
            dq = tl.load(DQ + head * Lq * D + at, mask=inside, other=0.0)
            dq += scale * tl.dot(ds, k, input_precision="ieee")
            tl.store(DQ + head * Lq * D + at, dq, mask=inside)
        at = j[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(DK + head * Lk * D + at, (scale * dk).to(DK.dtype.element_ty), mask=j[:, None] < Lk)
        tl.store(DV + head * Lk * D + at, dv.to(DV.dtype.element_ty), mask=j[:, None] < Lk)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, causal):
        if q.shape[-1] not in (16, 32, 64) or v.shape[-1] != q.shape[-1] or q.shape[1] != k.shape[1]:
            raise NotImplementedError("D must be 16, 32 or 64, the same for v, with as many key heads as query heads")
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        B, H, Lq, D = q.shape
        o, lse = torch.empty_like(q), torch.empty(B, H, Lq, dtype=torch.float32, device=q.device)
        if o.numel():
            forward[(triton.cdiv(Lq, BLOCK), B * H)](q, k, v, o, lse, scale, Lq, k.shape[2], D, causal, BLOCK)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.scale, ctx.causal = scale, causal
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        B, H, Lq, D = q.shape
        do = do.contiguous()
        delta = (do.float() * o.float()).sum(-1)
        dq, dk, dv = torch.zeros_like(q, dtype=torch.float32), torch.empty_like(k), torch.empty_like(v)
        if B * H:
            backward[(B * H,)](q, k, v, do, lse, delta, dq, dk, dv, ctx.scale, Lq, k.shape[2], D, ctx.causal, BLOCK)
        return dq.to(q.dtype), dk, dv, None, None


# The adapter
import flashproof


@flashproof.target(
    layout="bhld",
    align="bottom_right",
    supports=flashproof.Region(head_dims=(16, 32, 64), dv_differs=False, gqa=False),
    contract="kv_tile=16,q_tile=16",
    masked_nonfinite="may_leak",
)
def attention(q, k, v, scale, causal):
    return Attention.apply(q, k, v, scale, causal)
