"""Tensors and masks as Python text for a standalone script: literals, the value generator, or packed bytes.

`normal`, `unpack` and `place` are copied into scripts by their source: they use torch and the standard library only.
"""

from __future__ import annotations

import base64
import inspect
import math
import textwrap
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import NormalDist

import torch
from torch import Tensor

from .case import Case
from .hashing import STREAMS, number
from .masks import And, Causal, Document, Full, Mask, Not, Or, Packed, Padding, Prefix, Strided, Window

LITERAL = 256
"""Elements that a script writes out one by one."""
WIDTH = 118


def normal(start: int, shape: tuple[int, ...]) -> Tensor:
    """Normal numbers as a hash of the indices: the same bits on every machine."""
    half = [-4.0, *(round(NormalDist().inv_cdf(n / 1024) * 2**20) / 2**20 for n in range(1, 512)), 0.0]
    knots = torch.tensor(half + [-x for x in half[-2::-1]], dtype=torch.float64)
    x = torch.full(shape, start)
    for axis, weight in enumerate((-0x2ECBDABC217D106B, -0x5F89E29B87429BD1, -0x18FC812E5F4BD725, -0x7143950F6377391D)):
        x += torch.arange(shape[axis]).view([-1 if a == axis else 1 for a in range(4)]) * weight
    x = (x ^ x >> 30 & 0x3FFFFFFFF) * -0x40A7B892E31B1A47
    x = (x ^ x >> 27 & 0x1FFFFFFFFF) * -0x6B2FB644ECCEEE15
    bits = (x ^ x >> 31 & 0x1FFFFFFFF) >> 33 & 0x7FFFFFFF
    n = bits >> 21
    return knots[n] + (knots[n + 1] - knots[n]) / 2**21 * (bits & 0x1FFFFF)


