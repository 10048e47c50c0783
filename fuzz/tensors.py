"""The tensors of a case: values, layouts, guard bands; and what became of them after a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import layouts, values
from .case import Case
from .hashing import uniform_bits
from .layouts import Damage, Guarded, Layout, Shape, layout
from .masks import Full
from .region import mask_kind

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
APART = frozenset({"none", "causal_top_left", "causal_bottom_right", "window"})
"""Structural mask kinds that a dialect may carry by keywords, without a dense tensor."""

MAX_ORACLE_BYTES = 512 << 20
"""No case is drawn whose oracle needs more; the whole process stays below 1.5 GB with it."""
_SCORE_ARRAYS, _ROW_ARRAYS = 48, 12


def oracle_bytes(case: Case) -> int:
    """An upper bound of the memory that judging a case needs: float64 arrays of scores and of rows alive at once."""
    scores = case.B * case.Hq * case.Lq * case.Lk
    rows = case.B * case.Hq * (case.Lq + case.Lk) * (case.D + case.Dv)
    return 8 * (_SCORE_ARRAYS * scores + _ROW_ARRAYS * rows)


@dataclass
class Inputs:
    """The tensors of a case on a device. q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv), do (B, Hq, Lq, Dv).

    They are views in the drawn layouts on guarded storages, and need no gradient yet.

    keep: bool, 4-D, broadcastable to (B, Hq, Lq, Lk): what may be attended, exactly; None where everything may.
    bias: additive values in the case's dtype, 4-D, of exactly the shape of the dense additive tensor that is handed over, so
        also the shape of dbias. With a mask its axes are those of both. It is finite: where `keep` is False its value means
        nothing. A soft mask fill (additive form with "min" or "-1e4") forbids nothing: it lies in `bias` and `keep` is None.
        "b" in requires_grad asks for nothing unless `case.bias` is set.
    dlse: (B, Hq, Lq) float32, the gradient of lse, when case.lse_grad.
    alibi: slopes (Hq,) or (B, Hq) in float32, when case.alibi. sinks: logits (Hq,) in the case's dtype, when case.sinks.
    dropout_keep: bool (B, Hq, Lq, Lk), the definition that the native dialect follows; the multiplier is keep/(1-dropout).
    """

    case: Case
    device: str
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    keep: Tensor | None = None
    bias: Tensor | None = None
    dlse: Tensor | None = None
    dropout_keep: Tensor | None = None
    alibi: Tensor | None = None
    sinks: Tensor | None = None
    guards: bool = True
    blocks: list[Guarded] = field(default_factory=list)
    told: Inputs | None = None  # the same with its slopes said by a bias
    stored: bool = field(default=False, init=False)  # values of a real call, which may have ties or structure
    _dense: Tensor | None = None
    held: dict[str, Any] = field(default_factory=dict)  # what a dialect made of the inputs, once

    def attn_mask(self, causal_apart: bool = False) -> Tensor | None:
        """The dense tensor for a dialect that takes one: boolean, or additive where the form or a bias asks for it.

        None where nothing needs saying. With `causal_apart` the caller says a causal or window mask of form "flags" by its
        own keywords, and only the bias is left. Forbidden places hold `mask_fill` exactly, whatever the bias.
        """
        if self.keep is None or (causal_apart and mask_kind(self.case) in APART):
            return self.bias
        if self._dense is None:
            self._dense = self._merge(self.keep)
        return self._dense

    def _merge(self, keep: Tensor) -> Tensor:
        if self.bias is None and self.case.mask_form != "additive":
            return self.hold("mask", keep, torch.bool)
        dtype = TORCH_DTYPES[self.case.dtype]
        base = keep.new_zeros((), dtype=dtype) if self.bias is None else layouts.unexpanded(self.bias)
        return self.hold("mask", torch.where(keep, base, -torch.inf), dtype)

    def hold(self, name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        """A mask or bias as a guarded tensor of its own."""
        block = _hold_mask(self.case, name, value, dtype, self.device, self.guards)
        self.blocks.append(block)
        return block.tensor(name)

    def damage(self) -> list[Damage]:
        """(tensor, logical index, what) for every byte found changed: inputs, margins and gaps, whole storages compared."""
        return [d for block in self.blocks for d in block.damage()]

    @property
    def nbytes(self) -> int:
        """Bytes held, pristine copies included."""
        return sum(block.nbytes for block in self.blocks)


def build(case: Case, device: str = "cpu", guards: bool = True) -> Inputs:
    """The tensors of a case, bit for bit the same everywhere. Without guards there are no margins."""
    blocks = [_block(case, names, device, guards) for names in storages(case)]
    q, k, v, do = (next(b.tensor(name) for b in blocks if name in b.names) for name in ("q", "k", "v", "do"))
    inputs = Inputs(case, device, q, k, v, do, guards=guards, blocks=blocks)
    _add_mask_and_bias(inputs)
    if case.lse_grad:
        inputs.dlse = _lse_gradient(inputs)
    if case.alibi:
        slopes = torch.from_numpy(values.alibi(case.alibi, case.seed, case.B, case.Hq))
        inputs.alibi = _hold_flat(inputs, "alibi", slopes, torch.float32)
    if case.sinks:
        logits = torch.from_numpy(values.sinks(case.sinks, case.seed, case.Hq))
        inputs.sinks = _hold_flat(inputs, "sinks", logits, TORCH_DTYPES[case.dtype])
    if case.dropout:
        inputs.dropout_keep = dropout_keep(case.seed, case.B, case.Hq, case.Lq, case.Lk, case.dropout, device)
    return inputs


def autocast_dtype(case: Case) -> torch.dtype | None:
    """The dtype of torch.autocast around the call: the case's own of 16 bits, bfloat16 for float32; None: there is none.

    autocast leaves float64 alone.
    """
    if case.mode != "autocast" or case.dtype == "float64":
        return None
    return torch.bfloat16 if case.dtype == "float32" else TORCH_DTYPES[case.dtype]


Device = str | torch.device
Corner = tuple[int, int, int, int]


def dropout_keep(
    seed: int, B: int, H: int, Lq: int, Lk: int, p: float, device: Device = "cpu", *, first: Corner = (0, 0, 0, 0)
) -> Tensor:
    """bool (B, H, Lq, Lk), False with probability p, a hash of (seed, b, h, i, j); `first` are the indices of its corner."""
    ranges = [(start, start + n) for start, n in zip(first, (B, H, Lq, Lk), strict=True)]
    least = round(p * (1 << 31))
    if torch.device(device).type == "cpu":  # the same numbers in NumPy, whose calls on small tiles cost much less
        keep = uniform_bits(seed, "dropout", *np.ix_(*(np.arange(*r, dtype=np.int64) for r in ranges))) >= least
        return torch.from_numpy(keep)
    flat = [torch.arange(*r, device=device) for r in ranges]
    index = [x.view([-1 if a == axis else 1 for a in range(4)]) for axis, x in enumerate(flat)]
    return uniform_bits(seed, "dropout", *index) >= least


def _shape(case: Case, name: str) -> Shape:
    match name:
        case "q":
            return (case.B, case.Hq, case.Lq, case.D)
        case "k":
            return (case.B, case.Hkv, case.Lk, case.D)
        case "v":
            return (case.B, case.Hkv, case.Lk, case.Dv)
    return (case.B, case.Hq, case.Lq, case.Dv)


def storages(case: Case) -> list[tuple[str, ...]]:
    """Which tensors share a storage: those of q, k and v that are packed and agree in length and width; others are alone."""
    groups: dict[object, list[str]] = {}
    for name in ("q", "k", "v", "do"):
        shape = _shape(case, name)
        shared = name != "do" and getattr(case, f"layout_{name}") == "packed"
        groups.setdefault(shape[2:] if shared else name, []).append(name)
    return [tuple(names) for names in groups.values()]


@contextmanager
def holding(inputs: Inputs, other: Inputs) -> Iterator[None]:
    """Within it the memory of the inputs holds the values of others that lie alike; after it, their own."""
    for mine, theirs in zip(inputs.blocks, other.blocks, strict=False):
        if mine.storage.shape == theirs.storage.shape:
            mine.storage.copy_(theirs.storage)
    try:
        yield
    finally:
        for mine in inputs.blocks:
            mine.storage.copy_(mine.pristine)


def _block(case: Case, names: tuple[str, ...], device: str, guards: bool) -> Guarded:
    shapes = [_shape(case, name) for name in names]
    where = layouts.packed(shapes) if names[1:] else [layout(getattr(case, f"layout_{names[0]}"), shapes[0])]
    numbers = [_numbers(case, name) for name in names]
    return Guarded.hold(names, where, numbers, TORCH_DTYPES[case.dtype], device, guards)


def _numbers(case: Case, name: str) -> Tensor:
    """The rounded values of a tensor; expanded ones are those of batch 0 and head 0, shape (1, 1, L, D)."""
    shape = _shape(case, name)
    if expanded := getattr(case, f"layout_{name}") == "expand":
        shape = (1, 1, *shape[2:])
    at = values.Place.of(case.seed, name, case.dtype, shape)
    exact = values.finite(case.data, case.grad, at)
    rounded = torch.from_numpy(exact).to(TORCH_DTYPES[case.dtype])
    if case.data == "nonfinite" and (name != "do" or case.grad == "normal"):
        _plant_live(case, name, rounded, expanded)
    if case.data == "nonfinite_masked" and name in "kv":
        _plant_masked(case, name, rounded, expanded)
    return rounded


def _plant_live(case: Case, name: str, x: Tensor, expanded: bool) -> None:
    rows = torch.ones(x.shape[:3], dtype=torch.bool) if name in ("q", "do") else _live_keys(case, expanded, every=True)
    plant = values.live_plant(case.seed, name, rows.numpy(), x.shape[3])
    if plant:
        index, value = plant
        x[index] = value


def _plant_masked(case: Case, name: str, x: Tensor, expanded: bool) -> None:
    value = values.masked_plant(case.seed, name)
    if value is not None:
        x.masked_fill_(~_live_keys(case, expanded, every=False)[..., None], value)


def _live_keys(case: Case, expanded: bool, every: bool) -> Tensor:
    """bool (B, Hkv, Lk): some query of the group may attend the key. Expanded: (1, 1, Lk), in every head or in any."""
    if case.mask == Full() or soft(case):
        live = torch.full((case.B, case.Hkv, case.Lk), case.Lq > 0)
    else:
        keep = case.mask.dense(case.B, case.Hq, case.Lq, case.Lk).expand(case.B, case.Hq, case.Lq, case.Lk)
        live = keep.any(2).unflatten(1, (case.Hkv, case.G)).any(2)
    if not expanded:
        return live
    flat = live.flatten(0, 1)
    return (flat.all(0) if every else flat.any(0))[None, None]


def soft(case: Case) -> bool:
    """The mask is a finite additive fill, which forbids nothing exactly."""
    return case.mask_form == "additive" and case.mask_fill != "-inf"


def _fill(case: Case) -> float:
    return {"-inf": -torch.inf, "min": torch.finfo(TORCH_DTYPES[case.dtype]).min, "-1e4": -1e4}[case.mask_fill]


def _sizes(case: Case, axes: str) -> Shape:
    sizes = (case.B, case.Hq, case.Lq, case.Lk)
    return tuple(n if a in axes else 1 for a, n in zip("bhqk", sizes, strict=True))


def _add_mask_and_bias(inputs: Inputs) -> None:
    """Set keep and bias."""
    case, keep = inputs.case, None
    if case.mask != Full() or case.mask_form != "flags":
        keep = case.mask.dense(case.B, case.Hq, case.Lq, case.Lk).expand(_sizes(case, case.mask.axes + case.mask_axes))
    additive = _additive(case, keep)
    if additive is not None:
        inputs.bias = inputs.hold("bias", additive, TORCH_DTYPES[case.dtype])
    if keep is not None and not soft(case):
        inputs.keep = keep.to(inputs.device)


def _additive(case: Case, keep: Tensor | None) -> Tensor | None:
    """Finite additive values in the shape that is handed over; None where neither a bias nor a soft fill asks for them."""
    if not case.bias and not soft(case):
        return None
    own = _sizes(case, case.bias_axes if case.bias else "")
    exact = torch.from_numpy(values.bias(case.bias, case.seed, own))
    if keep is None:
        return exact
    if soft(case):
        return torch.where(keep, exact, _fill(case))
    return exact.expand(np.broadcast_shapes(own, keep.shape))  # torch's own function imports sympy, which takes seconds


def _hold_mask(case: Case, name: str, value: Tensor, dtype: torch.dtype, device: str, guards: bool) -> Guarded:
    """A mask or bias in its own layout; expanded, the batch and head axes it lacks have full size and stride 0."""
    shape = tuple(value.shape)
    where = layout("contiguous" if case.layout_mask == "expand" else case.layout_mask, shape)
    if case.layout_mask == "expand":
        full = (case.B, case.Hq, *shape[2:])
        strides = tuple(0 if n != m else s for n, m, s in zip(shape, full, where.strides, strict=True))
        where = Layout(full, strides, 0, where.span)
    return Guarded.hold((name,), (where,), (value,), dtype, device, guards)


def _hold_flat(inputs: Inputs, name: str, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers (Hq,) or (B, Hq) as a guarded contiguous tensor of that shape."""
    shape = (*(1,) * (2 - numbers.dim()), *numbers.shape, 1, 1)
    block = Guarded.hold(
        (name,), (layout("contiguous", shape),), (numbers.view(shape),), dtype, inputs.device, inputs.guards
    )
    inputs.blocks.append(block)
    held = block.tensor(name)[..., 0, 0]
    return held if numbers.dim() == 2 else held[0]


def _lse_gradient(inputs: Inputs) -> Tensor:
    case = inputs.case
    shape = (case.B, case.Hq, case.Lq, 1)
    numbers = torch.from_numpy(values.Place.of(case.seed, "dlse", case.dtype, shape).normal())
    block = Guarded.hold(
        ("dlse",), (layout("contiguous", shape),), (numbers,), torch.float32, inputs.device, inputs.guards
    )
    inputs.blocks.append(block)
    return block.tensor("dlse")[..., 0]
