"""flash_attn targets, each wrong in one way: the correct one with one fault."""

from functools import partial

import torch
from layers import attend, causal_mask, window_mask


def attention(
    q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, return_lse=False, *, fault=""
):
    Lq, Lk = q.shape[1], k.shape[1]
    left, right = window_size
    if fault == "window_one_wider" and left >= 0:
        left += 1
    keep = window_mask(Lq, Lk, left, right)
    if causal:
        keep = keep & causal_mask(Lq, Lk, bottom_right=fault != "causal_top_left")
    if fault == "last_key_of_a_tail_lost" and Lk > 16 and Lk % 16:
        keep = keep & (torch.arange(Lk) < Lk - 1)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    if fault == "heads_interleaved" and groups > 1:
        k, v = k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1)
    if fault == "one_head_of_a_group_gives_dv" and groups > 1:
        v = (
            torch.cat([v, v.detach().repeat(1, groups - 1, 1, 1)], 1)
            .unflatten(1, (groups, -1))
            .transpose(1, 2)
            .flatten(1, 2)
        )
        k = k.repeat_interleave(groups, 1)
    if fault == "scale_of_the_values_width" and softmax_scale is None:
        softmax_scale = v.shape[-1] ** -0.5
    o, lse = attend(q, k, v, keep=keep, scale=softmax_scale, softcap=0.0 if fault == "ignores_softcap" else softcap)
    if fault == "dead_rows_are_means":
        o = torch.where(
            (lse == -torch.inf)[..., None],
            v.repeat_interleave(q.shape[1] // v.shape[1], 1).float().mean(2, True).to(o.dtype),
            o,
        )
    if fault == "binary_logarithm":
        lse = lse * 1.4426950408889634
    if fault == "lse_with_heads_last":
        lse = lse.transpose(1, 2)
    return (o.transpose(1, 2), lse) if return_lse else o.transpose(1, 2)


causal_top_left = partial(attention, fault="causal_top_left")
window_one_wider = partial(attention, fault="window_one_wider")
ignores_softcap = partial(attention, fault="ignores_softcap")
scale_of_the_values_width = partial(attention, fault="scale_of_the_values_width")
binary_logarithm = partial(attention, fault="binary_logarithm")
lse_with_heads_last = partial(attention, fault="lse_with_heads_last")
last_key_of_a_tail_lost = partial(attention, fault="last_key_of_a_tail_lost")
heads_interleaved = partial(attention, fault="heads_interleaved")
dead_rows_are_means = partial(attention, fault="dead_rows_are_means")
one_head_of_a_group_gives_dv = partial(attention, fault="one_head_of_a_group_gives_dv")
