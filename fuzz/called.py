"""One call of an attention function read back as a case: its arguments by name, its tensors as (B, H, L, D)."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..impls.loading import signature, takes_q_k_v
from . import masks
from .binding import DIALECTS, Binding, recognise
from .case import Case
from .masks import Causal, Document, Full, Mask, Window
from .recognised import Sizes, compact, layout_of, mask_of, nearest

CUMULATIVE = (
    ("cu_seqlens_q", "cu_seqlens", "cu_seq_q"),
    ("cu_seqlens_k", "cu_seqlens_kv", "cu_seqlens", "cu_seq_k"),
)
"""Names of the tensors that hold where packed sequences begin, of queries and of keys."""
SAY_NOTHING = frozenset({
    "deterministic", "return_attn_probs", "return_lse", "return_softmax_lse", "max_seqlen", "max_seqlen_q", "max_seqlen_k",
    "max_seqlens", "enable_gqa", "dropout_seed", "num_splits", "pack_gqa",
    *CUMULATIVE[0], *CUMULATIVE[1],
})  # fmt: skip
"""Parameters that change no answer, or that are read elsewhere."""
READ = ("mask", "bias", "causal", "window", "scale", "softcap", "dropout", "seed", "lse", "gqa")
"""Keywords of a dialect that a case says."""
BUILTINS = (torch.nn.functional.scaled_dot_product_attention,)
"""Callables without a signature whose dialect is known; in a tuple, where a capture does not replace them."""
MOST_MASK = 1 << 26
"""Elements of a dense mask that is looked at: 8192 x 8192."""


class CannotExpressError(Exception):
    """The call cannot be said as a case: one sentence."""


@dataclass(frozen=True)
class Source:
    """A callable whose calls are read: what it is called, and how its arguments are."""

    fn: Callable[..., Any]
    name: str
    binding: Binding
    parameters: tuple[str, ...]
    signature: inspect.Signature | None
    packed: bool  # sequences lie end to end, (T, H, D)

    @classmethod
    def of(cls, fn: Callable[..., Any], name: str, dialect: str = "") -> Source:
        """The source; ValueError in the words of `recognise` where the parameters do not tell how it is called."""
        sig = signature(fn)
        if sig is None:
            if fn not in BUILTINS and not dialect:
                raise ValueError(
                    "a callable without a signature must be wrapped in a function that names its parameters"
                )
            binding = recognise(fn, "sdpa" if fn in BUILTINS else dialect)
            return cls(fn, name, binding, ("q", "k", "v", *binding.bound), None, packed=False)
        names = tuple(sig.parameters)
        if takes_q_k_v(fn) and any(n in names for n in CUMULATIVE[0]):
            if "flash_attn_varlen" in DIALECTS:
                return cls(fn, name, recognise(fn, "flash_attn_varlen"), names, sig, packed=True)
            row = DIALECTS["flash_attn"]
            bound = tuple(n for accepted in row.keywords.values() for n in accepted if n in names)
            return cls(fn, name, Binding("flash_attn", bound, (), returns_lse=False), names, sig, packed=True)
        return cls(fn, name, recognise(fn, dialect), names, sig, packed=False)

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The call's arguments by the parameters' own names, the first three as q, k and v; TypeError if it does not fit."""
        if self.signature is None:
            spelled = {"query": "q", "key": "k", "value": "v"}
            given = dict(zip(self.parameters, args, strict=False)) | {spelled.get(n, n): x for n, x in kwargs.items()}
        else:
            bound = self.signature.bind(*args, **kwargs).arguments
            given = {}
            for n, x in bound.items():
                variable = self.signature.parameters[n].kind is inspect.Parameter.VAR_KEYWORD
                given |= x if variable else {n: x}
            for own, n in zip(self.parameters, "qkv", strict=False):
                given[n] = given.pop(own, None)
        return given

    def default(self, name: str) -> Any:
        """What a parameter is when it is left out; None where that is not known."""
        known = self.signature.parameters.get(name) if self.signature else None
        return None if known is None or known.default is inspect.Parameter.empty else known.default


@dataclass
class Call:
    """A call as a case: `case` says its structure with normal data.

    `tensors` are q, k and v as (B, H, L, D) views; `dense` the mask as it was given, 4-D; `keep` what it allows where no kind
    of mask says it; `notes` what the case does not say as it was.
    """

    case: Case
    tensors: dict[str, Tensor]
    dense: Tensor | None = None
    keep: Tensor | None = None
    notes: list[str] = field(default_factory=list)


