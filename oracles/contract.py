"""Precision contract: everything the verdict needs to know about an implementation's arithmetic and policies.

The limits (limits.py) hold for every program whose roundings stay inside the contract, so the only way to relax a verdict
is to change the declared contract, which is reviewed like code. docs/limits.md explains each field.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff of round to nearest."""
ETA = {"float64": 2.0**-1022, "float32": 2.0**-126, "float16": 2.0**-25, "bfloat16": 2.0**-126}
"""Largest absolute error of rounding near zero: half a subnormal spacing, or the smallest normal where flushing is allowed."""
LARGEST = {
    "float64": 1.7976931348623157e308,
    "float32": 3.4028234663852886e38,
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
}
U32 = UNIT["float32"]
FTZ = 2.0**-126
MAX32 = LARGEST["float32"]
TENSORS = ("o", "lse", "dq", "dk", "dv", "dbias", "dsinks")

POLICIES = {
    "delta": ("either", "do.o", "p.dp"),
    "dead_rows": ("zero", "nan", "mean", "any"),
    "dead_lse": ("-inf", "+inf", "any"),
    "sink_lse": ("with", "without"),
    "nonfinite": ("propagate", "ignore", "any"),
    "masked_nonfinite": ("must_not_leak", "may_leak"),
}
"""The fields that are words, and the words."""


@dataclass(frozen=True)
class Contract:
    """Roundings an implementation may make, and what it answers where the definition leaves a choice.

    Names: *_u is a relative error (unit roundoff), *_eta an absolute one, *_max where a stored intermediate overflows.
    """

    io: str = "float32"
    u: float = U32  # elementwise arithmetic and softmax
    dot_u: float = 0.0  # extra rounding of float32 operands of a dot
    dot_rz: bool = False  # those operands are truncated (biased), not rounded
    q_u: float = 0.0  # rounding of q * scale before the dot
    acc_u: float = U32
    acc_k: float = 1.0  # accumulation loses acc_k * acc_u per summed term
    s_u: float = 0.0  # scores stored in a narrow format
    s_eta: float = 0.0
    s_max: float = MAX32
    exp_u: float = 2.0**-22
    tanh_u: float = 2.0**-22
    p_u: float = 0.0  # cast of P before P V and P^T dO
    p_eta: float = FTZ
    l_from_rounded_p: bool = False  # the normaliser is summed from the rounded P
    p_in_ds_u: float = 0.0  # dS uses the rounded P
    p_in_ds_eta: float = 0.0
    dp_u: float = 0.0  # dP stored in a narrow format
    dp_eta: float = 0.0
    dp_max: float = MAX32
    ds_u: float = 0.0  # cast of dS before dS K and dS^T Q
    ds_eta: float = FTZ
    ds_max: float = MAX32
    ds_scaled: bool = False  # dS is multiplied by the scale before its cast
    out_u: float = U32
    out_eta: float = FTZ
    out_max: float = MAX32
    lse_u: float = U32
    log_abs: float = 2.0**-21
    kv_tile: int = 8  # smallest key tile: bounds the number of rescales
    q_tile: int = 16  # smallest query tile; matters with dkv_acc_u only
    rescale_slack: float = 0.0  # lazy rescaling: the running maximum may lag by this much (natural log)
    gqa_u: float = 0.0  # dK, dV rounded per query head before the sum over the group
    gqa_eta: float = 0.0
    dkv_acc_u: float = 0.0  # dK, dV accumulators kept in a narrow format across the query tiles of the group
    dq_acc_u: float = 0.0
    acc_eta: float = 0.0
    dbias_u: float = 0.0  # dS rounded before it is summed over the axes that the bias broadcasts
    dbias_eta: float = 0.0
    ftz: float = FTZ  # results below this may be flushed to zero
    constant_u: float = 0.0  # relative error of constants (log2(e), ln(2), the scale)
    delta: str = "either"  # from sum(dO * O stored), or from sum(P * dP)
    dead_rows: str = "zero"  # o and dq of a row with no allowed key
    dead_lse: str = "-inf"
    sink_lse: str = "with"  # whether lse counts the sink
    nonfinite: str = "propagate"  # a NaN that a live operand brings must reach the output
    masked_nonfinite: str = "must_not_leak"  # NaN or Inf in keys that every row masks out
    deterministic: tuple[str, ...] = TENSORS
    forward_only: bool = False
    spec: str = ""  # the words it was declared in

    def but(self, **changes: Any) -> Contract:
        """This contract with some fields changed."""
        return replace(self, **changes)

    @classmethod
    def exact(cls, constant_u: float = 2.0**-30) -> Contract:
        """The contract of a run whose every value is carried in float64.

        Both the run and the reference round with 2^-53, so their difference is judged with 2^-52. `constant_u` is how far
        a constant that the source writes in short form (log2(e) = 1.44269504) may be from its true value.
        """
        u, tiny = 2.0**-52, ETA["float64"]
        return cls(
            io="float64", u=u, acc_u=u, exp_u=4 * u, tanh_u=4 * u, lse_u=u, log_abs=8 * u, out_u=u, ftz=tiny,
            p_eta=tiny, ds_eta=tiny, out_eta=tiny, constant_u=constant_u, spec="exact",
        )  # fmt: skip


