"""A case in a sentence: "float32, B = Hq = Lq = D = 1, Lk = 17; causal (bottom-right); forward only"."""

from __future__ import annotations

from collections.abc import Iterator

from .case import Case
from .masks import (
    And,
    BlockSparse,
    Causal,
    Document,
    Full,
    Mask,
    Not,
    Or,
    Packed,
    Padding,
    Prefix,
    Random,
    Strided,
    Window,
)

_SEQUENCE = {
    "repeat": "called three times", "scale": "called before with another scale", "mask": "called before with another mask",
    "layout": "called before with another layout", "values": "called before with other values",
    "refill": "called before with other values in the same memory",
}  # fmt: skip
_LAYOUT = {
    "blhd": "stored (B, L, H, D)", "packed": "a slice of packed q, k, v", "chunk": "a slice of a larger tensor",
    "expand": "expanded (stride 0)", "offset": "at a storage offset", "strided": "with stride 2 in the last dimension",
    "size1": "with odd strides on dimensions of size 1", "transposed": "stored with its last dimension not contiguous",
}  # fmt: skip
_MODE = {"autocast": "under autocast", "compile": "compiled", "opcheck": "checked as an operator"}
_TENSOR = {"do": "grad_output", "mask": "the dense mask"}


def sentence(case: Case) -> str:
    """What a reader must know to write the case by hand; whatever has its default value is not said."""
    return "; ".join(parts(case))


def parts(case: Case) -> list[str]:
    """The sentence in its parts: dtype and sizes, then every feature."""
    return [f"{case.dtype}, {_sizes(case)}", *_features(case)]


def _sizes(case: Case) -> str:
    """Sizes, equal ones in one chain if they are 1 or are lengths; Hkv and Dv only where they differ from Hq and D."""
    names = ["B", "Hq", "Hkv", "Lq", "Lk", "D", "Dv"]
    if case.Hkv == case.Hq:
        names.remove("Hkv")
    if case.Dv == case.D:
        names.remove("Dv")
    ones = [n for n in names if getattr(case, n) == 1]
    chains = [ones] if ones else []
    for n in (n for n in names if n not in ones):
        equal = chains and n == "Lk" and chains[-1] == ["Lq"] and case.Lk == case.Lq
        chains = [*chains[:-1], ["Lq", "Lk"]] if equal else [*chains, [n]]
    return ", ".join(" = ".join((*chain, str(getattr(case, chain[0])))) for chain in chains)


def _features(case: Case) -> Iterator[str]:
    if case.mask != Full() or case.mask_form != "flags":
        yield mask_words(case.mask) + _form(case)
    if case.bias:
        yield f"{case.bias} bias" + (f" over axes {case.bias_axes or 'none'}" if case.bias_axes != "qk" else "")
    if case.alibi:
        yield f"{case.alibi} ALiBi slopes"
    if case.sinks:
        yield f"{case.sinks} sinks"
    if case.scale is not None:
        yield f"scale {case.scale:g}"
    if case.softcap:
        yield f"softcap {case.softcap:g}"
    if case.dropout:
        yield f"dropout {case.dropout:g}"
    if case.data != "normal":
        yield f"{case.data} data"
    yield from _layouts(case)
    if case.sequence:
        yield _SEQUENCE[case.sequence]
    if case.mode:
        yield _MODE[case.mode]
    yield from _gradients(case)
    if case.seed:
        yield f"seed {case.seed}"


def _form(case: Case) -> str:
    if case.mask_form == "flags":
        return ""
    fill = f" filled with {case.mask_fill}" if case.mask_form == "additive" else ""
    axes = f" at full size on {case.mask_axes}" if case.mask_axes else ""
    return f" as a dense {'boolean' if case.mask_form == 'bool' else 'additive'} tensor{fill}{axes}"


def _layouts(case: Case) -> Iterator[str]:
    for t in ("q", "k", "v", "do", "mask"):
        layout = getattr(case, f"layout_{t}")
        if layout != "contiguous":
            yield f"{_TENSOR.get(t, t)} {_LAYOUT[layout]}"


def _gradients(case: Case) -> Iterator[str]:
    if not case.requires_grad:
        yield "forward only"
    elif case.requires_grad != "qkv":
        yield "gradients of " + ", ".join({"b": "bias", "s": "sinks"}.get(c, c) for c in case.requires_grad) + " only"
    if case.grad != "normal":
        yield f"{case.grad} grad_output"
    if case.lse_grad:
        yield "gradient through lse"


def mask_words(mask: Mask) -> str:  # noqa: PLR0911, PLR0912 (a return for each kind)
    """A mask in words."""
    match mask:
        case Full():
            return "every key allowed"
        case Causal(align=align):
            return f"causal ({_corner(align)})"
        case Window(left=left, right=right, align=align):
            return f"window of {_side(left)} back and {_side(right)} ahead ({_corner(align)})"
        case Padding(lengths=lengths):
            return f"padding to {_list(lengths)} keys"
        case Document(lengths=lengths):
            return f"documents of {_list(lengths)} tokens"
        case Prefix(length=length, align=align):
            return f"prefix of {length} keys, then causal ({_corner(align)})"
        case Strided(stride=stride):
            return f"strided by {stride}"
        case BlockSparse():
            return f"{mask.percent}% of {mask.block_q} x {mask.block_k} blocks" + _by(mask.axes, mask.seed)
        case Random():
            dead = f", {mask.dead_rows}% of the rows dead" if mask.dead_rows else ""
            return f"{mask.percent}% of the pairs at random{dead}" + _by(mask.axes, mask.seed)
        case Packed():
            return _packed(mask)
        case And(first=first, second=second):
            return f"({mask_words(first)}) and ({mask_words(second)})"
        case Or(first=first, second=second):
            return f"({mask_words(first)}) or ({mask_words(second)})"
        case Not(inner=inner):
            return f"not ({mask_words(inner)})"
    return mask.kind


def _packed(mask: Packed) -> str:
    """`2 packed sequences of 0, 1 queries and 2, 3 keys, each causal (bottom-right)`."""
    q, k, n = _list(mask.lengths_q), _list(mask.lengths_k), len(mask.lengths_q)
    of = f"{q} tokens" if q == k else f"{q} queries and {k} keys"
    inside = " and a ".join(map(mask_words, mask.inside)).replace("and a causal", "and causal")
    sequences = f"{n} packed sequences" if n > 1 else "one packed sequence"
    return f"{sequences} of {of}" + (f", {'each ' * (n > 1)}{inside}" if inside else "")


def _corner(align: str) -> str:
    return align.replace("_", "-")


def _side(n: int) -> str:
    return "any number" if n < 0 else str(n)


def _list(lengths: tuple[int, ...]) -> str:
    return ", ".join(map(str, lengths))


def _by(axes: str, seed: int) -> str:
    return (f" over axes {axes}" if axes != "qk" else "") + (f", mask seed {seed}" if seed else "")
