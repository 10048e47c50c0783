"""The end of a standalone script: attention by definition in float64, and the comparison of the elements that were wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..oracles.finding import Finding
from .added import distances
from .case import Case
from .tensors import Inputs

TENSORS = ("o", "lse", "dq", "dk", "dv", "dbias", "dsinks")


@dataclass(frozen=True)
class Check:
    """One element that was wrong and the limit of its error; `want` is given where the plain definition cannot give it."""

    tensor: str
    index: tuple[int, ...]
    limit: float
    want: float | None = None


def attention(
    q: Tensor, k: Tensor, v: Tensor, inputs: Inputs, bias: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """o and lse as the script of the case defines them: what `definition` writes."""
    case, keep, dropout = inputs.case, inputs.keep, inputs.dropout_keep
    k, v = k.repeat_interleave(case.G, 1), v.repeat_interleave(case.G, 1)
    s = case.resolved_scale * (q @ k.mT)
    s = case.softcap * torch.tanh(s / case.softcap) if case.softcap else s
    s = s if bias is None else s + bias
    s = s if inputs.alibi is None else s + distances(inputs.alibi, case.Lq, case.Lk)
    s = s if keep is None else s.masked_fill(~keep, -torch.inf)
    s = s if sinks is None else torch.cat([s, sinks.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    p = s.softmax(-1).nan_to_num()[..., : case.Lk]
    return (p if dropout is None else p * dropout / (1 - case.dropout)) @ v, s.logsumexp(-1)


def definition(case: Case, keep: str, bias: str, dropout: str, alibi: str = "None") -> list[str]:
    """The lines of `attention` that the case needs; the last arguments are names of variables, or None."""
    more = "bias=None" if not case.sinks else "sinks" if bias == "None" else "bias, sinks"
    lines = [
        f"def attention(q, k, v, {more}):",
        '    """o and lse by definition; a row with no allowed key gives zeros and -inf."""',
    ]
    lines += [f"    k, v = k.repeat_interleave({case.G}, 1), v.repeat_interleave({case.G}, 1)"] if case.G > 1 else []
    lines.append(f"    s = {case.resolved_scale!r} * (q @ k.mT)")
    lines += [f"    s = {case.softcap!r} * torch.tanh(s / {case.softcap!r})"] if case.softcap else []
    lines += ["    s = s + bias"] if bias != "None" else []
    if alibi != "None":
        lines.append(f"    apart = torch.arange({case.Lq})[:, None] + {case.Lk - case.Lq} - torch.arange({case.Lk})")
        lines.append(f"    s = s - torch.atleast_2d({alibi}).double()[..., None, None] * apart.abs()")
    lines += [f"    s = s.masked_fill(~{keep}, -torch.inf)"] if keep != "None" else []
    lines += ["    s = torch.cat([s, sinks.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)"] if case.sinks else []
    lines.append("    p = s.softmax(-1).nan_to_num()" + "[..., :-1]" * bool(case.sinks))
    lines += [f"    p = p * {dropout} / {1 - case.dropout!r}"] if dropout != "None" else []
    return [*lines, "    return p @ v, s.logsumexp(-1)"]


def elements(finding: Finding) -> Iterator[Check]:
    """The wrong elements that a finding about values names, worst first; none for findings of other kinds."""
    if finding.tensor in TENSORS and finding.oracle in ("value", "nonfinite", "dead-row"):
        for row in finding.details.get("worst", []):
            yield Check(finding.tensor, tuple(row["index"]), float(row["limit"]), float(row["want"]))


def answers(inputs: Inputs, tensors: set[str]) -> dict[str, Tensor]:
    """What the script's own definition gives for a case."""
    given = {n: t for n in ("q", "k", "v", "bias", "sinks") if (t := getattr(inputs, n)) is not None}
    x = {n: t.double().requires_grad_() for n, t in given.items()}
    o, lse = attention(x["q"], x["k"], x["v"], inputs, x.get("bias"), x.get("sinks"))
    want = {"o": o.detach(), "lse": lse.detach()}
    if any(t.startswith("d") for t in tensors):
        dlse = torch.zeros_like(lse) if inputs.dlse is None else inputs.dlse.double()
        grads = torch.autograd.grad((o, lse), list(x.values()), (inputs.do.double(), dlse))
        want |= {f"d{n}": g for n, g in zip(x, grads, strict=True)}
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
