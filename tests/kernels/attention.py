"""A small FlashAttention with planted memory faults, whose other answers are right; imported when the interpreter is on."""

import math

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def _keep(rows, columns, Lq, Lk, CAUSAL: tl.constexpr):
    keep = (rows[:, None] < Lq) & (columns[None, :] < Lk)
    if CAUSAL:
        keep = keep & (columns[None, :] <= rows[:, None] + (Lk - Lq))
    return keep


@triton.jit
def forward_kernel(
    Q,
    K,
    V,
    O,
    LSE,
    scale,
    Lq,
    Lk,
    D,
    sq,
    sqm,
    sk,
    skn,
    sv,
    svn,
    so,
    som,
    sl,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    CAUSAL: tl.constexpr,
    FAULT: tl.constexpr,
):
    pm, bh = tl.program_id(0), tl.program_id(1)
    om = pm * BM + tl.arange(0, BM)
    od = tl.arange(0, BD)
    inside = (om[:, None] < Lq) & (od[None, :] < D)
    q = tl.load(Q + bh * sq + om[:, None] * sqm + od[None, :], mask=inside, other=0.0)
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    hi = Lk
    if CAUSAL:
        hi = tl.minimum(Lk, tl.maximum((pm + 1) * BM + (Lk - Lq), 0))
    for n0 in tl.range(0, hi, BN):
        on = n0 + tl.arange(0, BN)
        kv = (on[:, None] < Lk) & (od[None, :] < D)
        k = tl.load(
            K + bh * sk + on[:, None] * skn + od[None, :],
            mask=(od[None, :] < D) & (on[:, None] >= 0) if FAULT == "key-tail" else kv,
            other=0.0,
        )
        v = tl.load(V + bh * sv + on[:, None] * svn + od[None, :], mask=kv, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
        s = tl.where(_keep(om, on, Lq, Lk, CAUSAL), s, float("-inf"))
        new = tl.maximum(m, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        alpha = tl.exp2(m - safe)
        p = tl.exp2(s - safe[:, None])
        l = l * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m = new
    dead = l == 0.0
    acc = acc / tl.where(dead, 1.0, l)[:, None]
    lse = tl.where(dead, float("-inf"), m / LOG2E + tl.log(tl.where(dead, 1.0, l)))
    tl.store(
        O + bh * so + om[:, None] * som + od[None, :],
        acc.to(O.dtype.element_ty),
        mask=(od[None, :] < D) & (om[:, None] >= 0) if FAULT == "row-tail" else inside,
    )
    tl.store(LSE + bh * sl + om, lse, mask=om < Lq)


@triton.jit
def backward_kernel(
    Q,
    K,
    V,
    DO,
    LSE,
    DELTA,
    DQ,
    DK,
    DV,
    scale,
    Lq,
    Lk,
    D,
    sq,
    sqm,
    sk,
    skn,
    sv,
    svn,
    sd,
    sdm,
    sl,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    CAUSAL: tl.constexpr,
    FAULT: tl.constexpr,
):
    pn, bh = tl.program_id(0), tl.program_id(1)
    on = pn * BN + tl.arange(0, BN)
    od = tl.arange(0, BD)
    kv = (on[:, None] < Lk) & (od[None, :] < D)
    k = tl.load(K + bh * sk + on[:, None] * skn + od[None, :], mask=kv, other=0.0)
    v = tl.load(V + bh * sv + on[:, None] * svn + od[None, :], mask=kv, other=0.0)
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BD], tl.float32)
    for m0 in tl.range(0, Lq, BM):
        om = m0 + tl.arange(0, BM)
        inside = (om[:, None] < Lq) & (od[None, :] < D)
        q = tl.load(Q + bh * sq + om[:, None] * sqm + od[None, :], mask=inside, other=0.0)
        do = tl.load(DO + bh * sd + om[:, None] * sdm + od[None, :], mask=inside, other=0.0)
        lse = (
            tl.load(LSE + bh * sl + om)
            if FAULT == "lse-padding"
            else tl.load(LSE + bh * sl + om, mask=om < Lq, other=0.0)
        )
        delta = tl.load(DELTA + bh * sl + om, mask=om < Lq, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
        p = tl.where(_keep(om, on, Lq, Lk, CAUSAL), tl.exp2(s - lse[:, None] * LOG2E), 0.0)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision="ieee")
        ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta[:, None])
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision="ieee")
        dq = tl.dot(ds.to(k.dtype), k, input_precision="ieee") * scale
        where = DQ + bh * Lq * D + om[:, None] * D + od[None, :]
        if FAULT == "plain-dq":
            tl.store(where, tl.load(where, mask=inside, other=0.0) + dq, mask=inside)
        else:
            tl.atomic_add(where, dq, mask=inside)
    tl.store(DK + bh * Lk * D + on[:, None] * D + od[None, :], (dk * scale).to(DK.dtype.element_ty), mask=kv)
    tl.store(DV + bh * Lk * D + on[:, None] * D + od[None, :], dv.to(DV.dtype.element_ty), mask=kv)


