"""A trainer's attention over packed sequences: (total, H, D), cu_seqlens, causal inside each sequence, bottom-right."""

import torch
import torch.nn.functional as F


def packed_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal):
    """Sequence by sequence through SDPA; a sequence without keys gives zeros."""
    groups = q.shape[1] // k.shape[1]
    out = []
    for b in range(len(cu_seqlens_q) - 1):
        rows, keys = slice(*cu_seqlens_q[b : b + 2].tolist()), slice(*cu_seqlens_k[b : b + 2].tolist())
        qb, kb, vb = (x.transpose(0, 1) for x in (q[rows], k[keys], v[keys]))
        kb, vb = kb.repeat_interleave(groups, 0), vb.repeat_interleave(groups, 0)
        mask = torch.ones(qb.shape[1], kb.shape[1], dtype=torch.bool, device=q.device)
        mask = mask.tril(kb.shape[1] - qb.shape[1]) if causal else mask
        dead = ~mask.any(-1, keepdim=True)
        s = (qb.float() @ kb.float().mT * softmax_scale).masked_fill(~mask, -torch.inf).masked_fill(dead, 0.0)
        p = F.softmax(s, -1).masked_fill(dead, 0.0)
        out.append((p @ vb.float()).to(q.dtype).transpose(0, 1))
    return torch.cat(out) if out else q.new_empty(0, q.shape[1], v.shape[2])


# The adapter
import flashproof


@flashproof.target(layout="packed", align="bottom_right", masked_nonfinite="may_leak")
def attention(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, causal):
    return packed_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=scale, causal=causal)
