"""Which dialect a callable follows, and which of its keywords it has: read from its parameter names.

Each keyword of a dialect has accepted names, the standard one first; it is used only when the callable's own signature has one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from ..impls.loading import Q_K_V, signature, takes_q_k_v
from .masks import Align
from .region import Region


@dataclass(frozen=True)
class Dialect:
    """One calling convention: its keywords with their accepted names, what sets it apart, its layout and alignment."""

    keywords: dict[str, tuple[str, ...]]
    standard: tuple[str, ...]  # names that a callable without a signature is taken to have
    marks: frozenset[str]  # a parameter of this name means this dialect
    hints: frozenset[str]  # so do all of these together, if no mark decides
    align: Align = "top_left"
    heads_inside: bool = False  # tensors are (B, L, H, D)
    rows: bool = False  # tensors are (total, H, D)
    decisive: bool = False  # its marks outweigh those of others


SINKS = ("sinks", "sink", "s_aux", "learnable_sink")
SHARED = {
    "softcap": ("softcap",),
    "window": ("window_size",),
    "lse": ("return_lse",),
    "alibi": ("alibi_slopes",),
    "sinks": SINKS,
}
DIALECTS: dict[str, Dialect] = {
    "sdpa": Dialect(
        keywords={
            "mask": ("attn_mask", "mask"),
            "dropout": ("dropout_p", "dropout"),
            "causal": ("is_causal", "causal"),
            "scale": ("scale", "softmax_scale", "sm_scale"),
            "gqa": ("enable_gqa",),
            **SHARED,
        },
        standard=("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
        marks=frozenset({"attn_mask", "is_causal", "enable_gqa"}),
        hints=frozenset({"dropout_p", "scale"}),
    ),
    "flash_attn": Dialect(
        keywords={
            "dropout": ("dropout_p", "dropout"),
            "scale": ("softmax_scale", "scale", "sm_scale"),
            "causal": ("causal", "is_causal"),
            "mask": ("attn_mask", "mask"),
            **SHARED,
        },
        standard=("dropout_p", "softmax_scale", "causal", "window_size", "softcap"),
        marks=frozenset({"causal", "softmax_scale"}),
        hints=frozenset({"window_size"}),
        align="bottom_right",
        heads_inside=True,
    ),
    "flash_attn_varlen": Dialect(
        keywords={
            "cu_q": ("cu_seqlens_q", "cu_seqlens", "cu_seq_q"),
            "cu_k": ("cu_seqlens_k", "cu_seqlens_kv", "cu_seq_k"),
            "max_q": ("max_seqlen_q", "max_seqlen", "max_q"),
            "max_k": ("max_seqlen_k", "max_seqlen_kv", "max_k"),
            "dropout": ("dropout_p", "dropout"),
            "scale": ("softmax_scale", "scale", "sm_scale"),
            "causal": ("causal", "is_causal"),
            "gqa": ("enable_gqa",),
            **SHARED,
            "lse": ("return_lse", "return_attn_probs", "return_softmax_lse", "return_aux"),
        },
        standard=(
            *("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
            *("dropout_p", "softmax_scale", "causal", "window_size", "softcap"),
        ),
        marks=frozenset({"cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv", "cu_seqlens", "cu_seq_q", "cu_seq_k"}),
        hints=frozenset({"cu_seqlens_q"}),
        align="bottom_right",
        rows=True,
        decisive=True,
    ),
    "flex": Dialect(
        keywords={
            "score": ("score_mod",),
            "mask": ("block_mask",),
            "scale": ("scale",),
            "gqa": ("enable_gqa",),
            "lse": ("return_aux", "return_lse"),
        },
        standard=("score_mod", "block_mask", "scale", "enable_gqa", "return_lse"),
        marks=frozenset({"score_mod", "block_mask"}),
        hints=frozenset({"score_mod"}),
        decisive=True,
    ),
    "native": Dialect(
        keywords={
            "mask": ("mask",),
            "bias": ("bias",),
            "scale": ("scale",),
            "softcap": ("softcap",),
            "dropout": ("dropout",),
            "seed": ("dropout_seed",),
            "lse": ("return_lse",),
            "alibi": ("alibi", "alibi_slopes"),
            "sinks": SINKS,
        },
        standard=("mask", "bias", "scale", "softcap", "dropout", "dropout_seed", "return_lse"),
        marks=frozenset(),  # `bias` and a keyword-only `mask` (elsewhere `mask` may be a tensor): see _decide
        hints=frozenset({"return_lse"}),
    ),
    "adapter": Dialect(
        keywords={
            "mask": ("mask", "attn_mask"),
            "bias": ("bias",),
            "scale": ("scale",),
            "causal": ("causal",),
            "window": ("window",),
            "softcap": ("softcap",),
            "dropout": ("dropout",),
            "seed": ("dropout_seed",),
        },
        standard=(),
        marks=frozenset(),
        hints=frozenset({"@flashproof.target"}),  # no parameter has this name: a declaration makes it, nothing else
    ),
}


@dataclass(frozen=True)
class Binding:
    """How a callable is called: its dialect, the parameters that are used, the keywords it lacks, those it insists on."""

    dialect: str
    bound: tuple[str, ...]
    unbound: tuple[str, ...]
    returns_lse: bool
    required: tuple[str, ...] = ()
    caller: Any = None  # what calls it where its dialect alone does not say how (adapted.Calls)

    def name(self, keyword: str) -> str:
        """The callable's own name for a keyword of its dialect; empty when it has none."""
        accepted = DIALECTS[self.dialect].keywords.get(keyword, ())
        return next((n for n in accepted if n in self.bound), "")


