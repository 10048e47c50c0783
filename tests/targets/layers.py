"""What the targets of this folder share: attention by its definition, computed in float32."""

import torch


def causal_mask(Lq, Lk, bottom_right):
    return torch.ones(Lq, Lk, dtype=torch.bool).tril(Lk - Lq if bottom_right else 0)


def window_mask(Lq, Lk, left, right):
    distance = torch.arange(Lk)[None] - torch.arange(Lq)[:, None] - (Lk - Lq)
    keep = torch.ones(Lq, Lk, dtype=torch.bool)
    keep = keep & (distance >= -left) if left >= 0 else keep
    return keep & (distance <= right) if right >= 0 else keep


def attend(q, k, v, *, keep=None, bias=0.0, scale=None, softcap=0.0, dropout=0.0, change=None):
    """(o, lse); rows with no allowed key give zeros and -inf."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[1] // k.shape[1]
    q32, k32, v32 = q.to(dtype), k.to(dtype).repeat_interleave(groups, 1), v.to(dtype).repeat_interleave(groups, 1)
    if keep is not None:  # what a key holds that no query may see must reach nothing
        unseen = ~keep.expand(*q.shape[:3], k.shape[2]).any(2)[..., None]
        k32, v32 = k32.masked_fill(unseen, 0.0), v32.masked_fill(unseen, 0.0)
    s = q32 @ k32.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s if change is None else change(s)
    s = s + bias
    s = s if keep is None else s.masked_fill(~keep, -torch.inf)
    dead = (s == -torch.inf).all(-1, keepdim=True)
    s = s.masked_fill(dead, 0.0)
    p = torch.softmax(s, -1).masked_fill(dead, 0.0)
    p = torch.nn.functional.dropout(p, dropout) if dropout else p
    lse = torch.logsumexp(s, -1).masked_fill(dead[..., 0], -torch.inf)
    return (p @ v32).to(q.dtype), lse
