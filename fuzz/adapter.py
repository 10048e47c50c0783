"""`flashproof.target`: what an adapter declares about a function with a signature of its own, checked where it is declared.

The decorated function takes tensors and values by the names of its own parameters; adapted.py calls it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast

import torch

from ..impls import Implementation
from ..impls.loading import signature
from ..oracles.contract import contract_for
from .case import DTYPES
from .masks import ALIGNMENTS, Align
from .region import MASKS, Region

TENSORS = {
    "q": "queries",
    "k": "keys",
    "v": "values",
    "mask": "bool, broadcastable to (B, Hq, Lq, Lk), True where attention is allowed; None where everything is",
    "bias": "finite numbers to add to the scores, broadcastable to (B, Hq, Lq, Lk); None without",
    "attn_mask": "mask and bias in one, as torch's SDPA takes them: bool, or numbers with -inf where it is forbidden; or None",
    "alibi_slopes": "(Hq,) or (B, Hq) float32; None without",
    "sinks": "(Hq,) logits that take part in each row's normaliser; None without",
    "cu_seqlens_q": "int32 (B + 1,), where the sequences of a packed q begin and end",
    "cu_seqlens_k": "the same of k and v",
    "cu_seqlens": "the same where q and k have equal lengths",
}
VALUES = {
    "scale": "the number that scores are multiplied by, always given",
    "causal": "True for a causal mask, aligned as declared",
    "window": "(left, right), aligned as declared, -1 for no bound; None without",
    "softcap": "the cap, 0.0 for none",
    "dropout": "the probability, 0.0 for none",
    "dropout_seed": "an integer to seed dropout with",
    "max_seqlen_q": "the longest sequence of a packed q",
    "max_seqlen_k": "the same of k and v",
    "max_seqlen": "the same where q and k have equal lengths",
}
FORWARD = TENSORS | VALUES
"""Names that a function may take, and what it is given."""
BACKWARD = {
    "do": "the gradient of o",
    "o": "the output, as the forward function returned it",
    "lse": "the log-sum-exp, as the forward function returned it",
    "dlse": "the gradient of lse, in the form of lse",
}
"""Further names that a backward function may take; what the forward function returns beyond o and lse is passed on too."""
SIZES = ("B", "Hq", "Hkv", "Lq", "Lk", "D", "Dv", "dtype", "device")
"""What a factory may ask for by name."""
OUTPUTS = ("o", "lse")
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")
PACKED = "packed"
LSE = ("natural", "log2")
LN2 = math.log(2.0)
POLICIES = ("dead_rows", "dead_lse", "nonfinite", "masked_nonfinite")
NEEDS = {"scale": "scale", "softcap": "softcap", "dropout": "dropout", "bias": "bias"}
"""Flags of a region, and the parameter without which the function cannot be told."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """The declaration of one target. `out` maps outputs to the parameters that their buffers are handed to."""

    name: str
    takes: tuple[str, ...]
    positional: bool = False
    layout: str = "bhld"
    align: Align | Literal[""] = ""
    returns: tuple[str, ...] = ("o",)
    lse: str = "natural"
    lse_shape: str = "bhl"
    bwd: Callable[..., Any] | None = None
    bwd_takes: tuple[str, ...] = ()
    bwd_returns: tuple[str, ...] = ("dq", "dk", "dv")
    factory: dict[str, Callable[..., Any]] = field(default_factory=dict)
    out: dict[str, str] = field(default_factory=dict)
    forward_only: bool = False
    loose: tuple[str, ...] = ()  # tensors that may differ between two runs

    def to_json(self) -> dict[str, Any]:
        """What a script needs to call the function without flashproof."""
        plain = (
            "takes",
            "positional",
            "layout",
            "align",
            "returns",
            "lse",
            "lse_shape",
            "bwd_takes",
            "bwd_returns",
            "out",
        )
        return {n: getattr(self, n) for n in plain} | {"bwd": self.bwd is not None, "factory": self.asked()}

    def asked(self) -> dict[str, list[str]]:
        """Per factory, the sizes that it asks for."""
        return {n: [p for p in _named(make) if p in SIZES] for n, make in self.factory.items()}


def target(
    fn: Callable[..., Any] | None = None,
    *,
    layout: str = "bhld",
    align: str = "",
    takes: Sequence[str] = (),
    returns: Sequence[str] = (),
    lse: str = "",
    lse_shape: str = "",
    bwd: Callable[..., Any] | None = None,
    bwd_returns: Sequence[str] = ("dq", "dk", "dv"),
    factory: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
    out: Sequence[str] | Mapping[str, str] = (),
    supports: Region | Mapping[str, Any] | None = None,
    contract: str = "",
    dead_rows: str = "",
    dead_lse: str = "",
    nonfinite: str = "",
    masked_nonfinite: str = "",
    deterministic: Sequence[str] | None = None,
    forward_only: bool = False,
    refuses: Sequence[type[Exception]] = (),
    devices: Sequence[str] = ("cpu", "cuda"),
) -> Any:
    """The function as a target, still callable; without a function, the decorator that makes it one.

    docs/bring-your-own.md says what each argument means. Raises ValueError, naming the function and what is allowed.
    """
    if fn is None:
        given = {n: x for n, x in locals().items() if n != "fn"}
        return lambda f: target(f, **given)
    name = getattr(fn, "__name__", type(fn).__name__)
    say = _Sayer(name)
    made = {"made": factory} if callable(factory) else dict(factory or {})
    buffers = dict(out) if isinstance(out, Mapping) else {n: n for n in _names(say, "out", out, OUTPUTS + GRADIENTS)}
    say.known("out", buffers, OUTPUTS + GRADIENTS)
    outputs = _returns(say, returns, bool(lse or lse_shape), buffers)
    named, positional = _takes(say, fn, takes, {*FORWARD, *made, *(buffers[n] for n in buffers if n in OUTPUTS)})
    adapter = Adapter(
        name=name,
        takes=named,
        positional=positional,
        layout=_layout(say, layout, named),
        align=_align(say, align, named),
        returns=outputs,
        lse=say.one_of("lse", lse or LSE[0], LSE),
        lse_shape=_lse_shape(say, lse_shape, layout),
        bwd=bwd,
        bwd_takes=_bwd_takes(say, bwd),
        bwd_returns=_names(say, "bwd_returns", bwd_returns, GRADIENTS),
        factory=made,
        out=buffers,
        forward_only=forward_only,
        loose=tuple(n for n in OUTPUTS + GRADIENTS if deterministic is not None and n not in deterministic),
    )
    _consistent(say, adapter)
    policies = dict(zip(POLICIES, (dead_rows, dead_lse, nonfinite, masked_nonfinite), strict=True))
    return Implementation(
        name=name,
        call=fn,
        dialect="adapter",
        supports=_region(say, supports, adapter),
        contract=_contract(say, contract, policies, deterministic, forward_only),
        devices=_names(say, "devices", devices, ("cpu", "cuda")),
        summary=(getattr(fn, "__doc__", None) or "").strip().partition("\n")[0],
        refuses=_refuses(say, refuses),
        adapter=adapter,
    )


@dataclass(frozen=True)
class _Sayer:
    """Errors of one declaration, each a sentence that names the function."""

    name: str

    def wrong(self, sentence: str) -> ValueError:
        return ValueError(f"@flashproof.target on {self.name}: {sentence}")

    def one_of(self, what: str, word: str, words: Sequence[str]) -> str:
        if word not in words:
            raise self.wrong(f"{what} must be one of {', '.join(words)}, got {what}={word!r}")
        return word

    def known(self, what: str, given: Any, words: Sequence[str]) -> None:
        """Raise unless every given name is one of the words."""
        for word in given:
            if word not in words:
                raise self.wrong(f"{what} must hold names of {', '.join(words)}, got {word!r}")


def _names(say: _Sayer, what: str, given: Sequence[str], words: Sequence[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise say.wrong(f"{what} must be a tuple of names, got {what}={given!r}; did you mean ({given!r},)?")
    say.known(what, given, words)
    return tuple(given)


def _takes(say: _Sayer, fn: Any, takes: Sequence[str], known: set[str]) -> tuple[tuple[str, ...], bool]:
    """(names that the function takes, whether they are passed by position)."""
    if not callable(fn):
        raise say.wrong(f"it must decorate a callable, got {type(fn).__name__}")
    if isinstance(fn, type):
        raise say.wrong("it must decorate a function; build an instance of a class in a factory")
    if takes:
        return _names(say, "takes", takes, sorted(known)), True
    sig = signature(fn)
    required, optional, variable = _parameters(sig)
    if sig is None or (variable and not required and not optional):
        raise say.wrong("its parameters cannot be read; name them in order: takes=('q', 'k', 'v', ...)")
    for name in required:
        if name not in known:
            rule = f"it may take {', '.join(n for n in sorted(known))}; another needs a default, or a factory that makes it"
            raise say.wrong(f"the parameter {name} has no meaning: {rule}")
    missing = [n for n in "qkv" if n not in required + optional]
    if missing:
        raise say.wrong(f"it must take q, k and v by these names, got ({', '.join(required + optional)})")
    return tuple(n for n in required + optional if n in known), False


def _parameters(sig: Any) -> tuple[list[str], list[str], bool]:
    """(names without a default, names with one, whether there is * or **)."""
    params = [] if sig is None else list(sig.parameters.values())
    plain = [p for p in params if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p.name for p in plain if p.default is p.empty]
    return required, [p.name for p in plain if p.default is not p.empty], len(plain) < len(params)


def _named(fn: Callable[..., Any]) -> list[str]:
    """Names of all parameters that can be passed by name."""
    required, optional, _ = _parameters(signature(fn))
    return required + optional


def _bwd_takes(say: _Sayer, bwd: Callable[..., Any] | None) -> tuple[str, ...]:
    """Names that the backward function is given; what it takes beyond those known, the forward function must return."""
    if bwd is None:
        return ()
    sig = signature(bwd)
    required, optional, _ = _parameters(sig)
    if sig is None or not required:
        raise say.wrong("bwd must be a function that takes do, q, k, v, o, ... by these names")
    if "do" not in required + optional:
        raise say.wrong(f"bwd must take do, the gradient of o, got ({', '.join(required + optional)})")
    return (*required, *(n for n in optional if n in FORWARD | BACKWARD or n in GRADIENTS))


def _returns(say: _Sayer, returns: Sequence[str], lse: bool, buffers: Mapping[str, str]) -> tuple[str, ...]:
    outputs = _names(say, "returns", returns, OUTPUTS) or (OUTPUTS if lse or "lse" in buffers else ("o",))
    if "o" not in outputs:
        raise say.wrong(f"returns must name o, got returns={tuple(returns)!r}")
    if lse and "lse" not in outputs:
        raise say.wrong("lse is declared, but returns does not name it")
    return outputs


def _layout(say: _Sayer, layout: str, takes: Sequence[str]) -> str:
    packed = [n for n in takes if "seqlen" in n]
    if layout == PACKED:
        if not any(n.startswith("cu_seqlens") for n in packed):
            raise say.wrong("layout 'packed' needs a parameter cu_seqlens_q and cu_seqlens_k, or cu_seqlens")
        dense = [n for n in ("mask", "bias", "attn_mask") if n in takes]
        if dense:
            raise say.wrong(f"layout 'packed' has no dense (B, H, Lq, Lk) tensors, got the parameter {dense[0]}")
        return layout
    if sorted(layout) != sorted("bhld"):
        rule = "the letters b, h, l, d in the order of the axes (bhld, blhd, lbhd, ...) or 'packed' for (total, H, D)"
        raise say.wrong(f"layout must be {rule}, got layout={layout!r}")
    if packed:
        raise say.wrong(f"the parameter {packed[0]} needs layout='packed', got layout={layout!r}")
    return layout


def _align(say: _Sayer, align: str, takes: Sequence[str]) -> Align | Literal[""]:
    needs = [n for n in ("causal", "window") if n in takes]
    if needs and not align:
        rule = "'top_left' (key j of query i where j <= i) or 'bottom_right' (j <= i + Lk - Lq)"
        raise say.wrong(f"it takes {needs[0]}, so align must say where the diagonal lies when Lq is not Lk: {rule}")
    return cast(Align, say.one_of("align", align, ALIGNMENTS)) if align else ""


def _lse_shape(say: _Sayer, shape: str, layout: str) -> str:
    shapes = ("hl", "lh") if layout == PACKED else ("bhl", "blh", "lbh", "hbl", "hlb", "lhb")
    return say.one_of("lse_shape", shape or ("hl" if layout == PACKED else "bhl"), shapes)


def _consistent(say: _Sayer, adapter: Adapter) -> None:
    """Raise where two declarations exclude one another."""
    a = adapter
    if "o" in a.out and a.bwd is None and not a.forward_only:
        raise say.wrong(
            "out names o, which autograd cannot follow: name a backward function (bwd=) or say forward_only=True"
        )
    if a.bwd is not None and a.forward_only:
        raise say.wrong("forward_only contradicts bwd")
    for output, name in a.out.items():
        where = a.takes if output in OUTPUTS else a.bwd_takes
        if name not in where:
            kind = "it" if output in OUTPUTS else "bwd"
            raise say.wrong(f"out hands {output} to the parameter {name}, but {kind} takes ({', '.join(where)})")
    for name in a.factory:
        if name not in (*a.takes, *a.bwd_takes):
            raise say.wrong(f"what the factory makes is passed as {name}, but it takes ({', '.join(a.takes)})")
    for name, make in a.factory.items():
        for wanted in _parameters(signature(make))[0]:
            if wanted not in SIZES:
                raise say.wrong(f"the factory of {name} may take {', '.join(SIZES)}, got the parameter {wanted}")


def _region(say: _Sayer, supports: Region | Mapping[str, Any] | None, adapter: Adapter) -> Region | None:
    if supports is None:
        return None
    if isinstance(supports, Mapping):
        say.known("supports", supports, [f.name for f in fields(Region)])
        for flag, name in NEEDS.items():
            told = {name, "attn_mask"} if flag == "bias" else {name}
            if supports.get(flag) is True and not told & set(adapter.takes):
                raise say.wrong(f"supports declares {flag}, but it takes no parameter {name} that could tell it so")
        values: dict[str, Any] = {n: tuple(x) if isinstance(x, list) else x for n, x in supports.items()}
        supports = Region(**values)
    if not isinstance(supports, Region):
        raise say.wrong(f"supports must be a flashproof.Region or a dict of its fields, got {type(supports).__name__}")
    _names(say, "supports dtypes", supports.dtypes, DTYPES)
    _names(say, "supports masks", supports.masks, MASKS)
    if not supports.dtypes or not supports.masks:
        raise say.wrong("supports must leave a dtype and a mask to serve")
    return supports


def _contract(
    say: _Sayer, contract: str, policies: Mapping[str, str], deterministic: Sequence[str] | None, forward_only: bool
) -> str:
    """The contract with the declared policies as further items."""
    items = [contract] if contract else []
    items += [f"{name}={word}" for name, word in policies.items() if word]
    if deterministic is not None:
        known = _names(say, "deterministic", deterministic, OUTPUTS + GRADIENTS)
        items.append(f"deterministic={'+'.join(known) or 'none'}")
    items += ["forward_only=true"] if forward_only else []
    spec = ",".join(items)
    try:
        contract_for(spec)
    except ValueError as e:
        raise say.wrong(str(e)) from None
    return spec


def _refuses(say: _Sayer, refuses: Sequence[type[Exception]]) -> tuple[type[Exception], ...]:
    kinds: tuple[Any, ...] = (refuses,) if isinstance(refuses, type) else tuple(refuses)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise say.wrong(f"refuses must hold exception types, got {kind!r}")
        if kind is Exception or issubclass(kind, torch.OutOfMemoryError | MemoryError):
            raise say.wrong(f"refuses must hold types that mean a refusal and nothing else, got {kind.__name__}")
    return kinds