def read(source: Source, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, grad: bool) -> Call:
    """The call as a case; `grad`: gradients are recorded now. CannotExpressError says why it is none."""
    given = source.arguments(args, kwargs)
    notes: list[str] = []
    tensors = {n: four(source, given.get(n), n, notes) for n in "qkv"}
    _say_what_is_unknown(source, given)
    q, k, v = tensors.values()
    facts: dict[str, Any] = _sizes(q, k, v) | _numbers(source, given, q.shape[3], notes)
    sizes: Sizes = (facts["B"], facts["Hq"], facts["Lq"], facts["Lk"])
    dense, keep = None, None
    if source.packed:
        facts["mask"] = _packed(source, given, facts)
    else:
        said, dense, keep = _mask(source, given, sizes, notes)
        facts |= said
    facts |= _layouts(tensors, notes)
    bias = given.get(source.binding.name("bias") or source.binding.name("mask")) if facts.get("bias") else None
    asked = {**{n: given[n] for n in "qkv"}, "b": bias}  # views made under no_grad require none
    facts["requires_grad"] = "".join(n for n, x in asked.items() if grad and x is not None and x.requires_grad)
    try:
        return Call(Case(**facts), tensors, dense, keep, notes)
    except ValueError as e:
        raise CannotExpressError(str(e)) from None


def four(source: Source, x: Any, name: str, notes: list[str]) -> Tensor:
    """The tensor as a view (B, H, L, D); CannotExpressError."""
    if not isinstance(x, Tensor):
        raise CannotExpressError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.is_nested or x.layout is not torch.strided or _wrapped(x):
        kind = "nested" if x.is_nested else type(x).__name__ if x.layout is torch.strided else str(x.layout)
        raise CannotExpressError(f"{name} must be a plain strided tensor with values, got {kind}")
    if source.packed:
        if x.dim() != 3:
            raise CannotExpressError(f"{name} of packed sequences must be (T, H, D), got {tuple(x.shape)}")
        return x.transpose(0, 1)[None]
    heads_inside = DIALECTS[source.binding.dialect].heads_inside
    if x.dim() in (2, 3) and not heads_inside:
        if name == "q":
            notes.append(f"tensors with {x.dim()} dimensions are told as (B, H, L, D) with axes of size 1")
        return x[None, None] if x.dim() == 2 else x[:, None]
    if x.dim() != 4:
        raise CannotExpressError(f"{name} must have 4 dimensions, got shape {tuple(x.shape)}")
    return x.transpose(1, 2) if heads_inside else x


def _wrapped(x: Tensor) -> bool:
    """A tensor without numbers of its own to read: a subclass, on the meta device, or inside vmap or torch.func.grad."""
    return (
        type(x) not in (Tensor, torch.nn.Parameter)
        or x.device.type == "meta"
        or torch._C._functorch.is_functorch_wrapped_tensor(x)  # noqa: SLF001 (there is no public way to ask)
    )


def _say_what_is_unknown(source: Source, given: Mapping[str, Any]) -> None:
    """CannotExpressError for an argument that says something and that no field of a case says."""
    known = {"q", "k", "v", *(source.binding.name(keyword) for keyword in READ), *SAY_NOTHING}
    for name, value in given.items():
        if name in known or value is None or value is False:
            continue
        default = source.default(name)
        if value is not default and (isinstance(value, Tensor) or value != default):
            raise CannotExpressError(
                f"the argument {name} of {source.name} has no place in a case, got {_short(value)}"
            )


