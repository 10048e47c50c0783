"""Does each keyword that a target accepts change its answer? One that is accepted and ignored is a finding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..oracles.finding import Finding
from ..oracles.invariants import Watched, bits
from .case import Case
from .dialects import DIALECTS, Binding, Inexpressible, answer
from .masks import Causal, Packed, Random, Window
from .tensors import build

BASES = tuple(Case(B=1, Hq=2, Hkv=2, Lq=L, Lk=L, D=D, Dv=D, dtype=dtype, requires_grad="", mask=mask)
              for mask in (Case().mask, Causal())
              for dtype in ("float32", "float16", "bfloat16") for L, D in ((4, 8), (16, 16), (128, 64)))  # fmt: skip
"""Tried in this order until the target serves one: some serve no float32, some no small tiles, some only causal."""
CHANGES: dict[str, dict[str, Any]] = {
    "causal": {"mask": Causal()},
    "window": {"mask": Window(1, 1)},
    "mask": {"mask": Random(percent=50, seed=1), "mask_form": "bool"},
    "bias": {"bias": "normal"},
    "score": {"bias": "normal"},
    "scale": {"scale": 1.5},
    "softcap": {"softcap": 0.5},
    "dropout": {"dropout": 0.5},
    "alibi": {"alibi": "standard"},
    "sinks": {"sinks": "normal"},
}
"""What to change in a base case so that the keyword must be used and the answer must differ. Not listed: enable_gqa and
return_lse, whose effect every case judges, and dropout_seed, which dropout uses."""


def probe_keywords(
    binding: Binding, fn: Callable[..., Any], device: str = "cpu"
) -> tuple[dict[str, str], list[Finding]]:
    """Per bound parameter what was seen, in words; and a finding for each that is accepted and ignored."""
    base, plain, why = _served(binding, fn, device)
    rows: dict[str, str] = {}
    findings = []
    for keyword, change in CHANGES.items():
        name = binding.name(keyword) if keyword in DIALECTS[binding.dialect].keywords else ""
        if not name:
            continue
        if plain is None:
            rows[name] = f"not probed: {why}"
            continue
        if base.but(**change) == base:
            rows[name] = "not probed: every case that is served has it"
            continue
        rows[name] = _effect(binding, fn, base.but(**change), plain, device)
        if rows[name] == IGNORED:
            message = f"is accepted and ignored: {_said(change)} does not change the answer"
            details = {"case": base.but(**change).to_json(), "base": base.to_json()}
            findings.append(Finding("ignored-keyword", name, message, details=details))
    if plain is not None:
        for name, effect, finding in _boundaries(binding, fn, base, device):
            rows[name] = effect
            findings += [finding] if effect == IGNORED else []
    return rows, findings


def _boundaries(
    binding: Binding, fn: Callable[..., Any], base: Case, device: str
) -> Iterator[tuple[str, str, Finding]]:
    """(parameter, what was seen, the finding if ignored) of cu_seqlens: halves, then the first sequence of length one."""
    halves, other = (base.Lq // 2, base.Lq - base.Lq // 2), (1, base.Lq - 1)
    alone = not binding.name("cu_k")
    before = base.but(mask=Packed(halves, halves))
    masks = {"cu_q": Packed(other, other if alone else halves), "cu_k": Packed(halves, other)}
    for keyword, mask in masks.items():
        name, case = binding.name(keyword), base.but(mask=mask)
        if name:
            message = f"is accepted and ignored: {mask} answers like {before.mask}"
            details = {"case": case.to_json(), "against": before.to_json()}
            finding = Finding("ignored-keyword", name, message, details=details)
            yield name, _compared(binding, fn, before, case, device), finding


def _compared(binding: Binding, fn: Callable[..., Any], before: Case, after: Case, device: str) -> str:
    """Whether the second case is answered otherwise than the first."""
    try:
        plain = _output(binding, fn, before, device)
    except (Exception, SystemExit) as e:  # noqa: BLE001 (the target may raise anything)
        return f"not probed: {type(e).__name__}: {e}"
    return _effect(binding, fn, after, plain, device)


IGNORED = "ignored"
UNLIKELY = 0x5EED_0FF5
"""Keeps the generators away from seeds that a target may set itself: a change to the same state would not be one."""
STALE = (
    "changes nothing after a call of the same shape without it, though it does in a new process: the target keeps state"
)
"""Of a keyword that only seems ignored: an earlier call decides."""


def _served(binding: Binding, fn: Callable[..., Any], device: str) -> tuple[Case, Tensor | None, str]:
    """The first base case that the target answers, with its output; else None and the first reason."""
    reasons = []
    for base in BASES:
        try:
            return base, _output(binding, fn, base, device), ""
        except (Exception, SystemExit) as e:  # noqa: BLE001 (the target may raise anything; whether it should is for the fuzzer to judge)
            reasons.append(str(e) if isinstance(e, Malformed) else f"{type(e).__name__}: {e}")
    return BASES[0], None, reasons[0]


class Malformed(Exception):
    """A result that is not of the form that the dialect promises."""

    def __str__(self) -> str:
        return f"the result has the wrong form: {self.args[0]}"


def _output(binding: Binding, fn: Callable[..., Any], case: Case, device: str) -> Tensor:
    """The output; torch's global state is put back, so that the first case sees the target change it."""
    seed_generators(case.seed, device)
    inputs = build(case, device)
    result = Watched(lambda: answer(binding, fn, inputs), random=True)()
    if "o" not in result.outputs:
        raise Malformed(result.findings[0] if result.findings else "there is no o")
    return result.outputs["o"].clone()


def seed_generators(seed: int, device: str) -> None:
    """Seed the generators that a target on this device draws from. torch.manual_seed would queue a call for every absent backend."""
    unlikely = seed ^ UNLIKELY
    torch.default_generator.manual_seed(unlikely)
    if device != "cpu":
        torch.cuda.manual_seed_all(unlikely)


def _effect(binding: Binding, fn: Callable[..., Any], case: Case, plain: Tensor, device: str) -> str:
    try:
        changed = _output(binding, fn, case, device)
    except (Inexpressible, Malformed) as e:
        return f"not probed: {e}"
    except (Exception, SystemExit) as e:  # noqa: BLE001 (as above)
        return f"not probed: {type(e).__name__}: {e}"
    return IGNORED if torch.equal(bits(plain), bits(changed)) else "changes the answer"


def _said(change: dict[str, Any]) -> str:
    return ", ".join(f"{n}={v!r}" for n, v in change.items())