def _strides(t):
    """Of the flattened (batch, head) axis and of rows; the views of these tests have head stride * heads = batch stride or B = 1."""
    return t.stride(1), t.stride(2)


def forward(q, k, v, causal=False, block=16, fault=""):
    """(o, lse): lse (B * H, Lq rounded up to the block)."""
    B, H, Lq, D = q.shape
    padded = -(-Lq // block) * block
    o, lse = torch.empty_like(q), torch.empty(B * H, padded)
    forward_kernel[(padded // block, B * H)](
        q,
        k,
        v,
        o,
        lse,
        D**-0.5,
        Lq,
        k.shape[2],
        D,
        *_strides(q),
        *_strides(k),
        *_strides(v),
        *_strides(o),
        padded,
        BM=block,
        BN=block,
        BD=max(16, triton.next_power_of_2(D)),
        CAUSAL=causal,
        FAULT=fault,
    )
    return o, lse


def backward(q, k, v, o, lse, do, causal=False, block=16, fault=""):
    """(dq, dk, dv)."""
    B, H, Lq, D = q.shape
    Lk = k.shape[2]
    delta = torch.zeros_like(lse)
    delta[:, :Lq] = (o.float() * do.float()).sum(-1).reshape(B * H, Lq)
    dq = torch.zeros(B, H, Lq, D)
    dk, dv = (torch.empty(t.shape, dtype=t.dtype) for t in (k, v))
    backward_kernel[(-(-Lk // block), B * H)](
        q,
        k,
        v,
        do,
        lse,
        delta,
        dq,
        dk,
        dv,
        D**-0.5,
        Lq,
        Lk,
        D,
        *_strides(q),
        *_strides(k),
        *_strides(v),
        *_strides(do),
        lse.shape[1],
        BM=block,
        BN=block,
        BD=max(16, triton.next_power_of_2(D)),
        CAUSAL=causal,
        FAULT=fault,
    )
    return dq.to(q.dtype), dk, dv


class Attention(torch.autograd.Function):
    """o, differentiable: the backward kernel runs when autograd says so."""

    @staticmethod
    def forward(ctx, q, k, v, causal):
        o, lse = forward(q, k, v, causal)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.causal = causal
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        return *backward(q, k, v, o, lse, do, ctx.causal), None


def reference(q, k, v, do, causal=False):
    """o, dq, dk, dv in float64 by torch's autograd."""
    q, k, v = (t.detach().double().requires_grad_() for t in (q, k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        keep = torch.ones(s.shape[-2:], dtype=torch.bool).tril(s.shape[-1] - s.shape[-2])
        s = s.masked_fill(~keep, float("-inf"))
    o = torch.softmax(s, -1) @ v
    return o.detach(), *torch.autograd.grad(o, (q, k, v), do.double())
