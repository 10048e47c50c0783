"""native targets, each wrong in one way: the correct one with one fault."""

from functools import partial

import torch
from layers import attend


class _Mean(torch.autograd.Function):
    """The identity whose gradient is the mean over the axes it is broadcast on instead of the sum."""

    @staticmethod
    def forward(ctx, bias, scores):
        ctx.times = scores / bias.numel()
        return bias.view_as(bias)

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.times, None


def _dense(mask, B, H, Lq, Lk, fault):
    if mask is None or fault == "ignores_the_mask":
        return None
    return mask.dense(B, H, Lq, Lk)


def attention(q, k, v, *, mask=None, bias=None, scale=None, softcap=0.0, return_lse=False, fault=""):
    B, H, Lq, _ = q.shape
    keep = _dense(mask, B, H, Lq, k.shape[2], fault)
    added = 0.0 if bias is None else bias
    if fault == "bias_gradient_is_a_mean" and bias is not None and bias.numel():
        added = _Mean.apply(bias, B * H * Lq * k.shape[2])
    if fault == "bias_of_the_first_batch" and bias is not None:
        added = bias[:1]
    if fault == "bias_of_the_first_head" and bias is not None:
        added = bias[:, :1]
    if fault == "bias_before_softcap" and softcap and bias is not None:
        o, lse = attend(q, k, v, keep=keep, change=lambda s: softcap * torch.tanh((s + added) / softcap), scale=scale)
    elif fault == "softcap_divides_only" and softcap:
        o, lse = attend(q, k, v, keep=keep, bias=added, scale=scale, change=lambda s: torch.tanh(s / softcap))
    elif fault == "reads_a_batch_too_few" and B > 2:
        o, lse = attend(q, torch.cat([k[:-1], k[-2:-1]]), v, keep=keep, bias=added, scale=scale, softcap=softcap)
    else:
        o, lse = attend(q, k, v, keep=keep, bias=added, scale=scale, softcap=softcap)
    if fault == "dead_rows_are_nan":
        o = torch.where((lse == -torch.inf)[..., None], torch.nan, o)
    if fault == "lse_of_every_key" and keep is not None:
        lse = attend(q, k, v, bias=added, scale=scale, softcap=softcap)[1]
    if fault == "a_column_beyond_64_lost" and v.shape[3] > 64:
        o = torch.cat([o[..., :64], 0 * o[..., 64:]], -1)
    return (o, lse) if return_lse else o


ignores_the_mask = partial(attention, fault="ignores_the_mask")
bias_of_the_first_batch = partial(attention, fault="bias_of_the_first_batch")
bias_of_the_first_head = partial(attention, fault="bias_of_the_first_head")
bias_gradient_is_a_mean = partial(attention, fault="bias_gradient_is_a_mean")
bias_before_softcap = partial(attention, fault="bias_before_softcap")
softcap_divides_only = partial(attention, fault="softcap_divides_only")
reads_a_batch_too_few = partial(attention, fault="reads_a_batch_too_few")
dead_rows_are_nan = partial(attention, fault="dead_rows_are_nan")
lse_of_every_key = partial(attention, fault="lse_of_every_key")
a_column_beyond_64_lost = partial(attention, fault="a_column_beyond_64_lost")