def _by_dtype(io: str) -> dict[str, Any]:
    """What follows from the dtype of q, k, v alone: P, dS, outputs and what each query head adds to dk and dv are cast to it."""
    u, eta, largest = UNIT[io], ETA[io], LARGEST[io]
    if io == "float64":
        exact = Contract.exact(0.0)
        return {f.name: getattr(exact, f.name) for f in fields(exact) if f.name != "spec"} | {
            f"{name}_max": largest for name in ("s", "dp", "ds", "out")
        }
    out = {"io": io, "out_u": u, "out_eta": eta}
    return (
        out
        if io == "float32"
        else out
        | {"p_u": u, "p_eta": eta, "ds_u": u, "ds_eta": eta, "ds_max": largest, "out_max": largest}
        | {"gqa_u": u, "gqa_eta": eta}  # as autograd gives where k and v are repeated for the heads of a group
        | {"dbias_u": u, "dbias_eta": eta}  # and where tiles of a broadcast bias are converted one by one
    )


def _narrow(io: str) -> dict[str, Any]:
    """gqa: dK and dV of each query head are rounded to the io dtype before they are summed."""
    return {"gqa_u": UNIT[io], "gqa_eta": ETA[io]} if io in ("float16", "bfloat16") else {}


def _dots(u: float, truncated: bool = False) -> Callable[[str, str], dict[str, Any]]:
    def preset(io: str, device: str) -> dict[str, Any]:
        if io != "float32":
            return {}
        units = {"acc_k": 3.0} if device == "cuda" else {}  # these dots run on tensor cores there
        return {"dot_u": u, "p_u": u, "ds_u": u, "dot_rz": truncated} | units

    return preset


def _accumulate(k: float) -> Callable[[str, str], dict[str, Any]]:
    return lambda io, device: {"acc_k": k}


def _tensor_cores(io: str) -> dict[str, Any]:
    return {"acc_k": 3.0} if io in ("float16", "bfloat16") else {}


LEAKS = {"masked_nonfinite": "may_leak"}


def _torch_cpu_math(io: str, device: str) -> dict[str, Any]:
    low = {"dbias_u": UNIT[io], "dbias_eta": ETA[io]} if io in ("float16", "bfloat16") else {}
    return LEAKS | _narrow(io) | low


def _torch_cpu_flash(io: str, device: str) -> dict[str, Any]:
    low = {"dkv_acc_u": UNIT[io], "acc_eta": ETA[io]} if io in ("float16", "bfloat16") else {}
    return LEAKS | _narrow(io) | low | {"q_tile": 32, "exp_u": 20 * 2.0**-23}


def _cudnn(io: str, device: str) -> dict[str, Any]:
    return LEAKS | _tensor_cores(io) | _narrow(io) | {"ds_scaled": True}


def _efficient(io: str, device: str) -> dict[str, Any]:
    if io == "float32":  # its float32 dots are three TF32 dots on tensor cores
        return _cudnn(io, device) | {"acc_k": 3.0, "dot_u": 2.0**-22, "p_u": 2.0**-22, "ds_u": 2.0**-22}
    low = {"p_in_ds_u": UNIT[io], "p_in_ds_eta": ETA[io]} if io in ("float16", "bfloat16") else {}
    return _cudnn(io, device) | low


def _lowp(io: str, device: str) -> dict[str, Any]:
    """Every intermediate is stored in the io dtype; scores are rounded after the dot and again after the scale."""
    if io not in ("float16", "bfloat16"):
        return {}
    u, eta, largest = UNIT[io], ETA[io], LARGEST[io]
    etas = {"s_eta": eta, "dp_eta": eta, "p_in_ds_eta": eta, "gqa_eta": eta, "dbias_eta": eta}
    return etas | {
        "s_u": 2.1 * u, "dp_u": u, "p_in_ds_u": u, "gqa_u": u, "dbias_u": u, "s_max": largest, "dp_max": largest,
    }  # fmt: skip


@dataclass(frozen=True)
class Preset:
    """A named set of changes to the default contract."""

    summary: str
    changes: Callable[[str, str], dict[str, Any]]


