"""An operator of torch.library with a backward of its own: (B, H, L, D), returns o and lse."""

import torch
from torch import Tensor


@torch.library.custom_op("bring_your_own::attention", mutates_args=())
def op(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    s = q.float() @ k.float().mT * scale
    lse = torch.logsumexp(s, -1)
    p = torch.softmax(s, -1)
    return (p @ v.float()).to(q.dtype), lse


@op.register_fake
def _(q, k, v, scale):
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


def save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])
    ctx.scale = inputs[3]


def backward(ctx, do, dlse):
    q, k, v = (x.float() for x in ctx.saved_tensors)
    p = torch.softmax(q @ k.mT * ctx.scale, -1)
    dp = do.float() @ v.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True) + dlse[..., None]) * ctx.scale
    dq, dk, dv = ds @ k, ds.mT @ q, p.mT @ do.float()
    return *(g.to(x.dtype) for g, x in zip((dq, dk, dv), ctx.saved_tensors, strict=True)), None


op.register_autograd(backward, setup_context=save)


# The adapter
import flashproof


@flashproof.target(lse="natural", supports=flashproof.Region(gqa=False, min_len=1), contract="delta=p.dp")
def attention(q, k, v, scale):
    if q.shape[1] != k.shape[1] or not q.numel() or not k.numel():
        raise flashproof.Refuse("as many key heads as query heads, no empty tensors")
    o, lse = torch.ops.bring_your_own.attention(q, k, v, scale)
    return {"o": o, "lse": lse}
