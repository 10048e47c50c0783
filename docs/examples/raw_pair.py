"""A forward and a backward function that write into buffers, as C++ extensions do: (B, L, H, D), lse as a binary logarithm."""

import math

import torch

TILE = 32


def fwd(q, k, v, out, lse, scale):
    """o and log2-sum-exp, one tile of keys after another."""
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    m = torch.full(q.shape[:3], -math.inf, device=q.device)
    total, acc = torch.zeros_like(m), torch.zeros(*q.shape[:3], v.shape[-1], device=q.device)
    for start in range(0, k.shape[2], TILE):
        s = (scale / math.log(2)) * (q @ k[:, :, start : start + TILE].mT)
        new = torch.maximum(m, s.amax(-1))
        p = torch.exp2(s - new[..., None])
        total = total * torch.exp2(m - new) + p.sum(-1)
        acc = acc * torch.exp2(m - new)[..., None] + p @ v[:, :, start : start + TILE]
        m = new
    out.copy_((acc / total.clamp_min(1e-30)[..., None]).transpose(1, 2))
    lse.copy_(m + torch.log2(total))


def bwd(dout, q, k, v, out, lse, dq, dk, dv, scale):
    """The gradients, from the saved output and lse."""
    q, k, v, dout, out = (x.transpose(1, 2).float() for x in (q, k, v, dout, out))
    p = torch.exp2((scale / math.log(2)) * (q @ k.mT) - lse[..., None])
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * scale
    dq.copy_((ds @ k).transpose(1, 2))
    dk.copy_((ds.mT @ q).transpose(1, 2))
    dv.copy_((p.mT @ dout).transpose(1, 2))


# The adapter
import flashproof


def gradients(do, q, k, v, o, lse, dq, dk, dv, scale):
    bwd(do, q, k, v, o, lse, dq, dk, dv, scale)


@flashproof.target(
    layout="blhd",
    lse="log2",
    bwd=gradients,
    out=("o", "lse", "dq", "dk", "dv"),
    supports=flashproof.Region(gqa=False),
    contract="delta=do.o",
)
def attention(q, k, v, o, lse, scale):
    if q.shape[2] != k.shape[2]:
        raise flashproof.Refuse("as many key heads as query heads")
    fwd(q, k, v, o, lse, scale)
