"""flash_attn_varlen targets, each wrong in one way: the correct one with one fault."""

from functools import partial
from itertools import pairwise

import torch
from layers import attend, causal_mask, window_mask


def _keep(Lq, Lk, most, causal, window, fault):
    """The pairs allowed inside one sequence."""
    if fault == "window_lost_in_decoding" and Lq == 1:
        window = (-1, -1)
    keep = window_mask(Lq, Lk, *window)
    if causal and fault == "diagonal_of_the_longest":
        return keep & (torch.arange(Lk) <= torch.arange(Lq)[:, None] + most[1] - most[0])
    return keep & causal_mask(Lq, Lk, bottom_right=fault != "causal_top_left") if causal else keep


def _spans(cu_seqlens_q, cu_seqlens_k, fault):
    """(first and last row, first and last key) of each sequence."""
    cu_k = cu_seqlens_q if fault == "keys_by_the_lengths_of_q" else cu_seqlens_k
    spans = list(zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_k.tolist()), strict=True))
    if fault == "one_sequence":
        spans = [((0, spans[-1][0][1]), (0, spans[-1][1][1]))] if spans else []
    if fault == "one_key_of_the_neighbour":
        spans = [(rows, (c, min(d + 1, spans[-1][1][1]))) for rows, (c, d) in spans]
    return spans


def attention(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    softmax_scale=None, causal=False, window_size=(-1, -1), return_lse=False, *, fault="",
):  # fmt: skip
    o, lse = (
        torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype),
        torch.full((q.shape[1], q.shape[0]), -torch.inf),
    )
    for n, ((a, b), (c, d)) in enumerate(_spans(cu_seqlens_q, cu_seqlens_k, fault)):
        if fault == "stops_at_an_empty_sequence" and b == a:
            break
        if fault == "keeps_rows_without_keys" and d == c:
            o = torch.cat([o[:a], torch.ones_like(o[a:b]), o[b:]])
            continue
        last = min(d, c + 64) if fault == "keys_cut_at_64" else d
        own_q, own_k, own_v = (x.transpose(0, 1)[None] for x in (q[a:b], k[c:last], v[c:last]))
        if fault == "dv_of_the_first_sequence_alone" and n:
            own_v = own_v.detach()
        keep = _keep(b - a, last - c, (max_seqlen_q, max_seqlen_k), causal, window_size, fault)
        one, its_lse = attend(own_q, own_k, own_v, keep=keep, scale=softmax_scale)
        o = torch.cat([o[:a], one[0].transpose(0, 1), o[b:]])
        lse = torch.cat([lse[:, :a], its_lse[0], lse[:, b:]], 1)
    if fault == "moves_cu_seqlens":
        cu_seqlens_q[1:] -= 1
    o = o + 0.0 * (q.sum() + k.sum() + v.sum()) if not o.requires_grad and q.isfinite().all() else o
    return (o, lse.T if fault == "lse_with_heads_last" else lse) if return_lse else o


one_sequence = partial(attention, fault="one_sequence")
keys_by_the_lengths_of_q = partial(attention, fault="keys_by_the_lengths_of_q")
one_key_of_the_neighbour = partial(attention, fault="one_key_of_the_neighbour")
causal_top_left = partial(attention, fault="causal_top_left")
diagonal_of_the_longest = partial(attention, fault="diagonal_of_the_longest")
window_lost_in_decoding = partial(attention, fault="window_lost_in_decoding")
stops_at_an_empty_sequence = partial(attention, fault="stops_at_an_empty_sequence")
keeps_rows_without_keys = partial(attention, fault="keeps_rows_without_keys")
keys_cut_at_64 = partial(attention, fault="keys_cut_at_64")
dv_of_the_first_sequence_alone = partial(attention, fault="dv_of_the_first_sequence_alone")
moves_cu_seqlens = partial(attention, fault="moves_cu_seqlens")
lse_with_heads_last = partial(attention, fault="lse_with_heads_last")
