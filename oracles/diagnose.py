"""Which single relaxation of the contract explains a failure: the line between a logic bug and a precision deviation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from .contract import ETA, LARGEST, UNIT, Contract
from .elements import ZMAX, ZRMS, excess
from .exact import Array, Problem, Reference, doubles
from .limits import limits
from .spread import sigmas
from .taint import separate

if TYPE_CHECKING:
    from ..fuzz.tensors import Inputs


@dataclass(frozen=True)
class Deviation:
    """One change of the contract under which every output is right: what it is, how to declare it, how to remove it."""

    label: str
    declaration: str
    code_change: str

    def __str__(self) -> str:
        return f"consistent with {self.label}; declare {self.declaration}, or change the code: {self.code_change}"


@dataclass(frozen=True)
class Hypothesis:
    """A relaxation: contract fields (at least these values), a preset or fields to declare it, and what undoes it."""

    label: str
    fields: dict[str, Any]
    code_change: str
    declared: str = ""  # default: the fields themselves


FORMATS = (("float16", UNIT["float16"]), ("bfloat16", UNIT["bfloat16"]))
STAGES: tuple[tuple[str, str, str, str], ...] = (
    ("q_u", "", "q multiplied by the scale and then rounded to {}", "multiply the float32 scores by the scale, not q"),
    ("s_u", "s_eta", "scores stored in {}", "keep the scores in float32 until the softmax"),
    ("lse_u", "", "lse stored in {}", "allocate lse as float32"),
    ("p_u", "p_eta", "P cast to {}", "cast P to the dtype of v, no narrower"),
    ("dp_u", "dp_eta", "dP stored in {}", "keep dP in float32: its cancellation with delta amplifies the rounding"),
    ("ds_u", "ds_eta", "dS cast to {}", "cast dS to the dtype of k, no narrower"),
    ("p_in_ds_u", "p_in_ds_eta", "P rounded to {} before dS", "use the float32 P in dS = P * (dP - delta)"),
    ("dkv_acc_u", "acc_eta", "dk and dv accumulated in {} across query tiles", "accumulate dk and dv in float32"),
    ("dq_acc_u", "acc_eta", "dq accumulated in {} across key tiles", "accumulate dq in float32"),
    ("gqa_u", "gqa_eta", "dk and dv rounded to {} per query head", "sum the query heads of a group in float32"),
    ("dbias_u", "dbias_eta", "dS rounded to {} before its sum over the bias's broadcast axes", "sum dS in float32"),
)
SPARSE = 0.05
"""Errors below this share of their expected scale are not there at all."""
TF32_CHANGE = 'input_precision="ieee" in tl.dot; torch.backends.cuda.matmul.allow_tf32 = False'


def hypotheses(io: str) -> Iterator[Hypothesis]:
    """Single relaxations, in the order in which they are tried."""
    if io == "float32":
        for label, name, u, rz in (("TF32", "tf32", 2.0**-11, False), ("truncated TF32", "tf32_rz", 2.0**-10, True)):
            yield Hypothesis(f"{label} operands", {"dot_u": u, "p_u": u, "ds_u": u, "dot_rz": rz}, TF32_CHANGE, name)
        u = UNIT["bfloat16"]
        yield Hypothesis(
            "bfloat16 operands", {"dot_u": u, "p_u": u, "ds_u": u}, "keep the operands of the dots in float32", "bf16"
        )
    for field, eta, label, change in STAGES:
        for name, u in FORMATS:
            extra = {eta: ETA[name]} if eta else {}
            if field in ("s_u", "dp_u", "ds_u"):
                extra[f"{field[:-2]}_max"] = LARGEST[name]
            yield Hypothesis(label.format(name), {field: 2.1 * u if field == "s_u" else u} | extra, change)
    yield Hypothesis("the normaliser summed from the rounded P", {"l_from_rounded_p": True}, "sum P before its cast")
    yield Hypothesis(
        "dS multiplied by the scale before its cast",
        {"ds_scaled": True},
        "multiply the accumulated dq and dk by the scale",
    )
    yield Hypothesis(
        "an exponential with relative error 1e-4", {"exp_u": 1e-4}, "use exp2 of the hardware or a longer polynomial"
    )
    yield Hypothesis("an exponential in half precision", {"exp_u": 2.0**-10}, "compute the exponential in float32")
    yield Hypothesis(
        "a constant written short (log2(e), ln(2), the scale)",
        {"constant_u": 2.0**-17},
        "write the constant to nine digits",
    )
    yield Hypothesis("a softmax scale rounded to bfloat16", {"q_u": 2.0**-8}, "keep the scale in float32")
    yield Hypothesis(
        "an accumulator of 13 bits",
        {"acc_u": 2.0**-14, "acc_k": 3.0},
        "promote the accumulator to float32 between blocks",
    )


def diagnose(inputs: Inputs, outputs: Mapping[str, Tensor], contract: Contract) -> list[Deviation]:
    """The single relaxations of the contract that explain every output of a case, likeliest first; empty: a logic bug."""
    return explain(Problem.of(inputs), outputs, contract)


def explain(problem: Problem, outputs: Mapping[str, Tensor], contract: Contract) -> list[Deviation]:
    """The hypotheses under which all outputs are within limits and their errors as large as expected, likeliest first.

    Likeliest: the one that widens the expected error least. Empty when the outputs are right as declared, when there are
    non-finite inputs, or when no single relaxation explains everything: look for a logic bug then.
    """
    with np.errstate(all="ignore"):
        clean, taint = separate(problem, contract)
        r = Reference(clean)
        given = {n: doubles(t) for n, t in outputs.items() if t is not None and n in r.arrays}
        if contract.sink_lse == "without" and problem.sinks is not None:
            given.pop("lse", None)
        if taint is not None or any(x.shape != r.arrays[n].shape for n, x in given.items()):
            return []
        failing = _outside(r, given, contract)
        found = []
        for h in hypotheses(contract.io) if failing else ():
            relaxed = _relaxed(contract, h)
            score = None if relaxed == contract or _outside(r, given, relaxed) else _misfit(r, given, relaxed, failing)
            if score is not None:
                found.append((score, Deviation(h.label, _declaration(contract, h), h.code_change)))
    return [deviation for _, deviation in sorted(found, key=lambda pair: pair[0])]


def _relaxed(c: Contract, h: Hypothesis) -> Contract:
    """The contract with each field at least as wide as the hypothesis says."""
    wide = {
        n: v if isinstance(v, bool) else min(v, getattr(c, n)) if n.endswith("_max") else max(v, getattr(c, n))
        for n, v in h.fields.items()
    }
    return c.but(**wide)


def _declaration(c: Contract, h: Hypothesis) -> str:
    items = [c.spec] if c.spec else []
    items += [h.declared] if h.declared else [f"{n}={_text(v)}" for n, v in h.fields.items()]
    return f"--contract {','.join(items)}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    power = math.log2(value) if value > 0 else 0.5
    return f"2^{power:.0f}" if power < 0 and power == int(power) else repr(value)


def _outside(r: Reference, given: dict[str, Array], c: Contract) -> set[str]:
    """Tensors with an element beyond its limit."""
    allowed = limits(r, c, backward=any(n not in ("o", "lse") for n in given))
    outside = set()
    for name, x in given.items():
        ratio = excess(x, r.arrays[name], allowed.b[name])
        if (np.where(allowed.loose.get(name, False), 0.0, ratio) > 1.0).any():
            outside.add(name)
    return outside


def _misfit(r: Reference, given: dict[str, Array], c: Contract, failing: set[str]) -> float | None:
    """How far the errors are from the size that the contract predicts, 0 is best.

    None where they do not look like rounding: too large on average, a few very large ones, or, in a tensor that fails as
    declared, next to none in three quarters of the elements (one lost key spoils one row; a rounding spoils all).
    """
    spread = sigmas(r, c, backward=any(n not in ("o", "lse") for n in given))
    total = 0.0
    for name, x in given.items():
        z = np.abs((x - r.arrays[name]) / spread[name])
        z = z[np.isfinite(z) & (spread[name] > 0)]
        if not z.size:
            continue
        rms = float(np.sqrt((z * z).mean()))
        if rms >= ZRMS or z.max() >= ZMAX or (name in failing and np.quantile(z, 0.75) < SPARSE):
            return None
        total += abs(math.log(max(rms, 1e-3)))
    return total
