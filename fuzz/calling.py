"""The part of a standalone script that calls the target: `call` in each dialect's own layout, and arguments that are no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .binding import DIALECTS, Binding
from .case import Case
from .literals import Writer
from .tensors import Inputs
from .varlen import Rows

PACK = [
    "def pack(t):",
    '    """(B, H, L, D) -> (total, H, D)."""',
    "    return t.transpose(1, 2).flatten(0, 1).contiguous()",
]
IMPORTS = {
    "create_block_mask": "from torch.nn.attention.flex_attention import create_block_mask",
    "AuxRequest flex": "from torch.nn.attention.flex_attention import AuxRequest",
    "AuxRequest flash_attn_varlen": "from torch.nn.attention.varlen import AuxRequest",
}
"""Lines that a script needs for names it uses."""


@dataclass(frozen=True)
class Caller:
    """How a script calls its target. `bias` is the keyword of a bias with a gradient, or the variable that score_mod reads.

    `sinks` is the keyword of sinks with a gradient, `narrow` the dtype of autocast where the call is made under it.
    """

    binding: Binding
    through_lse: bool
    bias: str
    sinks: str = ""
    narrow: torch.dtype | None = None
    device: str = "cpu"

    @property
    def rows(self) -> bool:
        """Whether tensors are handed over as (total, H, D)."""
        return DIALECTS[self.binding.dialect].rows

    def lines(self) -> list[str]:
        """The function `call`."""
        swap = ".transpose(1, 2)" if DIALECTS[self.binding.dialect].heads_inside else ""
        batch = "B=1, " if self.rows else ""
        rows = ", from packed rows" if self.rows else ""
        return [
            f'def call(q, k, v, do, {"dlse, " * self.through_lse}{batch}wanted="qkv", **keywords):',
            f'    """Outputs and gradients of the target by name, (B, H, L, D){rows}."""',
            f'    x = {{n: t{swap}.detach().requires_grad_(n in wanted) for n, t in zip("qkv", (q, k, v))}}',
            *self._bias(),
            *self._sinks(),
            '    leaves = {f"d{n}": t for n, t in x.items() if t.requires_grad}',
            f"    with torch.set_grad_enabled(bool(leaves)){self._autocast()}:",
            f'        {self._returned()} = target(x["q"], x["k"], x["v"], **keywords)',
            *(["    lse = lse.lse"] if self._aux() else []),
            f"    grads = torch.autograd.grad({self._ends(swap)}) if leaves else ()",
            *self._got(swap),
        ]

    def _bias(self) -> list[str]:
        if not self.bias:
            return []
        if self.binding.dialect == "flex":
            return [f'    x["bias"] = {self.bias}']
        return [f'    x["bias"] = keywords["{self.bias}"] = keywords["{self.bias}"].detach().requires_grad_()']

    def _sinks(self) -> list[str]:
        name = self.sinks
        return [f'    x["sinks"] = keywords["{name}"] = keywords["{name}"].detach().requires_grad_()'] if name else []

    def _autocast(self) -> str:
        return f', torch.autocast("{self.device}", {self.narrow})' if self.narrow else ""

    def _aux(self) -> bool:
        return self.binding.dialect == "flex" and self.binding.name("lse") == "return_aux"

    def _returned(self) -> str:
        rest = ", *_" if self.binding.name("lse") == "return_attn_probs" else ""
        return f"o, lse{rest}" if self.binding.returns_lse else "o"

    def _ends(self, swap: str) -> str:
        """The arguments of autograd.grad."""
        dlse = "dlse.transpose(0, 1).flatten(1)" if self.rows else "dlse"
        do = f"do{swap}.to(o.dtype)" if self.narrow else f"do{swap}"
        ends = f"(o, lse), list(leaves.values()), ({do}, {dlse})"
        return ends if self.through_lse else f"o, list(leaves.values()), {do}"

    def _got(self, swap: str) -> list[str]:
        """The lines that return outputs and gradients by name, with heads outside."""
        lse = '"lse": lse, ' if self.binding.returns_lse else ""
        got = f'{{"o": o, {lse}**dict(zip(leaves, grads))}}'
        if self.rows:
            return [
                f"    got = {got}",
                '    got = {n: t.T if n == "lse" else t for n, t in got.items()}',
                "    return {n: t.unflatten(0, (B, len(t) // max(B, 1))).transpose(1, 2) for n, t in got.items()}",
            ]
        turned = '{n: t.transpose(1, 2) if n in ("o", "dq", "dk", "dv") else t for n, t in got.items()}'
        return [f"    got = {got}", f"    return {turned}"] if swap else [f"    return {got}"]


def packed(writer: Writer, name: str, tensor: str, inputs: Inputs) -> str:
    """Text for the packed rows of a tensor whose (B, H, L, D) values the variable `name` holds."""
    x, layout = Rows(inputs.case).given(inputs, tensor), getattr(inputs.case, f"layout_{tensor}")
    if layout in ("contiguous", "blhd") and x.is_contiguous() and not x.storage_offset():
        return f"pack({name})"
    writer.uses.add("place")
    return writer.say(f"{tensor}_laid", f"place(pack({name}), {x.stride()}, {x.storage_offset()})", None)


def score_function(writer: Writer, case: Case, bias: str, shape: tuple[int, ...]) -> str:
    """The name of a score_mod that the script defines; `bias` is a variable of that shape, or None."""
    name = writer.free("score_mod")
    writer.names.append((name, None))
    lines = [f"def {name}(s, b, h, i, j):"]
    lines += [f"    s = {case.softcap!r} * torch.tanh(s / {case.softcap!r})"] if case.softcap else []
    lines += [f"    return s + {bias}[{_index(shape)}]" if bias != "None" else "    return s"]
    writer.lines += ["", *lines, ""]
    return name


def block_mask(case: Case, keep: str, shape: tuple[int, ...], device: str) -> str:
    """Text for the torch BlockMask of a boolean tensor of that shape."""
    predicate = f"lambda b, h, i, j: {keep}[{_index(shape)}]"
    return f"create_block_mask({predicate}, {case.B}, {case.Hq}, {case.Lq}, {case.Lk}, device={device!r})"


def _index(shape: tuple[int, ...]) -> str:
    return ", ".join(letter if n > 1 else f"0 * {letter}" for letter, n in zip("bhij", shape, strict=True))


def plain(value: Any) -> str:
    """An argument that is no float tensor, as text."""
    if isinstance(value, Tensor):
        return f"torch.tensor({value.tolist()}, dtype={value.dtype})"
    return repr(value)
