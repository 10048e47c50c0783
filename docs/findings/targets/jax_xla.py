"""jax.nn.dot_product_attention (XLA) as a target with autograd, through numpy."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_ENABLE_X64", "0")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

from flashproof.fuzz.region import Region
from flashproof.impls import Implementation


def to_jax(x):
    x = x.detach().contiguous()
    if x.dtype == torch.bfloat16:
        return jnp.asarray(x.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
    return jnp.asarray(x.numpy())


def to_torch(x):
    a = np.array(x)
    if a.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(a)


class Bridge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, f, *tensors):
        ctx.none = [t is None for t in tensors]
        ctx.f, ctx.args = f, [to_jax(t) for t in tensors if t is not None]
        return to_torch(jax.jit(f)(*ctx.args))

    @staticmethod
    def backward(ctx, do):
        grads = iter(jax.jit(lambda d, *a: jax.vjp(ctx.f, *a)[1](d))(to_jax(do), *ctx.args))
        return (None, *[None if n else to_torch(next(grads)) for n in ctx.none])


def attention(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        bias, mask = attn_mask, None
    else:
        bias, mask = None, attn_mask
    if query.shape[1] != key.shape[1] and query.shape[1] % key.shape[1]:
        raise NotImplementedError("heads")
    if query.shape[-1] != value.shape[-1]:
        raise NotImplementedError("Dv")
    if 0 in query.shape or 0 in key.shape:
        raise NotImplementedError("empty")
    m = (
        None
        if mask is None
        else jnp.asarray(mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2]).numpy())
    )
    if bias is not None:
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])

    def f(q, k, v, *b):
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
        o = jax.nn.dot_product_attention(
            q, k, v, bias=b[0] if b else None, mask=m, is_causal=is_causal, scale=scale, implementation="xla"
        )
        return o.transpose(0, 2, 1, 3)

    return Bridge.apply(f, query, key, value, bias)


def without_known(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """`attention` without what is known to fail under jit: float16; D = 1 or one row or key, where bfloat16 aborts or raises."""
    lengths = query.shape[2], key.shape[2]
    if query.dtype == torch.float16 or not 2 <= query.shape[-1] <= 128 or min(lengths) < 2:
        raise NotImplementedError("known")
    return attention(query, key, value, attn_mask, is_causal, scale, enable_gqa)


known = Implementation(
    name="jax_xla",
    call=without_known,
    supports=Region(
        dtypes=("float32", "bfloat16"),
        head_dims=(2, 3, 5, 8, 16, 17, 32, 33, 48, 64, 80, 96, 127, 128),
        min_len=2,
        dv_differs=False,
        masks=("none", "causal_top_left", "bool", "additive"),
        softcap=False,
        dropout=False,
        lse=False,
        lse_grad=False,
        alibi=False,
        sinks=False,
    ),
    contract="dp_u=2^-8,dp_eta=2^-126,dead_rows=any,nonfinite=any,masked_nonfinite=may_leak",  # dP is stored in bfloat16
    devices=("cpu",),
)
