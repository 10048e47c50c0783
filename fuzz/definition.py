"""The end of a standalone script: attention by definition in float64, and the comparison of the elements that were wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..oracles.finding import Finding
from .case import Case
from .tensors import Inputs

TENSORS = ("o", "lse", "dq", "dk", "dv", "dbias")


@dataclass(frozen=True)
class Check:
    """One element that was wrong and the limit of its error; `want` is given where the plain definition cannot give it."""

    tensor: str
    index: tuple[int, ...]
    limit: float
    want: float | None = None


def attention(
    q: Tensor, k: Tensor, v: Tensor, case: Case, keep: Tensor | None, bias: Tensor | None, dropout: Tensor | None
) -> tuple[Tensor, Tensor]:
    """o and lse as the script of the case defines them: what `definition` writes."""
    k, v = k.repeat_interleave(case.G, 1), v.repeat_interleave(case.G, 1)
    s = case.resolved_scale * (q @ k.mT)
    s = case.softcap * torch.tanh(s / case.softcap) if case.softcap else s
    s = s if bias is None else s + bias
    s = s if keep is None else s.masked_fill(~keep, -torch.inf)
    p = s.softmax(-1).nan_to_num()
    return (p if dropout is None else p * dropout / (1 - case.dropout)) @ v, s.logsumexp(-1)


def definition(case: Case, keep: str, bias: str, dropout: str) -> list[str]:
    """The lines of `attention` that the case needs; the last arguments are names of variables, or None."""
    lines = [
        "def attention(q, k, v, bias=None):",
        '    """o and lse by definition; a row with no allowed key gives zeros and -inf."""',
    ]
    lines += [f"    k, v = k.repeat_interleave({case.G}, 1), v.repeat_interleave({case.G}, 1)"] if case.G > 1 else []
    lines.append(f"    s = {case.resolved_scale!r} * (q @ k.mT)")
    lines += [f"    s = {case.softcap!r} * torch.tanh(s / {case.softcap!r})"] if case.softcap else []
    lines += ["    s = s + bias"] if bias != "None" else []
    lines += [f"    s = s.masked_fill(~{keep}, -torch.inf)"] if keep != "None" else []
    lines.append("    p = s.softmax(-1).nan_to_num()")
    lines += [f"    p = p * {dropout} / {1 - case.dropout!r}"] if dropout != "None" else []
    return [*lines, "    return p @ v, s.logsumexp(-1)"]


def elements(finding: Finding) -> Iterator[Check]:
    """The wrong elements that a finding about values names, worst first; none for findings of other kinds."""
    if finding.tensor in TENSORS and finding.oracle in ("value", "nonfinite", "dead-row"):
        for row in finding.details.get("worst", []):
            yield Check(finding.tensor, tuple(row["index"]), float(row["limit"]), float(row["want"]))


def answers(inputs: Inputs, tensors: set[str]) -> dict[str, Tensor]:
    """What the script's own definition gives for a case."""
    x = [
        t.double().requires_grad_()
        for t in (inputs.q, inputs.k, inputs.v, *([] if inputs.bias is None else [inputs.bias]))
    ]
    q, k, v, *bias = x
    o, lse = attention(q, k, v, inputs.case, inputs.keep, bias[0] if bias else None, inputs.dropout_keep)
    want = {"o": o.detach(), "lse": lse.detach()}
    if any(t.startswith("d") for t in tensors):
        dlse = torch.zeros_like(lse) if inputs.dlse is None else inputs.dlse.double()
        want |= zip(
            ("dq", "dk", "dv", "dbias"), torch.autograd.grad((o, lse), x, (inputs.do.double(), dlse)), strict=False
        )
    return want


def agrees(plain: dict[str, Tensor], check: Check) -> bool:
    """Whether the plain definition gives the oracle's answer, to far less than the limit."""
    value = float(plain[check.tensor][check.index]) if check.tensor in plain else math.nan
    want = math.nan if check.want is None else check.want
    return value == want or abs(value - want) <= 1e-3 * check.limit + 1e-12 * abs(want)


def comparison(checks: list[Check]) -> list[str]:
    """Lines that compare the wrong elements, print them and exit."""
    return [
        "wrong = 0  # below: tensor, element, limit of its error for the arithmetic promised, the right answer",
        "for name, at, limit, right in [",
        *(f'    ("{c.tensor}", {c.index}, {c.limit:.9g}, {_want(c)}),' for c in checks),
        "]:",
        "    value = got[name][at].item()",
        "    ok = value == right or abs(value - right) <= limit or (value != value and right != right)",
        "    print(f\"{name}{list(at)}: got {value:.9g}, want {right:.9g}, limit {limit:.3g}: {'ok' if ok else 'WRONG'}\")",
        "    wrong += not ok",
        "sys.exit(1 if wrong else 0)",
    ]


def _want(check: Check) -> str:
    if check.want is None:
        return f'want["{check.tensor}"]{list(check.index)}.item()'
    return repr(check.want) if math.isfinite(check.want) else f'float("{check.want}")'
