"""Calling an adapted target: tensors and values by name, buffers, a separate backward; what comes back as (B, H, L, D)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..impls import Implementation
from ..oracles.finding import Finding
from ..oracles.invariants import bits, form_of, form_of_gradient
from .adapter import FORWARD, LN2, SIZES, TENSORS, Adapter
from .arrangement import Arrangement
from .binding import Binding
from .case import Case
from .dialects import Answer, Inexpressible, Seed, recognise
from .region import Region
from .telling import Telling, rows_of_lse
from .tensors import TORCH_DTYPES, Inputs

LEAVES = ("q", "k", "v", "bias", "attn_mask", "sinks")
"""Names of a function's parameters that a gradient may be asked for."""
LETTERS = {"q": "q", "k": "k", "v": "v", "bias": "b", "attn_mask": "b", "sinks": "s"}
"""What requires_grad of a case calls them."""
SEED = 0
"""A factory may draw random numbers: from a generator in this state, put back afterwards."""


def bound(implementation: Implementation, dialect: str) -> Binding:
    """How an implementation is called: as it declares, else as its parameters tell. ValueError as `recognise`."""
    adapter: Adapter | None = implementation.adapter
    if adapter is None:
        return recognise(implementation.call, dialect or implementation.dialect)
    if dialect not in ("", "adapter"):
        raise ValueError(f"the callable is an adapted target, so its dialect must be adapter, got dialect={dialect!r}")
    known = tuple(n for n in adapter.takes if n in FORWARD and n not in ("q", "k", "v"))
    calls = Calls(adapter)
    return Binding("adapter", known, calls.telling.lacks(), "lse" in adapter.returns, known, calls)


@dataclass
class _Call:
    """One call of one case: what is handed over, how it is arranged, which gradients are wanted."""

    inputs: Inputs
    given: dict[str, Any]
    arrangement: Arrangement
    wanted: tuple[str, ...]  # parameters
    findings: list[Finding]

    @property
    def case(self) -> Case:
        return self.inputs.case


