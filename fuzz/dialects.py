"""Dialects: call a target in its own signature, and read output, log-sum-exp and gradients back as (B, H, L, D).

What no keyword of the target can say is passed as a dense mask, else the case is Inexpressible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..oracles.finding import Finding
from ..oracles.invariants import form_of_gradient, form_of_lse, form_of_output
from .added import as_bias, zero_of
from .binding import DIALECTS, Binding, expressible, recognise
from .case import Case
from .masks import Align, And, Causal, Full, Mask, Window
from .tensors import Inputs

__all__ = [
    "DIALECTS",
    "REFUSALS",
    "Answer",
    "Binding",
    "Inexpressible",
    "Refuse",
    "answer",
    "call",
    "expressible",
    "keywords",
    "recognise",
]


class Inexpressible(Exception):
    """The case needs something that the target's signature cannot say."""


class Refuse(Exception):
    """Raised by a target: it does not serve this case, by its structure."""


REFUSALS: tuple[type[Exception], ...] = (NotImplementedError, ValueError, Refuse)


def keywords(binding: Binding, inputs: Inputs) -> dict[str, Any]:
    """The keyword arguments that say a case; raises Inexpressible."""
    case = inputs.case
    if inputs.alibi is not None and not binding.name("alibi"):
        told = as_bias(inputs)
        if told is None:
            raise Inexpressible(
                "the target has no keyword for alibi (alibi_slopes), and no bias of its dtype says it exactly"
            )
        inputs = told
    out = _mask(binding, inputs)
    for keyword, value, idle in _plain(binding, inputs):
        name = binding.name(keyword)
        if not idle and not name:
            raise Inexpressible(
                f"the target has no keyword for {keyword} ({DIALECTS[binding.dialect].keywords[keyword][0]})"
            )
        if name and (not idle or name in binding.required):
            out[name] = value
    if binding.returns_lse:
        out[binding.name("lse")] = True
    elif case.lse_grad:
        raise Inexpressible("the target returns no lse to take a gradient through")
    return {**{n: None for n in binding.required if n not in out}, **out}


def _plain(binding: Binding, inputs: Inputs) -> Iterator[tuple[str, Any, bool]]:
    """(keyword, value, whether leaving it out says the same) for what is neither mask nor lse."""
    case = inputs.case
    yield "alibi", inputs.alibi, inputs.alibi is None
    yield "sinks", inputs.sinks, inputs.sinks is None
    yield "scale", case.resolved_scale if case.scale is None else case.scale, case.scale is None
    if case.softcap or "softcap" in DIALECTS[binding.dialect].keywords:
        yield "softcap", case.softcap, case.softcap == 0
    yield "dropout", case.dropout, case.dropout == 0
    if binding.dialect == "native" and binding.name("seed"):
        yield "seed", case.seed, case.dropout == 0
    if binding.dialect == "sdpa":
        yield "gqa", case.Hq != case.Hkv, case.Hq == case.Hkv


def _mask(binding: Binding, inputs: Inputs) -> dict[str, Any]:
    """The keywords that say which pairs are allowed and what is added to their scores."""
    if binding.dialect == "native":
        return _native_mask(binding, inputs)
    flags = _flags(binding, inputs.case) if inputs.bias is None else None
    if flags is not None:
        idle = {n: False for n in (binding.name("causal"),) if n in binding.required}
        return idle | flags
    name = binding.name("mask")
    if not name:
        raise Inexpressible(f"{binding.dialect} keywords of the target cannot say this mask and it takes no dense one")
    return {name: inputs.attn_mask()}


def _native_mask(binding: Binding, inputs: Inputs) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for keyword, value in (("mask", None if inputs.keep is None else inputs.case.mask), ("bias", inputs.bias)):
        if value is not None and not binding.name(keyword):
            raise Inexpressible(f"the target has no keyword for {keyword}")
        if value is not None:
            out[binding.name(keyword)] = value
    return out


def _flags(binding: Binding, case: Case) -> dict[str, Any] | None:
    """causal and window keywords that say the whole mask, or None when they cannot."""
    if case.mask_form != "flags" or case.bias:
        return None
    causal, window = _diagonals(case, DIALECTS[binding.dialect].align)
    if causal is None:
        return None
    out: dict[str, Any] = {}
    if causal and binding.name("causal"):
        out[binding.name("causal")] = True
    elif causal and window is None:
        window = Window(-1, 0)
    elif causal:
        return None
    if window is not None:
        if not binding.name("window"):
            return None
        out[binding.name("window")] = (window.left, window.right)
    return out


def _diagonals(case: Case, align: Align) -> tuple[bool | None, Window | None]:
    """(causal, window) when the mask is a conjunction of at most one of each, aligned as asked; causal None otherwise."""
    parts = [m for m in _conjuncts(case.mask) if m != Full()]
    square = case.Lq == case.Lk
    causal = [m for m in parts if isinstance(m, Causal) and (square or m.align == align)]
    window = [m for m in parts if isinstance(m, Window) and (square or m.align == align)]
    if len(causal) + len(window) < len(parts) or len(causal) > 1 or len(window) > 1:
        return None, None
    return bool(causal), window[0] if window else None


def _conjuncts(mask: Mask) -> Iterator[Mask]:
    if isinstance(mask, And):
        yield from _conjuncts(mask.first)
        yield from _conjuncts(mask.second)
    else:
        yield mask


