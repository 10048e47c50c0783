"""What an adapted target can be told, and what one case tells it: tensors in its layout, masks, values, by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .adapter import LN2, PACKED, Adapter
from .arrangement import Arrangement, arranged
from .dialects import APART, Inexpressible, diagonals
from .masks import Window
from .region import Region, mask_kind
from .sequences import offsets
from .tensors import Inputs


@dataclass(frozen=True)
class Telling:
    """What one adapter can be told."""

    adapter: Adapter

    def lacks(self) -> tuple[str, ...]:
        """What the function cannot be told, in the words of its parameters."""
        takes, packed = self.adapter.takes, self.adapter.layout == PACKED
        dense = () if packed else ("mask", "bias")
        wanted = ("scale", "causal", "window", *dense, "softcap", "dropout", "alibi_slopes", "sinks")
        return tuple(n for n in wanted if n not in takes and not (n in dense and "attn_mask" in takes))

    def expressible(self, region: Region) -> Region:
        """The region narrowed to what the function can be told, so that few drawn cases are inexpressible."""
        a, takes = self.adapter, set(self.adapter.takes)
        dense, packed = bool({"mask", "attn_mask"} & takes), a.layout == PACKED
        bias = bool({"bias", "attn_mask"} & takes)
        backward = not a.forward_only
        flags = {
            "none": True,
            "causal_top_left": dense or ("causal" in takes and a.align == "top_left"),
            "causal_bottom_right": dense or ("causal" in takes and a.align == "bottom_right"),
            "window": dense or "window" in takes,
            "bool": dense,
            "packed": dense or packed,
            "additive": dense and bias,
        }
        lse = "lse" in a.returns
        return replace(
            region,
            masks=tuple(m for m in region.masks if flags[m]),
            lq_differs=region.lq_differs and "cu_seqlens" not in takes,
            bias=region.bias and bias,
            bias_grad=region.bias_grad and bias and backward and (a.bwd is None or "dbias" in a.bwd_returns),
            scale=region.scale and "scale" in takes,
            alibi=region.alibi and "alibi_slopes" in takes,
            sinks=region.sinks and "sinks" in takes,
            sinks_grad=region.sinks_grad
            and "sinks" in takes
            and backward
            and (a.bwd is None or "dsinks" in a.bwd_returns),
            softcap=region.softcap and "softcap" in takes,
            dropout=region.dropout and "dropout" in takes,
            lse=region.lse and lse,
            lse_grad=region.lse_grad and lse and backward and (a.bwd is None or "dlse" in a.bwd_takes),
            backward=region.backward and backward,
        )

    def given(self, inputs: Inputs) -> tuple[dict[str, Any], Arrangement]:
        """What the function may take, by name, but for what factories make; and how it is arranged."""
        case, a = inputs.case, self.adapter
        causal, window = diagonals(case, a.align or "top_left") if case.mask_form == "flags" else (None, None)
        arrangement = arranged(a.layout, inputs, causal, window, a.align)
        given: dict[str, Any] = arrangement.tensors() | self._masks(inputs, causal, window, arrangement)
        given |= {
            "scale": case.resolved_scale,
            "softcap": case.softcap,
            "dropout": case.dropout,
            "dropout_seed": case.seed,
        }
        for name, needed in (
            ("scale", case.scale is not None),
            ("softcap", case.softcap > 0),
            ("dropout", case.dropout > 0),
        ):
            if needed and name not in a.takes:
                raise Inexpressible(f"the target takes no parameter {name}")
        given |= self._features(inputs)
        if arrangement.sequences is not None:
            given |= _lengths(arrangement, a.takes, inputs.device)
        if case.lse_grad:
            self._through_lse(inputs, given, arrangement)
        return given, arrangement

    def _features(self, inputs: Inputs) -> dict[str, Any]:
        """ALiBi slopes and sinks where the case has them."""
        given = {}
        for name, tensor in (
            ("alibi_slopes", getattr(inputs, "alibi", None)),
            ("sinks", getattr(inputs, "sinks", None)),
        ):
            given[name] = tensor
            if tensor is not None and name not in self.adapter.takes:
                raise Inexpressible(f"the target takes no parameter {name}")
        if inputs.case.alibi and mask_kind(inputs.case) == "packed":
            raise Inexpressible(APART)
        return given

    def _through_lse(self, inputs: Inputs, given: dict[str, Any], arrangement: Arrangement) -> None:
        a = self.adapter
        if "lse" not in a.returns:
            raise Inexpressible("the target returns no lse to take a gradient through")
        if a.bwd is None:
            return
        if "dlse" not in a.bwd_takes:
            raise Inexpressible("bwd takes no parameter dlse")
        assert inputs.dlse is not None
        given["dlse"] = arrangement.lse(inputs.dlse * (LN2 if a.lse == "log2" else 1.0), a.lse_shape)

    def _masks(
        self, inputs: Inputs, causal: bool | None, window: Window | None, arrangement: Arrangement
    ) -> dict[str, Any]:
        """causal, window, mask, bias and attn_mask, which together say the mask and the bias of the case."""
        takes, bias = self.adapter.takes, inputs.bias
        if arrangement.sequences is not None:
            causal, window = arrangement.sequences.causal, arrangement.sequences.window
        if bias is not None and not {"bias", "attn_mask"} & set(takes):
            raise Inexpressible("the target takes no parameter bias")
        merged = bias is not None and "bias" not in takes  # then everything goes into attn_mask
        flags = None if causal is None or merged else self._flags(causal, window)
        plain: dict[str, Any] = {"causal": False, "window": None, "mask": None, "attn_mask": None, "bias": bias}
        if flags is not None:
            return plain | flags
        if merged or "mask" not in takes:
            if "attn_mask" not in takes:
                raise Inexpressible("no parameter of the target can say this mask")
            return plain | {"attn_mask": inputs.attn_mask()} | ({"bias": None} if merged else {})
        return plain | {"mask": _dense(inputs)}

    def _flags(self, causal: bool, window: Window | None) -> dict[str, Any] | None:
        """causal and window that say the whole mask; None where the function cannot be told so."""
        takes = self.adapter.takes
        if causal and "causal" not in takes:
            if window is not None or "window" not in takes:
                return None
            return {"window": (-1, 0)}
        if window is not None and "window" not in takes:
            return None
        return {"causal": causal, "window": None if window is None else (window.left, window.right)}


def _dense(inputs: Inputs) -> Tensor | None:
    """The boolean mask as an input with guards of its own; made once."""
    if inputs.keep is None:
        return None
    held = next((b for b in inputs.blocks if b.names == ("mask",)), None)
    return held.tensor("mask") if held else inputs.hold("mask", inputs.keep, torch.bool)


def rows_of_lse(inputs: Inputs) -> Tensor:
    """A float32 tensor of the size of lse, to see what shape an arrangement gives it."""
    case = inputs.case
    return torch.empty((case.B, case.Hq, case.Lq), device=inputs.device)


def _lengths(arrangement: Arrangement, takes: tuple[str, ...], device: str) -> dict[str, Any]:
    s = arrangement.sequences
    assert s is not None
    if "cu_seqlens" in takes and s.lengths_q != s.lengths_k:
        raise Inexpressible("one cu_seqlens cannot say lengths of k other than those of q")
    out: dict[str, Any] = {}
    for side, lengths in (("_q", s.lengths_q), ("_k", s.lengths_k), ("", s.lengths_q)):
        if f"cu_seqlens{side}" in takes:
            out[f"cu_seqlens{side}"] = offsets(lengths, device)
        out[f"max_seqlen{side}"] = max(lengths, default=0)
    return out