def unpack(text: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The tensor whose bytes were compressed and written as text."""
    return torch.frombuffer(bytearray(zlib.decompress(base64.b85decode(text))), dtype=dtype).view(shape)


def place(x: Tensor, strides: tuple[int, ...], offset: int) -> Tensor:
    """x in a storage of NaN, with these strides and this offset in elements."""
    size = offset + 1 + sum(max(n - 1, 0) * s for n, s in zip(x.shape, strides, strict=True))
    view = torch.full((size,), torch.nan, device=x.device).to(x.dtype).as_strided(x.shape, strides, offset)
    once = tuple(slice(1 if s == 0 else None) for s in strides)
    view[once] = x[once]
    return view


INLINED: dict[str, Callable[..., Tensor]] = {"normal": normal, "unpack": unpack, "place": place}


def source(name: str) -> list[str]:
    """The lines of an inlined function, its signature without annotations as a script's author would write it."""
    _, *body = inspect.getsource(INLINED[name]).rstrip().split("\n")
    return [f"def {name}({', '.join(inspect.signature(INLINED[name]).parameters)}):", *body]


def dtype_text(x: Tensor) -> str:
    """`torch.float32`."""
    return str(x.dtype)


def shape_text(shape: torch.Size | tuple[int, ...]) -> str:
    """`(1, 2, 3, 4)`."""
    return str(tuple(shape))


@dataclass
class Writer:
    """Lines of a script that define tensors; remembers which inlined functions and which names they need.

    `spare` is how many more elements may be written one by one.
    """

    spare: int = LITERAL
    lines: list[str] = field(default_factory=list)
    uses: set[str] = field(default_factory=set)
    names: list[tuple[str, Tensor | None]] = field(default_factory=list)

    def define(self, name: str, x: Tensor, case: Case | None = None, tensor: str = "") -> str:
        """The name of a variable that holds the values of x, contiguous where x does not repeat itself.

        `tensor` of `case` says what the generator would make; a variable that holds the same values is used again.
        """
        x = x.detach().cpu()
        known = self.known(x)
        if known:
            return known
        name = self.free(name)
        self.lines += self._values(name, x, case, tensor)
        self.names.append((name, x))
        return name

    def known(self, x: Tensor) -> str:
        """The variable that already holds these values; empty when none does."""
        return next(
            (
                n
                for n, y in self.names
                if y is not None and y.dtype == x.dtype and y.shape == x.shape and same_bits(x, y)
            ),
            "",
        )

    def say(self, name: str, text: str, x: Tensor | None) -> str:
        """The name of a new variable defined by an expression whose value is x, or is not to be used again (None)."""
        name = self.free(name)
        self.lines.append(f"{name} = {text}")
        self.names.append((name, x))
        return name

    def free(self, name: str) -> str:
        """The name, numbered if it is taken."""
        taken = {n for n, _ in self.names}
        return next(n for n in (name, *(f"{name}_{i}" for i in range(2, 10_000))) if n not in taken)

    def index(self, text: str, case: Case) -> None:
        """Define the index tensors that a formula uses."""
        line = f"i, j = torch.arange({case.Lq})[:, None], torch.arange({case.Lk})"
        batch = [f"b = torch.arange({case.B})[:, None, None, None]"] if "[b %" in text else []
        self.lines += [x for x in [line, *batch] if x not in self.lines]

    def _values(self, name: str, x: Tensor, case: Case | None, tensor: str) -> list[str]:
        once = x[tuple(slice(0, 1) if s == 0 else slice(None) for s in x.stride())].contiguous()
        spread = f".expand{shape_text(x.shape)}" if once.shape != x.shape else ""
        if once.numel() and same_bits(once, once.flatten()[0].expand(once.shape)):
            return [
                f"{name} = torch.full({shape_text(once.shape)}, {number_text(once.flatten()[0])}, dtype={dtype_text(x)}){spread}"
            ]
        if once.numel() <= self.spare:
            self.spare -= once.numel()
            return literal(name, once, spread)
        made = self._generated(name, once, case, tensor, spread)
        return made or self._packed(name, once, spread)

    def _generated(self, name: str, x: Tensor, case: Case | None, tensor: str, spread: str) -> list[str]:
        """x as normal numbers times a power of two with at most eight elements changed, or nothing."""
        if case is None or x.dim() != 4 or not x.is_floating_point():
            return []
        start = number(case.seed, STREAMS[tensor])
        plain = normal(start, tuple(x.shape))
        factor = _power(plain, x)
        made = (plain * factor).to(x.dtype)
        differ = (bits(made) != bits(x)).nonzero().tolist()
        if len(differ) > 8:
            return []
        self.uses.add("normal")
        times = "" if factor == 1.0 else f" * {factor!r}"
        head = f"{name} = (normal({start}, {shape_text(x.shape)}){times}).to({dtype_text(x)})"
        patches = [f"{name}[{', '.join(map(str, at))}] = {number_text(x[tuple(at)])}" for at in differ]
        return [head, *patches, *([f"{name} = {name}{spread}"] if spread else [])]

    def _packed(self, name: str, x: Tensor, spread: str) -> list[str]:
        self.uses.add("unpack")
        raw = x.view(torch.uint8).flatten().numpy().tobytes() if x.numel() else b""
        text = base64.b85encode(zlib.compress(raw, 9)).decode()
        return [f'{name} = unpack("{text}", {dtype_text(x)}, {shape_text(x.shape)}){spread}']


def _power(plain: Tensor, x: Tensor) -> float:
    """The power of two by which x differs from the plain numbers, judged by its largest element."""
    if not x.numel():
        return 1.0
    at = int(torch.where(x.isfinite(), plain, 0.0).abs().argmax())
    ratio = float(x.flatten()[at].double() / plain.flatten()[at])
    if not 0 < ratio < float("inf"):
        return 1.0
    fraction, exponent = math.frexp(ratio)
    return math.ldexp(1.0, exponent if fraction > 0.75 else exponent - 1)


def bits(x: Tensor) -> Tensor:
    """The elements as integers, so that NaN equals itself."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one dtype and shape hold the same bits."""
    return torch.equal(bits(x), bits(y))


def number_text(x: Tensor) -> str:
    """The shortest literal that gives the element back."""
    if x.dtype == torch.bool:
        return str(int(x))
    value = float(x)
    for digits in range(1, 18):
        text = f"{value:.{digits}g}"
        if value != value or same_bits(torch.tensor(float(text), dtype=x.dtype), x.reshape(())):
            return f"torch.{text}" if text in ("nan", "inf") else "-torch.inf" if text == "-inf" else text
    return repr(value)


def literal(name: str, x: Tensor, spread: str = "") -> list[str]:
    """Lines that define x element by element, in rows of its last axis's order."""
    head, tail = f"{name} = torch.tensor([", f"], dtype={dtype_text(x)}).view{shape_text(x.shape)}{spread}"
    body = ", ".join(number_text(e) for e in x.flatten())
    if len(head + body + tail) <= WIDTH:
        return [head + body + tail]
    return textwrap.wrap(head + body + tail, WIDTH, subsequent_indent="    ", break_long_words=False)


def formula(mask: Mask, case: Case) -> str:  # noqa: PLR0911 (a return for each kind)
    """A mask as an expression in the index tensors b (B,1,1,1), i (Lq,1) and j (Lk); empty where only numbers say it."""
    match mask:
        case And(first, second) | Or(first, second):
            parts = formula(first, case), formula(second, case)
            return f"({parts[0]}) {'&' if isinstance(mask, And) else '|'} ({parts[1]})" if all(parts) else ""
        case Not(inner):
            return f"~({formula(inner, case)})" if formula(inner, case) else ""
        case Full():
            return "(i >= 0) & (j >= 0)"
        case Causal(align):
            return f"j <= {_diagonal(align, case)}"
        case Window(left, right, align):
            at = _diagonal(align, case)
            sides = [f"(j >= {at} - {left})"] * (left >= 0) + [f"(j <= {at} + {right})"] * (right >= 0)
            return " & ".join(sides) or "(i >= 0) & (j >= 0)"
        case Padding(lengths):
            return f"j < torch.tensor({list(lengths)})[b % {len(lengths)}]"
        case Document(lengths):
            ends = torch.tensor(lengths).cumsum(0).tolist()
            return "torch.bucketize(i, {0}, right=True) == torch.bucketize(j, {0}, right=True)".format(
                f"torch.tensor({ends})"
            )
        case Packed(lengths_q, lengths_k):
            inside = "".join(_triangle(m) for m in mask.inside)
            pairs = f"zip({list(lengths_q)}, {list(lengths_k)})"
            return f"torch.block_diag(*[torch.ones(q, k){inside} for q, k in {pairs}]).bool()"
        case Prefix(length, align):
            return f"(j < {length}) | (j <= {_diagonal(align, case)})"
        case Strided(stride):
            return f"(i - j >= 0) & ((i - j < {stride}) | ((i - j) % {stride} == 0))"
    return ""


def _triangle(mask: Mask) -> str:
    """What cuts a mask inside a packed sequence of q queries and k keys out of ones."""
    match mask:
        case Causal(align):
            return ".tril(k - q)" if align == "bottom_right" else ".tril()"
        case Window(left, right, align):
            at = "k - q" if align == "bottom_right" else "0"
            return f".tril({at} + {right})" * (right >= 0) + f".triu({at} - {left})" * (left >= 0)
    return ""


def _diagonal(align: str, case: Case) -> str:
    shift = case.Lk - case.Lq if align == "bottom_right" else 0
    return f"i {'+' if shift > 0 else '-'} {abs(shift)}" if shift else "i"
