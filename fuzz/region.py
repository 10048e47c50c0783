"""Region: what a target says it serves. Cases are drawn inside it; a refusal inside it is a failure."""

from __future__ import annotations

from dataclasses import dataclass

from .case import Case
from .masks import Causal, Full, Packed, Window

MASKS = ("none", "causal_top_left", "causal_bottom_right", "window", "packed", "bool", "additive")
"""Structural kinds of mask, by what the target is handed: `bool` and `additive` are dense tensors, `packed` are cu_seqlens."""


def mask_kind(case: Case) -> str:
    """The structural kind of a case's mask."""
    if case.mask == Full() and case.mask_form == "flags":
        return "none"
    if case.mask_form == "flags" and isinstance(case.mask, Causal):
        return f"causal_{case.mask.align}"
    if case.mask_form == "flags" and isinstance(case.mask, Window):
        return "window"
    if case.mask_form == "flags" and isinstance(case.mask, Packed):
        return "packed"
    return "additive" if case.mask_form == "additive" else "bool"


def lengths(case: Case) -> tuple[tuple[int, int], ...]:
    """(Lq, Lk) of each packed sequence, else those of the case."""
    if mask_kind(case) != "packed" or not isinstance(case.mask, Packed):
        return ((case.Lq, case.Lk),)
    return tuple(zip(case.mask.lengths_q, case.mask.lengths_k, strict=True))


def has_empty_sequences(case: Case) -> bool:
    """Whether a packed sequence has no queries or no keys."""
    return mask_kind(case) == "packed" and any(0 in pair for pair in lengths(case))


@dataclass(frozen=True)
class Region:
    """Dtypes, sizes, masks and features served; the default is everything."""

    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    head_dims: tuple[int, ...] = ()  # empty: any
    max_head_dim: int = 256
    min_len: int = 0
    max_len: int = 1 << 30
    dv_differs: bool = True
    gqa: bool = True
    lq_differs: bool = True
    masks: tuple[str, ...] = MASKS
    empty_sequences: bool = True  # packed ones of length 0
    bias: bool = True
    bias_grad: bool = True
    scale: bool = True
    negative_scale: bool = True  # 0 included
    softcap: bool = True
    dropout: bool = True
    lse: bool = True
    lse_grad: bool = True
    backward: bool = True
    layouts: bool = True
    alibi: bool = True
    sinks: bool = True
    sinks_grad: bool = True
    modes: tuple[str, ...] = ()  # ways of calling beyond the plain one: autocast, compile, opcheck

    @property
    def packed(self) -> bool:
        """Whether packed sequences are served."""
        return "packed" in self.masks

    def refuses(self, case: Case) -> str:
        """Why the case lies outside, in a few words; empty inside."""
        for reason, outside in _limits(self, case):
            if outside:
                return reason
        return ""


def narrowing(case: Case) -> list[str]:
    """Fields of Region, as they are written, each of which alone leaves the case outside; the simplest case has none."""
    c, widest, longest = case, max(case.D, case.Dv), max(case.Lq, case.Lk)
    plain = ("float32", "float16", "bfloat16")
    told = (
        (f"dtypes={tuple(d for d in plain if d != c.dtype)}", c.dtype != "float32"),
        (f"masks={tuple(m for m in MASKS if m != mask_kind(c))}", mask_kind(c) != "none"),
        ("min_len=1", not min(c.Lq, c.Lk, c.B)),
        ("empty_sequences=False", has_empty_sequences(c)),
        ("dv_differs=False", c.Dv != c.D),
        (f"max_head_dim={widest - 1}", widest > 1),
        ("gqa=False", c.Hq != c.Hkv),
        ("lq_differs=False", min(c.Lq, c.Lk) > 0 and any(q != k for q, k in lengths(c))),
        (f"max_len={longest - 1}", longest > 1),
        ("negative_scale=False", c.scale is not None and c.scale <= 0),
        ("backward=False", bool(c.requires_grad)),
        ("layouts=False", {c.layout_q, c.layout_k, c.layout_v, c.layout_do, c.layout_mask} != {"contiguous"}),
        ("lse_grad=False", c.lse_grad),
        *((f"{n}=False", bool(getattr(c, n))) for n in ("bias", "softcap", "dropout", "alibi", "sinks")),
        ("scale=False", c.scale is not None),
    )
    return [text for text, holds in told if holds]


def _limits(r: Region, c: Case) -> tuple[tuple[str, bool], ...]:
    dims = (c.D, c.Dv)
    layouts = {c.layout_q, c.layout_k, c.layout_v, c.layout_do, c.layout_mask}
    return (
        (f"dtype {c.dtype}", c.dtype not in r.dtypes),
        (f"head dim {c.D}, {c.Dv}", bool(r.head_dims) and not set(dims) <= set(r.head_dims)),
        (f"head dim above {r.max_head_dim}", max(dims) > r.max_head_dim),
        (f"length below {r.min_len}", min(c.Lq, c.Lk) < r.min_len or (c.B == 0 and r.min_len > 0)),
        (f"sequence below {r.min_len}", any(0 < n < r.min_len for pair in lengths(c) for n in pair)),
        ("packed sequences of length 0", has_empty_sequences(c) and not r.empty_sequences),
        (f"length above {r.max_len}", max(c.Lq, c.Lk) > r.max_len),
        ("Dv different from D", c.Dv != c.D and not r.dv_differs),
        ("grouped heads", c.Hq != c.Hkv and not r.gqa),
        ("Lq different from Lk", any(q != k for q, k in lengths(c)) and not r.lq_differs),
        (f"mask {mask_kind(c)}", mask_kind(c) not in r.masks),
        ("bias", bool(c.bias) and not r.bias),
        ("gradient of the bias", "b" in c.requires_grad and not r.bias_grad),
        ("scale", c.scale is not None and not r.scale),
        ("scale of 0 or below", c.scale is not None and c.scale <= 0 and not r.negative_scale),
        ("softcap", c.softcap > 0 and not r.softcap),
        ("dropout", c.dropout > 0 and not r.dropout),
        ("gradient through lse", c.lse_grad and not (r.lse_grad and r.lse)),
        ("backward", bool(c.requires_grad) and not r.backward),
        ("layouts", layouts != {"contiguous"} and not r.layouts),
        ("ALiBi", bool(c.alibi) and not r.alibi),
        ("sinks", bool(c.sinks) and not r.sinks),
        ("gradient of the sinks", bool(c.sinks) and "s" in c.requires_grad and not r.sinks_grad),
        (f"mode {c.mode}", bool(c.mode) and c.mode not in r.modes),
    )
