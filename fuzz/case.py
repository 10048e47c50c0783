"""Case: one test of an attention implementation as pure data, small, absolute and readable."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from .masks import Causal, Full, Mask, Packed, mask_from_json

SCHEMA = 1
DTYPES = ("float32", "float16", "bfloat16", "float64")
LAYOUTS = ("contiguous", "blhd", "packed", "chunk", "expand", "offset", "strided", "size1", "transposed")
"""How a (B, H, L, D) tensor lies in memory.

contiguous; blhd: stored (B, L, H, D); packed: q, k, v slices of one storage; chunk: a slice of a storage with twice the heads;
expand: stride 0 over the batch and heads (all share values); offset: storage offset of one element; strided: last dimension has
stride 2; size1: strides of size-1 dimensions are garbage; transposed: stored (B, H, D, L), last dimension not contiguous.
"""
DATA = (
    "normal", "uniform", "large", "negative", "constant", "ties", "onehot", "needle", "outlier", "heavy", "sparse_int",
    "cancel", "subnormal", "ascending", "offset", "lowrank", "mixedscale", "tiny", "huge", "nonfinite", "nonfinite_masked",
)  # fmt: skip
GENERIC_DATA = frozenset({"normal", "uniform", "outlier", "offset", "mixedscale", "heavy"})
"""Regimes without ties or structure: the statistical tier judges these."""
GRADS = ("normal", "ones", "zero", "scaled", "cancel")
MASK_FORMS = ("flags", "bool", "additive")
"""flags: the dialect's own keywords where it has them, dense otherwise; bool, additive: always a dense tensor."""
MASK_FILLS = ("-inf", "min", "-1e4")
"""What an additive mask holds where attention is forbidden; min is finfo(dtype).min. Only -inf forbids exactly."""
SEQUENCES = ("", "repeat", "scale", "mask", "layout", "values", "refill")
"""Calls before the judged one: A, then A with this changed, then A again."""
BIAS = ("", "normal", "large", "negative")
ALIBI = ("", "standard", "batch", "negative", "zero", "large")
"""Slopes of ALiBi: 2^(-8(h+1)/Hq); one per batch entry and head; rising with distance; all zero; up to 30."""
SINKS = ("", "normal", "large", "negative", "-inf")
"""Logits of the sinks: normal; 30 times that; around -8; -inf in every other head."""
MODES = ("", "autocast", "compile", "opcheck")
"""How the target is called: plainly; under torch.autocast; through torch.compile; after torch.library.opcheck."""