class Calls:
    """How one adapted target is called. Keeps what its factories made, as its user would."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.telling = Telling(adapter)
        self.made: dict[tuple[Any, ...], Any] = {}

    def expressible(self, region: Region) -> Region:
        """The region narrowed to what the function can be told."""
        return self.telling.expressible(region)

    def keywords(self, inputs: Inputs) -> dict[str, Any]:
        """What the function is given, by name; buffers are added at each call. Raises Inexpressible.

        Called once outside the guards: dense masks, packed tensors and what a factory makes are made here.
        """
        with contextlib.suppress(Exception):  # what a factory raises is raised in the call, as the target's own
            self._built(inputs)
        return self.telling.given(inputs)[0]

    def answer(self, fn: Callable[..., Any], inputs: Inputs, *, backward: bool = True) -> Answer:
        """Outputs and gradients as (B, H, L, D), lse as its natural logarithm (B, Hq, Lq), and findings about their form."""
        given, arrangement = self.telling.given(inputs)
        given |= self._built(inputs)
        call = _Call(inputs, given, arrangement, self.wanted(inputs, given, backward=backward), [])
        before = {n: x.clone() for n, x in given.items() if n.startswith("cu_seqlens")}
        answer = self._buffered(fn, call) if self.adapter.out else self._once(fn, call, {})
        answer.findings += [
            Finding("purity", n, "input changed") for n, x in before.items() if not torch.equal(given[n], x)
        ]
        return answer

    def wanted(self, inputs: Inputs, given: Mapping[str, Any], *, backward: bool) -> tuple[str, ...]:
        """The parameters that the case asks a gradient of."""
        letters = inputs.case.requires_grad if backward and not self.adapter.forward_only else ""
        asked = tuple(n for n in LEAVES if LETTERS[n] in letters and isinstance(given.get(n), Tensor))
        return tuple(n for n in asked if LETTERS[n] != "b" or inputs.case.bias)

    def shapes(self, inputs: Inputs) -> dict[str, tuple[int, ...]]:
        """The shape of the buffer of each declared output that the case has."""
        given, arrangement = self.telling.given(inputs)
        return {n: tuple(x.shape) for n, x in self._like(given, arrangement, inputs).items()}

    def _buffered(self, fn: Callable[..., Any], call: _Call) -> Answer:
        """Two calls with the same buffers: filled with NaN, then holding something else; the answer is that of the second."""
        buffers = self._buffers(call)
        for x in buffers.values():
            x.fill_(torch.nan)
        first = self._once(fn, call, buffers)
        first.outputs = {n: x.detach().clone() for n, x in first.outputs.items()}
        if first.findings:
            return first
        call.findings = []
        for x in buffers.values():
            x.copy_(1.0 - x.nan_to_num(2.0, 3.0, 4.0))
        second = self._once(fn, call, buffers)
        for name in first.outputs.keys() & second.outputs.keys():
            second.findings += _content_shows(
                name, first.outputs[name], second.outputs[name], name in self.adapter.loose
            )
        return second

    def _buffers(self, call: _Call) -> dict[str, Tensor]:
        """An empty tensor for each declared output that this call has."""
        like = self._like(call.given, call.arrangement, call.inputs)
        return {n: torch.empty_like(x, memory_format=torch.contiguous_format) for n, x in like.items()}

    def _like(self, given: Mapping[str, Any], arrangement: Arrangement, inputs: Inputs) -> dict[str, Tensor]:
        """Per declared output that is there, a tensor of its shape and dtype."""
        like = {f"d{n}": given.get(n) for n in ("q", "k", "v", "bias", "sinks")}
        like |= {"o": given["do"], "lse": arrangement.lse(rows_of_lse(inputs), self.adapter.lse_shape)}
        return {n: x for n in self.adapter.out if (x := like[n]) is not None}

    def _once(self, fn: Callable[..., Any], call: _Call, buffers: Mapping[str, Tensor]) -> Answer:
        result = Answer(findings=call.findings)
        separate = self.adapter.bwd is not None
        leaves = {n: x.detach() for n, x in call.given.items() if n in LEAVES and isinstance(x, Tensor)}
        for name in () if separate else call.wanted:
            leaves[name].requires_grad_()
        handed = call.given | leaves
        with torch.set_grad_enabled(bool(call.wanted) and not separate):
            named = self._named(
                self._forward(fn, handed, buffers), self.adapter.returns, buffers, result.findings, "the target"
            )
        o, lse = self._outputs(named, call, result)
        if result.findings or o is None or not call.wanted:
            return result
        if separate:
            self._separately(result, call, handed | named, buffers)
        else:
            self._by_autograd(result, call, leaves, o, lse)
        return result

    def _forward(self, fn: Callable[..., Any], handed: Mapping[str, Any], buffers: Mapping[str, Tensor]) -> Any:
        given = dict(handed) | {self.adapter.out[n]: x for n, x in buffers.items() if n in ("o", "lse")}
        values = {n: given[n] for n in self.adapter.takes}
        return fn(*values.values()) if self.adapter.positional else fn(**values)

    def _named(
        self, returned: Any, names: tuple[str, ...], buffers: Mapping[str, Tensor], findings: list[Finding], who: str
    ) -> dict[str, Any]:
        """What a function returned, by name; what lies in a buffer is taken from there. Empty with a finding if it is wrong."""
        held = {n: buffers[n] for n in names if n in buffers}
        rest = tuple(n for n in names if n not in held)
        if isinstance(returned, Mapping):
            found = dict(returned) | held
        elif isinstance(returned, tuple | list) or (isinstance(returned, Tensor) and len(rest) > 1):
            given = returned if isinstance(returned, tuple | list) else (returned,)
            returned = tuple(given)
            order = names if len(returned) == len(names) else rest
            found = dict(zip(order, returned, strict=False)) | held if len(returned) <= len(order) else {}
        else:
            found = ({rest[0]: returned} if len(rest) == 1 else {}) | held
        wrong = [n for n in names if not isinstance(found.get(n), Tensor)]
        unknown = [n for n in found if n not in names and n not in self.adapter.bwd_takes]
        if who == "bwd":  # a gradient that is not asked for may be None; one that is, is missed later
            wrong, unknown = [n for n in wrong if n not in found], [n for n in found if n not in names]
        if wrong:
            absent = f": {', '.join(wrong)} is missing" if len(wrong) < len(names) else ""
            message = f"{who} must return {', '.join(names)}, got {_shown(returned)}{absent}"
            findings.append(Finding("type", wrong[0], message))
        elif unknown:
            rule = f"declare it (returns, lse) or take it in bwd; declared are {', '.join(names)}"
            findings.append(Finding("type", unknown[0], f"{who} returned {unknown[0]}, which nothing declares: {rule}"))
        return {} if wrong or unknown else found

    def _outputs(self, named: Mapping[str, Any], call: _Call, result: Answer) -> tuple[Tensor | None, Tensor | None]:
        """(o, natural lse (B, Hq, Lq)); adds both to the result, or what is wrong with their form."""
        o, raw, a = named.get("o"), named.get("lse") if "lse" in self.adapter.returns else None, self.adapter
        if o is None:
            return None, None
        do, lse = call.given["do"], None
        result.findings += form_of("o", o, tuple(do.shape), (do.dtype,), do.device) or _aliases("o", o, call, named)
        if raw is not None:
            shape = call.arrangement.lse(rows_of_lse(call.inputs), a.lse_shape).shape
            dtypes = (torch.float32, torch.float64) if call.case.dtype == "float64" else (torch.float32,)
            result.findings += form_of("lse", raw, tuple(shape), dtypes, do.device) or _aliases("lse", raw, call, named)
        if result.findings:
            return None, None
        result.outputs["o"] = call.arrangement.back("do", o.detach())
        if raw is not None:
            lse = call.arrangement.natural(raw, a.lse_shape)
            lse = lse.double() * LN2 if a.lse == "log2" else lse
            result.outputs["lse"] = lse.detach()
        return o, lse

    def _by_autograd(
        self, result: Answer, call: _Call, leaves: Mapping[str, Tensor], o: Tensor, lse: Tensor | None
    ) -> None:
        case, wanted = call.case, {n: leaves[n] for n in call.wanted}
        empty = not case.B * case.Lq * case.Lk
        if o.grad_fn is None and not empty:
            rule = "declare forward_only=True if that is meant, or a backward function with bwd="
            result.findings.append(Finding("grad", "o", f"has no grad_fn, so nothing can be differentiated; {rule}"))
            return
        grads: tuple[Tensor | None, ...] = (None,) * len(wanted)
        if o.grad_fn is not None:
            ends, seeds = [o], [call.given["do"]]
            if call.inputs.dlse is not None:
                if lse is None or lse.grad_fn is None:
                    raise Inexpressible("the returned lse has no grad_fn")
                ends, seeds = [o, lse], [call.given["do"], call.inputs.dlse.to(lse.dtype)]
            seed: Tensor = Seed.apply(seeds, *ends)  # type: ignore[no-untyped-call]
            grads = torch.autograd.grad(seed, list(wanted.values()), allow_unused=True)
        for (name, leaf), grad in zip(wanted.items(), grads, strict=True):
            self._gradient(result, call, name, torch.zeros_like(leaf) if grad is None and empty else grad)

    def _separately(
        self, result: Answer, call: _Call, handed: Mapping[str, Any], buffers: Mapping[str, Tensor]
    ) -> None:
        a = self.adapter
        assert a.bwd is not None
        given = dict(handed) | {a.out[n]: x for n, x in buffers.items() if n not in ("o", "lse")}
        given.setdefault("dlse", None)
        missing = [n for n in a.bwd_takes if n not in given]
        if missing:
            message = f"bwd takes {missing[0]}, which is no name that it may take and which the target did not return"
            result.findings.append(Finding("type", missing[0], message))
            return
        with torch.no_grad():
            named = self._named(
                a.bwd(**{n: given[n] for n in a.bwd_takes}), a.bwd_returns, buffers, result.findings, "bwd"
            )
        for name in call.wanted if named else ():
            output = _gradient_of(name)
            if output not in a.bwd_returns:
                raise Inexpressible(f"bwd returns no {output}")
            grad = named[output]
            result.findings += _aliases(output, grad, call, {}) if isinstance(grad, Tensor) else []
            self._gradient(result, call, name, grad)

    def _gradient(self, result: Answer, call: _Call, name: str, grad: Any) -> None:
        """Add one gradient, or what is wrong with its form."""
        output = _gradient_of(name)
        wrong = form_of_gradient(output, grad, call.given[name])
        result.findings += wrong
        if not wrong:
            result.outputs[output] = call.arrangement.back(name, grad) if name in ("q", "k", "v") else grad

    def _built(self, inputs: Inputs) -> dict[str, Any]:
        """What the factories make: once for each set of sizes that they ask for, then the same again."""
        case, out = inputs.case, {}
        sizes = {n: getattr(case, n) for n in SIZES if n not in ("dtype", "device")}
        sizes |= {"dtype": TORCH_DTYPES[case.dtype], "device": inputs.device}
        for name, make in self.adapter.factory.items():
            asked = {n: sizes[n] for n in self.adapter.asked()[name]}
            key = (name, *asked.values())
            if key not in self.made:
                with _own_random_numbers(inputs.device):
                    self.made[key] = make(**asked)
            out[name] = self.made[key]
        return out


def _gradient_of(name: str) -> str:
    return "dbias" if name == "attn_mask" else f"d{name}"


def _aliases(name: str, x: Tensor, call: _Call, named: Mapping[str, Any]) -> list[Finding]:
    """A finding when an output lies in the storage of an input or of another output."""
    if not x.numel():
        return []
    others = {n: t for n, t in call.given.items() if n in (*TENSORS, "do", "dlse") and isinstance(t, Tensor)}
    others |= {n: t for n, t in named.items() if n in ("o", "lse") and n != name and isinstance(t, Tensor)}
    for other, tensor in others.items():
        if tensor.numel() and x.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            return [Finding("alias", name, f"shares the storage of {other}: writing to one changes the other")]
    return []


def _content_shows(name: str, first: Tensor, second: Tensor, loose: bool) -> list[Finding]:
    """A finding where what a buffer held before the call shows in the answer."""
    differ = first.isnan() != second.isnan() if loose else bits(first) != bits(second)
    if not bool(differ.any()):
        return []
    index = tuple(int(i) for i in differ.nonzero()[0])
    got, want = float(first[index]), float(second[index])
    message = (
        f"what its buffer held before shows at {list(index)}: {got!r} in one filled with NaN, {want!r} in a used one"
    )
    return [Finding("buffer", name, message, index=index)]


def _shown(returned: Any) -> str:
    """What a function returned, in a few words."""
    if isinstance(returned, Mapping):
        return f"a dict of {', '.join(map(str, returned)) or 'nothing'}"
    if isinstance(returned, tuple | list):
        return f"({', '.join(type(x).__name__ for x in returned)})"
    return type(returned).__name__


@contextlib.contextmanager
def _own_random_numbers(device: str) -> Iterator[None]:
    """Random numbers drawn inside come from a fixed seed, and the generators are left as they were."""
    cuda = torch.device(device) if device != "cpu" else None
    before, there = torch.get_rng_state(), torch.cuda.get_rng_state(cuda) if cuda else None
    torch.default_generator.manual_seed(SEED)
    try:
        yield
    finally:
        torch.set_rng_state(before)
        if there is not None:
            torch.cuda.set_rng_state(there, device)