def _short(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.60}"


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    B, Hq, Lq, D = q.shape
    _, Hkv, Lk, _ = k.shape
    if k.shape[0] != B or v.shape[:3] != k.shape[:3] or k.shape[3] != D:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise CannotExpressError(
            f"q, k and v must agree in batch and widths, k and v in heads and length, got {shapes}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise CannotExpressError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    return {"B": B, "Hq": Hq, "Hkv": Hkv, "Lq": Lq, "Lk": Lk, "D": D, "Dv": v.shape[3]}


def _numbers(source: Source, given: Mapping[str, Any], D: int, notes: list[str]) -> dict[str, Any]:
    """dtype, scale, softcap and dropout."""

    def value(keyword: str) -> Any:
        name = source.binding.name(keyword)
        return given.get(name, source.default(name)) if name else None

    out: dict[str, Any] = {"dtype": str(_dtype(source, given["q"], notes)).removeprefix("torch.")}
    try:
        scale = value("scale")
        if scale is not None and float(scale) != D**-0.5:
            out["scale"] = float(scale)
        return out | {n: float(x) for n in ("softcap", "dropout") if (x := value(n))}
    except (TypeError, ValueError) as e:
        raise CannotExpressError(f"scale, softcap and dropout of {source.name} must be numbers: {e}") from None


def _dtype(source: Source, q: Tensor, notes: list[str]) -> torch.dtype:
    """The dtype that the kernel sees: scaled_dot_product_attention casts to that of autocast before it computes."""
    kind = q.device.type
    if not torch.is_autocast_enabled(kind):
        return q.dtype
    cast = torch.get_autocast_dtype(kind)
    inside = source.signature is None and q.dtype in (torch.float32, torch.float16, torch.bfloat16)
    notes.append(f"called with {q.dtype} under autocast to {cast}".replace("torch.", ""))
    return cast if inside else q.dtype


def _flags(source: Source, given: Mapping[str, Any]) -> Mask:
    """What causal and window keywords say, aligned as the dialect aligns."""
    row = DIALECTS[source.binding.dialect]

    def value(keyword: str) -> Any:
        name = source.binding.name(keyword)
        return given.get(name, source.default(name)) if name else None

    mask: Mask = Causal(row.align) if value("causal") else Full()
    window = value("window")
    if window is None or tuple(window) == (-1, -1):
        return mask
    left, right = (int(n) for n in window)
    return mask & Window(left, right, row.align)


def _mask(
    source: Source, given: Mapping[str, Any], sizes: Sizes, notes: list[str]
) -> tuple[dict[str, Any], Tensor | None, Tensor | None]:
    """(fields of the case, the dense mask as given, what it allows where no kind says it)."""
    flags = _flags(source, given)
    name, added = source.binding.name("mask"), source.binding.name("bias")
    dense = given.get(name) if name else None
    if isinstance(dense, Mask):
        return _native(dense, given.get(added), sizes)
    if dense is None and added:
        return _native(flags, given.get(added), sizes)
    if dense is None:
        return {"mask": flags}, None, None
    four = _dense(name, dense, sizes)
    said, kept = _said(four, sizes, notes)
    if flags != Full():
        said["mask"] &= flags
        notes.append("said by a dense mask and by keywords together; the case says both by a dense mask")
    return said | {"mask_axes": _more_axes(four, said["mask"]), "layout_mask": _mask_layout(four, sizes)}, four, kept


def _native(mask: Mask, bias: Tensor | None, sizes: Sizes) -> tuple[dict[str, Any], Tensor | None, None]:
    """A mask that is one of ours already, and a bias beside it."""
    if bias is None:
        return {"mask": mask}, None, None
    four = _dense("bias", bias, sizes)
    return {"mask": mask, "bias": _bias(four), "bias_axes": _axes(four)}, four, None


def _dense(name: str, x: Any, sizes: Sizes) -> Tensor:
    """A dense mask or bias as 4-D, its shape that of (B, H, Lq, Lk) or 1 in each axis."""
    if not isinstance(x, Tensor) or _wrapped(x) or x.is_nested:
        raise CannotExpressError(f"{name} must be a plain tensor, got {type(x).__name__}")
    four = x[(None,) * (4 - x.dim())] if x.dim() <= 4 else x
    if four.dim() != 4 or any(n not in (1, size) for n, size in zip(four.shape, sizes, strict=True)):
        raise CannotExpressError(f"{name} must be broadcastable to {sizes}, got {tuple(x.shape)}")
    if _once(four).numel() > MOST_MASK:
        raise CannotExpressError(f"{name} must have at most {MOST_MASK} elements to be looked at, got {tuple(x.shape)}")
    return four


def _once(x: Tensor) -> Tensor:
    """The part of a view that its memory holds once: axes of stride 0 cut to their first index."""
    return x[tuple(slice(0, 1) if s == 0 else slice(None) for s in x.stride())]


def _said(four: Tensor, sizes: Sizes, notes: list[str]) -> tuple[dict[str, Any], Tensor | None]:
    """mask, mask_form, mask_fill and bias of a dense mask; what it allows where no kind of mask says that."""
    x = _once(four.detach()).cpu()
    if x.dtype is torch.bool:
        said: dict[str, Any] = {"mask_form": "bool"}
        keep = x
    else:
        keep, said = _additive(x, notes)
    mask = mask_of(keep, sizes)
    if mask is None:
        return said | {"mask": nearest(keep)}, compact(keep)
    return said | {"mask": mask}, None


def _additive(x: Tensor, notes: list[str]) -> tuple[Tensor, dict[str, Any]]:
    """(what an additive mask allows, its form, fill and bias)."""
    if not x.is_floating_point():
        raise CannotExpressError(f"a dense mask must be boolean or floating, got {x.dtype}")
    least = float(x.min()) if x.numel() else 0.0
    fills = {float("-inf"): "-inf", torch.finfo(x.dtype).min: "min"}
    fill = fills.get(least, "-1e4" if least <= -1e3 else "")
    if fill == "-1e4" and least != -1e4:
        notes.append(f"forbidden places of the additive mask held {least:g}, told as -1e4")
    keep = x > least / 2 if fill else torch.ones_like(x, dtype=torch.bool)
    said: dict[str, Any] = {"mask_form": "additive"} | ({"mask_fill": fill} if fill else {})
    if bool((x[keep] != 0).any()):
        said |= {"bias": _bias(torch.where(keep, x, 0.0)), "bias_axes": _axes(x)}
    return keep, said


def _bias(x: Tensor) -> str:
    """The kind of bias nearest to the values."""
    x = _once(x.detach()).float()
    if not x.numel() or float(x.abs().max()) > 16:
        return "large"
    return "negative" if float(x.max()) <= 0 else "normal"


def _axes(x: Tensor) -> str:
    return "".join(a for a, n, s in zip("bhqk", x.shape, x.stride(), strict=True) if n > 1 and s)


def _more_axes(four: Tensor, mask: Mask) -> str:
    """Axes at full size in memory, beyond those that the mask needs."""
    return "".join(a for a in _axes(four) if a not in mask.axes)


def _mask_layout(four: Tensor, sizes: Sizes) -> str:
    """expand: batch and heads at full size with stride 0 where the memory holds them once; else the nearest layout."""
    if any(four.stride(a) == 0 and four.shape[a] == sizes[a] > 1 for a in (0, 1)):
        return "expand"
    name, exact = layout_of(tuple(four.shape), four.stride())  # type: ignore[arg-type]
    return name if exact else "contiguous"


def _packed(source: Source, given: Mapping[str, Any], facts: Mapping[str, Any]) -> Mask:
    """The mask of sequences that lie end to end."""
    q, k = (_lengths(source, given, names) for names in CUMULATIVE)
    flags = _flags(source, given)
    if (sum(q), sum(k)) != (facts["Lq"], facts["Lk"]):
        raise CannotExpressError(
            f"cu_seqlens must end at the number of rows, got {sum(q)} of {facts['Lq']} and {sum(k)} of {facts['Lk']}"
        )
    if "packed" in masks.KINDS:
        return _as_packed(q, k, flags)
    if q != k or (flags != Full() and not isinstance(flags, Causal)):
        raise CannotExpressError(
            "sequences of queries and keys with different lengths, or with a window, have no mask kind"
        )
    return Document(q) & Causal() if flags != Full() else Document(q)


def _as_packed(q: tuple[int, ...], k: tuple[int, ...], flags: Mask) -> Mask:
    parts = list(flags.walk())
    window = next((m for m in parts if isinstance(m, Window)), Window())
    causal = next((m.align for m in parts if isinstance(m, Causal)), "")
    return masks.KINDS["packed"](q, k, causal, window.left, window.right)  # type: ignore[call-arg]


def _lengths(source: Source, given: Mapping[str, Any], names: tuple[str, ...]) -> tuple[int, ...]:
    ends = next((given[n] for n in names if given.get(n) is not None), None)
    if ends is None:
        raise CannotExpressError(f"{source.name} must be given {' or '.join(names)}, got None")
    ends = [int(n) for n in torch.as_tensor(ends).tolist()]
    return tuple(b - a for a, b in itertools.pairwise(ends))


def _layouts(tensors: Mapping[str, Tensor], notes: list[str]) -> dict[str, str]:
    """layout_q, layout_k and layout_v; strides that no layout has are noted."""
    storages = [x.untyped_storage().data_ptr() for x in tensors.values()]
    out = {}
    for (name, x), storage in zip(tensors.items(), storages, strict=True):
        out[f"layout_{name}"], exact = layout_of(
            tuple(x.shape),  # type: ignore[arg-type]
            x.stride(),
            misaligned=x.data_ptr() % 16 != 0,
            shared=storages.count(storage) > 1,
        )
        if not exact:
            notes.append(f"strides {x.stride()} of {name} told as {out[f'layout_{name}']}")
    return out
