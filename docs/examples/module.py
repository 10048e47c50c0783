"""A module that keeps its causal mask from call to call: (B, L, H * D) in and out, as inside a transformer block."""

import torch
from torch import nn


class CausalAttention(nn.Module):
    def __init__(self, heads, dim):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.register_buffer("mask", torch.ones(0, 0, dtype=torch.bool), persistent=False)

    def forward(self, q, k, v):
        if self.mask.shape[0] < q.shape[1]:
            self.mask = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
        q, k, v = (x.unflatten(-1, (self.heads, self.dim)).transpose(1, 2) for x in (q, k, v))
        s = (q.float() @ k.float().mT) * self.dim**-0.5
        s = s.masked_fill(self.mask[: q.shape[2], : q.shape[2]], -torch.inf)
        return (s.softmax(-1) @ v.float()).to(q.dtype).transpose(1, 2).flatten(2)


# The adapter
import flashproof


@flashproof.target(
    layout="blhd",
    align="top_left",
    factory=lambda Hq, D, device: CausalAttention(Hq, D).to(device),
    supports=flashproof.Region(masks=("causal_top_left",), gqa=False, dv_differs=False, lq_differs=False),
    masked_nonfinite="may_leak",
)
def attention(q, k, v, causal, made):
    if not causal or q.shape != k.shape or q.shape != v.shape:
        raise flashproof.Refuse("causal self-attention with equal heads only")
    return made(q.flatten(2), k.flatten(2), v.flatten(2)).unflatten(-1, q.shape[2:])
