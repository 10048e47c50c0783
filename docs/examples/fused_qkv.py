"""q, k and v in one tensor (B, L, 3, H, D), as a projection leaves them; the backward function gives one gradient of that form."""

import torch


def scores(qkv, scale, causal):
    """The scores of each head, float32 (B, H, L, L)."""
    q, k, _ = qkv.permute(2, 0, 3, 1, 4).float()
    s = scale * (q @ k.mT)
    return s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf) if causal else s


def fwd(qkv, scale, causal):
    """o, (B, L, H, D), and the log-sum-exp, (B, H, L)."""
    s = scores(qkv, scale, causal)
    o = s.softmax(-1) @ qkv[:, :, 2].transpose(1, 2).float()
    return o.transpose(1, 2).to(qkv.dtype), s.logsumexp(-1)


def bwd(dout, qkv, out, lse, scale, causal):
    """The gradient of qkv, in its form."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).float()
    dout, out = dout.transpose(1, 2).float(), out.transpose(1, 2).float()
    p = torch.exp(scores(qkv, scale, causal) - lse[..., None])
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * scale
    dqkv = torch.empty_like(qkv)
    for n, gradient in enumerate((ds @ k, ds.mT @ q, p.mT @ dout)):
        dqkv[:, :, n] = gradient.transpose(1, 2).to(qkv.dtype)
    return dqkv


# The adapter
import flashproof


def gradients(do, qkv, o, lse, scale, causal):
    dqkv = bwd(do, qkv, o, lse, scale, causal)
    dq, dk, dv = dqkv.unbind(2)
    return {"dq": dq, "dk": dk, "dv": dv}


@flashproof.target(
    layout="blhd",
    align="top_left",
    lse="natural",
    bwd=gradients,
    supports=flashproof.Region(gqa=False, dv_differs=False, lq_differs=False),
    contract="delta=do.o",
    masked_nonfinite="may_leak",
)
def attention(q, k, v, scale, causal):
    if not q.shape == k.shape == v.shape:
        raise flashproof.Refuse("q, k and v of one shape")
    qkv = torch.stack((q, k, v), dim=2)
    o, lse = fwd(qkv, scale, causal)
    return {"o": o, "lse": lse, "qkv": qkv}