@dataclass
class Answer:
    """What a call gave: outputs as (B, H, L, D), lse (B, Hq, Lq), and what was wrong with their form."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def call(binding: Binding, fn: Callable[..., Any], inputs: Inputs) -> dict[str, Tensor]:
    """Forward and backward in the target's own signature; outputs of the right form by name."""
    return answer(binding, fn, inputs).outputs


def answer(binding: Binding, fn: Callable[..., Any], inputs: Inputs, *, backward: bool = True) -> Answer:
    """`call`, with the findings about type, shape, dtype, device, aliasing and missing gradients."""
    case = inputs.case
    kwargs = keywords(binding, inputs)
    leaves = _leaves(binding, inputs, kwargs, case.requires_grad if backward else "")
    differentiate = any(x.requires_grad for x in leaves.values())
    with torch.set_grad_enabled(differentiate):
        returned = fn(leaves["q"], leaves["k"], leaves["v"], **kwargs)
    result = Answer()
    heads = _Heads(DIALECTS[binding.dialect].heads_inside)
    o, lse = _unpack(binding, returned, result.findings)
    result.findings += form_of_output(o, heads(inputs.do), inputs) + form_of_lse(lse, inputs)
    if result.findings:
        return result
    if o is not None:
        result.outputs["o"] = heads(o.detach())
    if lse is not None:
        result.outputs["lse"] = lse.detach()
    if differentiate and o is not None:
        _backward(result, leaves, heads, inputs, o, lse)
    return result


class _Heads:
    """Swaps heads and length where the dialect keeps heads inside; its own inverse."""

    def __init__(self, inside: bool) -> None:
        self.inside = inside

    def __call__(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2) if self.inside else x


def _leaves(binding: Binding, inputs: Inputs, kwargs: dict[str, Any], wanted: str) -> dict[str, Tensor]:
    """q, k, v and the additive mask as leaves on their own storages, in the dialect's layout; replaces the mask in kwargs."""
    heads = _Heads(DIALECTS[binding.dialect].heads_inside)
    leaves = {n: heads(getattr(inputs, n)).detach().requires_grad_(n in wanted) for n in "qkv"}
    name = binding.name("bias") if binding.dialect == "native" else binding.name("mask")
    if "b" in wanted and inputs.case.bias and isinstance(kwargs.get(name), Tensor):
        leaves["bias"] = kwargs[name] = kwargs[name].detach().requires_grad_()
    if "s" in wanted and inputs.sinks is not None:
        leaves["sinks"] = kwargs[binding.name("sinks")] = inputs.sinks.detach().requires_grad_()
    return leaves


def _unpack(binding: Binding, returned: Any, findings: list[Finding]) -> tuple[Tensor | None, Tensor | None]:
    """(o, lse) of what was returned, or findings about its type."""
    if not binding.returns_lse:
        pair, rule = (returned, None), "a Tensor"
    else:
        pair, rule = returned, "(out, lse) as return_lse asks"
    ok = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], Tensor)
    if ok and (not binding.returns_lse or isinstance(pair[1], Tensor)):
        return pair
    got = (
        f"({', '.join(type(x).__name__ for x in returned)})"
        if isinstance(returned, tuple | list)
        else type(returned).__name__
    )
    findings.append(Finding("type", "o", f"the target must return {rule}, got {got}"))
    return None, None


class _Seed(torch.autograd.Function):
    """A scalar whose gradients with respect to the given outputs are the given tensors themselves, layout included.

    autograd.grad with grad_outputs does the same, but imports sympy to compare shapes: most of a second in each new process.
    """

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *outputs: Tensor) -> Tensor:
        """Zero; remembers the gradients."""
        ctx.grads = grads
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        """The gradients of the outputs."""
        return None, *ctx.grads


def _backward(
    result: Answer, leaves: dict[str, Tensor], heads: _Heads, inputs: Inputs, o: Tensor, lse: Tensor | None
) -> None:
    """Add the gradients of the leaves that require one."""
    wanted = {n: x for n, x in leaves.items() if x.requires_grad}
    empty = not inputs.case.B * inputs.case.Lq * inputs.case.Lk
    if o.grad_fn is None and empty:  # a loop over no keys touches no input; nothing depends on any
        result.outputs |= {f"d{n}": zero_of(inputs, n, x, heads) for n, x in wanted.items()}
        return
    if o.grad_fn is None:
        result.findings.append(
            Finding("grad", "o", "has no grad_fn, so nothing can be differentiated; declare forward_only if meant")
        )
        return
    do = heads(inputs.do).to(o.dtype)  # another one than that of the inputs under autocast only
    ends, grads = [o], [do]
    if inputs.dlse is not None:
        if lse is None or lse.grad_fn is None:
            raise Inexpressible("the returned lse has no grad_fn")
        ends, grads = [o, lse], [do, inputs.dlse]
    seed: Tensor = _Seed.apply(grads, *ends)  # type: ignore[no-untyped-call]
    got = torch.autograd.grad(seed, list(wanted.values()), allow_unused=True)
    for (name, leaf), grad in zip(wanted.items(), got, strict=True):
        if grad is None and empty:
            result.outputs[f"d{name}"] = zero_of(inputs, name, leaf, heads)
            continue
        wrong = form_of_gradient(f"d{name}", grad, leaf)
        result.findings += wrong
        if grad is not None and not wrong:
            result.outputs[f"d{name}"] = grad if name in ("bias", "sinks") else heads(grad)