PRESETS: dict[str, Preset] = {
    "default": Preset("what follows from dtype and device, whatever the target declares", lambda io, d: {}),
    "ieee": Preset(
        "float32 dots with IEEE operands and accumulation", lambda io, d: {"acc_k": 1.0, "dot_u": 0.0, "dot_rz": False}
    ),
    "tf32": Preset("float32 operands of dots rounded to TF32", _dots(2.0**-11)),
    "tf32_rz": Preset(
        "float32 operands of dots truncated to TF32 (tl.dot's default on NVIDIA)", _dots(2.0**-10, truncated=True)
    ),
    "tf32x3": Preset("float32 dots by three TF32 dots", _dots(2.0**-20)),
    "bf16x3": Preset("float32 dots by three bfloat16 dots", _dots(2.0**-15)),
    "bf16": Preset("float32 operands of dots rounded to bfloat16", _dots(2.0**-8)),
    "hopper": Preset("tensor cores of Hopper and Blackwell: 25 bits kept at alignment, truncating", _accumulate(3.0)),
    "ampere": Preset("tensor cores of Turing, Ampere and Ada: 24 bits kept at alignment, truncating", _accumulate(4.0)),
    "volta": Preset("tensor cores of Volta: 23 bits kept at alignment, truncating", _accumulate(6.0)),
    "torch-cpu-math": Preset("torch SDPA, math backend on a CPU", _torch_cpu_math),
    "torch-cpu-flash": Preset("torch SDPA, flash backend on a CPU", _torch_cpu_flash),
    "torch-cuda-flash": Preset("torch SDPA, FlashAttention backend", lambda io, d: LEAKS | _tensor_cores(io)),
    "torch-cuda-math": Preset(
        "torch SDPA, math backend on a GPU", lambda io, d: _torch_cpu_math(io, d) | _tensor_cores(io)
    ),
    "cudnn": Preset("torch SDPA, cuDNN backend: Hopper, dS scaled before its cast", _cudnn),
    "efficient": Preset(
        "torch SDPA, memory-efficient backend: as cudnn, dS from the rounded P, float32 by three TF32 dots", _efficient
    ),
    "lowp": Preset("every intermediate stored in the dtype of q, k, v", _lowp),
    "may_leak": Preset("NaN or Inf in keys that every row masks out may reach the output", lambda io, d: dict(LEAKS)),
}


def contract_for(spec: str = "", dtype: str = "float32", device: str = "cpu") -> Contract:
    """The contract that `spec` declares: preset names and field=value items, comma separated, applied left to right.

    A value is a number (2^-11 is understood), true, false, a word, `io` (unit roundoff of the dtype) or `io_eta`. Empty
    means the default: IEEE float32 arithmetic, and on a GPU the accumulation of its tensor cores for 16-bit dtypes.
    Raises ValueError naming what exists.
    """
    if dtype not in UNIT:
        raise ValueError(f"contract dtype must be one of {', '.join(UNIT)}, got dtype={dtype!r}")
    kind = device.partition(":")[0]
    values = _by_dtype(dtype) | (_tensor_cores(dtype) if kind == "cuda" else {})
    for item in filter(None, (part.strip() for part in spec.split(","))):
        name, equals, text = item.partition("=")
        values |= (
            {name.strip(): _value(name.strip(), text.strip(), dtype)} if equals else _preset(item).changes(dtype, kind)
        )
    return Contract(**values, spec=spec)


def _preset(name: str) -> Preset:
    if name not in PRESETS:
        raise ValueError(f"contract must name a preset ({', '.join(PRESETS)}) or set field=value, got {name!r}")
    return PRESETS[name]


def _value(name: str, text: str, dtype: str) -> Any:
    """The value of field `name` written as `text`."""
    kinds = {f.name: f.type for f in fields(Contract) if f.name not in ("io", "spec")}
    if name not in kinds:
        raise ValueError(f"contract field must be one of {', '.join(sorted(kinds))}, got {name!r}")
    if name in POLICIES:
        return _one_of(name, text, POLICIES[name])
    if kinds[name] == "bool":
        return _one_of(name, text.lower(), ("true", "false")) == "true"
    if name == "deterministic":
        words = TENSORS if text == "all" else () if text in ("none", "") else tuple(text.split("+"))
        return tuple(_one_of(name, w, TENSORS) for w in words)
    number = _number(name, text, dtype)
    return max(1, int(number)) if kinds[name] == "int" else number


def _one_of(name: str, text: str, words: tuple[str, ...]) -> str:
    if text not in words:
        raise ValueError(f"contract field {name} must be one of {', '.join(words)}, got {name}={text}")
    return text


def _number(name: str, text: str, dtype: str) -> float:
    if text in ("io", "io_eta"):
        return (UNIT if text == "io" else ETA)[dtype]
    base, power, exponent = text.replace("**", "^").partition("^")
    try:
        number = float(base) ** float(exponent) if power else float(base)
    except (ValueError, OverflowError, ZeroDivisionError):
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ValueError(f"contract field {name} must be a number >= 0, io or io_eta, got {name}={text}")
    return number