def recognise(call: Callable[..., Any], forced: str = "") -> Binding:
    """The binding of a callable; ValueError names the candidates when its parameters do not decide."""
    if forced and forced not in DIALECTS:
        raise ValueError(f"dialect must be one of {', '.join(DIALECTS)}, got dialect={forced!r}")
    if forced == "adapter":
        raise ValueError("the callable must be decorated with @flashproof.target where dialect=adapter is asked for")
    sig = signature(call)
    if sig is None or all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in sig.parameters.values()):
        if not forced:
            raise ValueError(
                f"the callable does not tell its parameters; state one of --dialect {' | '.join(DIALECTS)}"
            )
        return _bind(forced, dict.fromkeys(DIALECTS[forced].standard, False))
    if not takes_q_k_v(call):
        rule = ", ".join(" or ".join(names) for names in Q_K_V)
        raise ValueError(f"the callable must begin with the parameters {rule}, got ({', '.join(sig.parameters)})")
    params = _named(sig)
    dialect = forced or _decide(params, sig)
    names = {n: p.default is p.empty for n, p in params.items()}
    if forced and any(p.kind is p.VAR_KEYWORD for p in sig.parameters.values()):
        names |= {n: False for n in DIALECTS[forced].standard if n not in names}
    return _bind(dialect, names)


def _named(sig: inspect.Signature) -> dict[str, inspect.Parameter]:
    """The parameters after q, k, v that can be passed by name."""
    return {n: p for n, p in list(sig.parameters.items())[3:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _decide(params: dict[str, inspect.Parameter], sig: inspect.Signature) -> str:
    """The one dialect whose marks the parameters carry, else the one whose hints they carry."""
    marked = [d for d, row in DIALECTS.items() if row.marks & set(params)]
    marked = [d for d in marked if DIALECTS[d].decisive] or marked
    tensor_mask = "mask" in params and params["mask"].kind is not inspect.Parameter.KEYWORD_ONLY
    if not tensor_mask and {"mask", "bias"} & set(params) and not any(DIALECTS[d].decisive for d in marked):
        marked.append("native")
    found = marked or [d for d, row in DIALECTS.items() if row.hints <= set(params)]
    if len(found) == 1 and (marked or not tensor_mask):
        return found[0]
    possible = found if len(found) > 1 else ["sdpa", "native"] if tensor_mask else ["sdpa", "flash_attn"]
    meanings = {
        "sdpa": "sdpa (B, H, L, D), tensor masks",
        "flash_attn": "flash_attn (B, L, H, D)",
        "flash_attn_varlen": "flash_attn_varlen (total, H, D), cu_seqlens",
        "flex": "flex (B, H, L, D), score_mod and block_mask",
        "native": "native (B, H, L, D), Mask objects",
    }
    raise ValueError(
        f"the parameters ({', '.join(sig.parameters)}) fit several dialects: "
        f"{'; '.join(meanings[d] for d in possible)}; state one with --dialect"
    )


def _bind(dialect: str, names: dict[str, bool]) -> Binding:
    """Names of parameters -> whether they have no default, as a binding."""
    keywords = DIALECTS[dialect].keywords
    used = {k: next((n for n in accepted if n in names), "") for k, accepted in keywords.items()}
    bound = tuple(n for n in names if n in used.values())
    for name, required in names.items():
        if required and name not in bound:
            raise ValueError(f"the parameter {name} has no default and dialect {dialect} has no value for it")
    unbound = tuple(accepted[0] for k, accepted in keywords.items() if not used[k])
    return Binding(dialect, bound, unbound, bool(used.get("lse")), tuple(n for n in bound if names[n]))


def expressible(binding: Binding, region: Region | None = None) -> Region:
    """The region narrowed to what the binding can say, so that few drawn cases are inexpressible."""
    region = region or Region()
    if binding.caller is not None:
        return cast(Region, binding.caller.expressible(region))
    has = {k: bool(binding.name(k)) for k in DIALECTS[binding.dialect].keywords}
    native, flex, rows = (binding.dialect == d for d in ("native", "flex", "flash_attn_varlen"))
    align, causal, dense = DIALECTS[binding.dialect].align, has.get("causal", False), has.get("mask", False)
    bias = has["bias"] if native else has["score"] if flex else dense
    flags = {
        "none": True,
        "causal_top_left": dense or (causal and align == "top_left"),
        "causal_bottom_right": dense or (causal and align == "bottom_right"),
        "window": dense or has.get("window", False),
        "bool": dense,
        "packed": dense or rows,
        "additive": dense and bias,
    }
    return replace(
        region,
        masks=tuple(m for m in region.masks if flags[m]),
        gqa=region.gqa and (has.get("gqa", True) or rows),
        lq_differs=region.lq_differs and has.get("cu_k", True),
        bias=region.bias and bias,
        bias_grad=region.bias_grad and bias,
        scale=region.scale and has["scale"],
        softcap=region.softcap and has.get("softcap", bias and flex),
        dropout=region.dropout and has.get("dropout", False),
        lse=region.lse and has["lse"],
        lse_grad=region.lse_grad and has["lse"],
        alibi=region.alibi and has.get("alibi", False),
        sinks=region.sinks and has.get("sinks", False),
        sinks_grad=region.sinks_grad and has.get("sinks", False),
    )
