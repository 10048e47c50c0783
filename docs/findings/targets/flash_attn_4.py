"""flash-attn 4 through its public function."""

import torch


def attention(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, return_lse=False):
    from flash_attn.cute import flash_attn_func

    if q.dtype not in (torch.float16, torch.bfloat16):
        raise NotImplementedError("float16 and bfloat16 only")
    if q.shape[-1] not in (64, 96, 128) or v.shape[-1] != q.shape[-1]:
        raise NotImplementedError("head dims 64, 96, 128")
    if 0 in q.shape or 0 in k.shape:
        raise NotImplementedError("no empty tensors")
    if softcap and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise NotImplementedError("softcap forward only")
    window = tuple(None if w < 0 else w for w in window_size)
    q, k, v = (
        x
        if x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and all(s and s * x.element_size() % 16 == 0 for s in x.stride()[:-1])
        else x.clone(memory_format=torch.contiguous_format)
        for x in (q, k, v)
    )
    o, lse = flash_attn_func(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window, softcap=softcap, return_lse=True
    )
    return (o, lse) if return_lse else o
