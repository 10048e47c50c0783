"""How the tensors of a case are arranged for an adapted target: axes in another order, or sequences packed side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .adapter import PACKED
from .dialects import Inexpressible
from .layouts import Guarded, layout
from .sequences import Sequences, pack, sequences, unpack
from .tensors import TORCH_DTYPES, Inputs

NAMES = ("q", "k", "v", "do")


@dataclass(frozen=True)
class Arrangement:
    """Tensors of one case in a declared layout. `order` holds the letters of bhld; `sequences` are there in a packed layout."""

    inputs: Inputs
    order: str
    sequences: Sequences | None = None

    def tensors(self) -> dict[str, Tensor]:
        """q, k, v and do as they are handed over: views, or packed copies with guards of their own."""
        return {n: self._packed(n) if self.sequences else permuted(getattr(self.inputs, n), self.order) for n in NAMES}

    def back(self, name: str, x: Tensor) -> Tensor:
        """A tensor in the form of the input `name` as (B, H, L, D)."""
        if self.sequences is None:
            return permuted(x, self.order, inverse=True)
        case = self.inputs.case
        if name in ("k", "v"):
            return unpack(x, case.B, case.Lk, self.sequences.keys)
        return unpack(x, case.B, case.Lq)

    def lse(self, x: Tensor, shape: str) -> Tensor:
        """(B, Hq, Lq) in the declared shape."""
        if self.sequences is None:
            return permuted(x, shape, "bhl")
        packed = pack(x)
        return packed.T if shape == "hl" else packed

    def natural(self, x: Tensor, shape: str) -> Tensor:
        """The inverse of `lse`."""
        if self.sequences is None:
            return permuted(x, shape, "bhl", inverse=True)
        case = self.inputs.case
        return unpack(x.T if shape == "hl" else x, case.B, case.Lq)

    def _packed(self, name: str) -> Tensor:
        """(total, H, D), kept with the inputs so that the same tensor is handed over at each call and compared afterwards."""
        inputs, names = self.inputs, (f"{name} (packed)",)
        assert self.sequences is not None
        block = next((b for b in inputs.blocks if b.names == names), None)
        if block is None:
            rows = self.sequences.keys if name in ("k", "v") else None
            value = pack(getattr(inputs, name), rows).transpose(0, 1)[None]
            drawn = getattr(inputs.case, f"layout_{name}")
            where = layout("blhd" if drawn in ("contiguous", "expand") else drawn, tuple(value.shape))
            dtype = TORCH_DTYPES[inputs.case.dtype]
            block = Guarded.hold(names, (where,), (value.cpu(),), dtype, inputs.device, inputs.guards)
            inputs.blocks.append(block)
        return block.tensor(names[0])[0].transpose(0, 1)


def permuted(x: Tensor, order: str, axes: str = "bhld", *, inverse: bool = False) -> Tensor:
    """A view of a tensor with the given axes in another order; inverse: the other way."""
    come, go = (order, axes) if inverse else (axes, order)
    return x.permute([come.index(axis) for axis in go])


def arranged(declared: str, inputs: Inputs, causal: bool | None, window: Any, align: str) -> Arrangement:
    """The arrangement of a case; Inexpressible where a packed layout cannot say its mask.

    `causal` and `window` are what keywords can say of the mask; causal None: not all of it.
    """
    if declared != PACKED:
        return Arrangement(inputs, declared)
    found = sequences(inputs.case, causal, window, align)
    if found is None or inputs.case.mask_form == "additive":
        raise Inexpressible("sequences side by side cannot say this mask")
    return Arrangement(inputs, declared, found)