@dataclass(frozen=True, repr=False)
class Case:
    """Sizes, data and features of one test. The defaults are the simplest case.

    q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv), do (B, Hq, Lq, Dv). `scale` None means 1/sqrt(D).
    `mask_axes` and `bias_axes` name the axes of b, h, q, k that the dense tensor has at full size, beyond those it needs.
    `requires_grad` is a subset of "qkvbs" (b: the additive bias, s: the sinks); empty means no backward pass.
    """

    B: int = 1
    Hq: int = 1
    Hkv: int = 1
    Lq: int = 1
    Lk: int = 1
    D: int = 1
    Dv: int = 1
    dtype: str = "float32"
    mask: Mask = Full()
    mask_form: str = "flags"
    mask_fill: str = "-inf"
    mask_axes: str = ""
    bias: str = ""
    bias_axes: str = "qk"
    alibi: str = ""
    sinks: str = ""
    scale: float | None = None
    softcap: float = 0.0
    dropout: float = 0.0
    data: str = "normal"
    grad: str = "normal"
    lse_grad: bool = False
    requires_grad: str = "qkv"
    layout_q: str = "contiguous"
    layout_k: str = "contiguous"
    layout_v: str = "contiguous"
    layout_do: str = "contiguous"
    layout_mask: str = "contiguous"
    sequence: str = ""
    mode: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, rule, ok in RULES:
            value = getattr(self, name)
            if not ok(self, value):
                raise ValueError(f"case field {name} must {rule}, got {name}={value!r}")
        self._check_packed()
        for name in ("scale", "softcap", "dropout"):  # equal cases have equal keys: no -0.0, and 30 is 30.0
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, float(value) + 0.0)

    def _check_packed(self) -> None:
        """ValueError where packed sequences do not fill the case."""
        for m in self.mask.walk():
            if isinstance(m, Packed):
                want, got = (1, sum(m.lengths_q), sum(m.lengths_k)), (self.B, self.Lq, self.Lk)
                said = [f"B={B}, Lq={Lq}, Lk={Lk}" for B, Lq, Lk in (want, got)]
                if want != got:
                    raise ValueError(f"case of packed sequences must have {said[0]} as they add up, got {said[1]}")

    def __repr__(self) -> str:
        """Python that makes the case: what differs from the default."""
        changed = ((f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Case({', '.join(f'{name}={value!r}' for name, value in changed)})"

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        """How Hypothesis and IPython print a case."""
        printer.text(repr(self))

    @property
    def G(self) -> int:
        """Query heads per key head."""
        return self.Hq // self.Hkv

    @property
    def resolved_scale(self) -> float:
        """The number that scores are multiplied by."""
        return self.D**-0.5 if self.scale is None else self.scale

    def but(self, **changes: Any) -> Case:
        """This case with some fields changed."""
        return replace(self, **changes)

    def varied(self) -> Case:
        """The case of the other call of a call sequence A, B, A (refill: B, A): same shapes, one thing changed."""
        match self.sequence:
            case "scale":
                return self.but(scale=0.5 * self.resolved_scale if self.resolved_scale else 1.0)
            case "mask":
                causal = any(isinstance(m, Causal) for m in self.mask.walk())
                return self.but(mask=Full() if causal or self.mask != Full() else Causal(), mask_axes="")
            case "layout":
                other = "blhd" if self.layout_q == "contiguous" else "contiguous"
                return self.but(layout_q=other, layout_k=other, layout_v=other, layout_do=other)
            case "values" | "refill":
                return self.but(seed=self.seed + 1)
        return self

    def to_json(self) -> dict[str, Any]:
        """A JSON object with `schema` and every field that differs from its default (sizes always)."""
        out: dict[str, Any] = {"schema": SCHEMA}
        for f in fields(self):
            value = getattr(self, f.name)
            if value != f.default or f.name in SIZES or f.name in ("dtype", "seed"):
                out[f.name] = value.to_json() if isinstance(value, Mask) else value
        return out

    @cached_property
    def key(self) -> str:
        """Canonical JSON text: equal cases have equal keys."""
        return json.dumps(self.to_json(), sort_keys=True, allow_nan=False)


SIZES = ("B", "Hq", "Hkv", "Lq", "Lk", "D", "Dv")


def _whole(low: int) -> Any:
    return lambda _, n: isinstance(n, int) and not isinstance(n, bool) and n >= low


def _real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _one_of(names: tuple[str, ...]) -> tuple[str, Any]:
    return f"be one of {', '.join(n or repr(n) for n in names)}", lambda _, v: v in names


def _axes(_: Case, value: object) -> bool:
    return isinstance(value, str) and value == "".join(c for c in "bhqk" if c in value)


def _kv_heads(case: Case, n: object) -> bool:
    return bool(_whole(1)(case, n)) and case.Hq % case.Hkv == 0


RULES: tuple[tuple[str, str, Any], ...] = (
    *((name, "be an integer >= 1", _whole(1)) for name in ("Hq", "D", "Dv")),
    *((name, "be an integer >= 0", _whole(0)) for name in ("B", "Lq", "Lk", "seed")),
    ("Hkv", "be an integer >= 1 that divides Hq", _kv_heads),
    ("dtype", *_one_of(DTYPES)),
    ("mask", "be a Mask", lambda _, m: isinstance(m, Mask)),
    ("mask_form", *_one_of(MASK_FORMS)),
    ("mask_fill", *_one_of(MASK_FILLS)),
    ("mask_axes", "be a subset of bhqk in that order", _axes),
    ("bias", *_one_of(BIAS)),
    ("bias_axes", "be a subset of bhqk in that order", _axes),
    ("alibi", *_one_of(ALIBI)),
    ("sinks", *_one_of(SINKS)),
    ("scale", "be null or a finite number", lambda _, x: x is None or _real(x)),
    ("softcap", "be a finite number >= 0", lambda _, x: _real(x) and x >= 0),
    ("dropout", "be a number in [0, 1)", lambda _, x: _real(x) and 0 <= x < 1),
    ("data", *_one_of(DATA)),
    ("grad", *_one_of(GRADS)),
    ("lse_grad", "be true or false", lambda _, x: isinstance(x, bool)),
    ("requires_grad", "be a subset of qkvbs in that order", lambda _, s: isinstance(s, str) and s == "".join(c for c in "qkvbs" if c in s)),
    *((f"layout_{t}", *_one_of(LAYOUTS)) for t in ("q", "k", "v", "do", "mask")),
    ("sequence", *_one_of(SEQUENCES)),
    ("mode", *_one_of(MODES)),
)  # fmt: skip


def case_from_json(data: object) -> Case:
    """The case a JSON object (or its text) describes; ValueError names the field that is wrong and what is allowed."""
    if isinstance(data, str):
        try:
            data = json.loads(data)
        except (json.JSONDecodeError, RecursionError) as e:
            raise ValueError(f"case must be JSON: {e}") from None
    if not isinstance(data, Mapping):
        raise ValueError(f"case must be a JSON object, got {type(data).__name__}")
    if data.get("schema") != SCHEMA:
        raise ValueError(
            f"case schema must be {SCHEMA} for this version of flashproof, got schema={data.get('schema')!r}"
        )
    known = {f.name for f in fields(Case)}
    for name in data:
        if name not in known and name != "schema":
            raise ValueError(f"case must have only the fields {', '.join(sorted(known))}, got {name!r}")
    values = {n: v for n, v in data.items() if n != "schema"}
    if "mask" in values:
        values["mask"] = mask_from_json(values["mask"])
    return Case(**values)
