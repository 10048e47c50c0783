"""One structure of call that was recorded: its case, what its numbers were like, how often it came."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import called, measured
from .binding import DIALECTS
from .called import Call, Source
from .case import Case
from .recognised import layout_of
from .reduced import reduced
from .tensors import TORCH_DTYPES

Q_K_V = frozenset({0, 1, 2, "q", "k", "v", "query", "key", "value"})
_SCALARS = (int, float, str, bool, type(None))


def token(x: Any) -> Any:
    """What of an argument makes the structure of a call: of a tensor everything but its numbers."""
    if isinstance(x, Tensor):
        if x.is_nested:  # it has no shape
            return type(x), x.requires_grad
        return (type(x), x.layout, x.shape, x.stride(), x.dtype, x.requires_grad, x.device.type)
    if isinstance(x, _SCALARS):
        return x
    return x if isinstance(x, tuple) and all(isinstance(y, _SCALARS) for y in x) else type(x)


def family(source: Source, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Equal for calls that differ in lengths alone; told by shapes, without reading the call."""
    inside = source.packed or DIALECTS[source.binding.dialect].heads_inside
    heads = -2 if inside else -3

    def rough(n: object, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.is_nested:
            return n, token(x)
        sizes = (x.shape[:-3], x.shape[heads], x.shape[-1]) if n in Q_K_V and x.dim() >= 3 else ()
        return n, x.dtype, x.requires_grad, x.dim(), sizes

    return source.name, surroundings(), *(rough(n, x) for n, x in (*enumerate(args), *kwargs.items()))


def surroundings() -> Any:
    """What around a call makes its structure: gradients, autocast, a transform of torch.func."""
    cpu, gpu = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    cast = (torch.get_autocast_dtype("cuda" if gpu else "cpu"), cpu, gpu) if cpu or gpu else None
    return torch.is_grad_enabled(), cast, torch._C._functorch.peek_interpreter_stack() is not None  # noqa: SLF001 (no public way)


@contextmanager
def unseen() -> Iterator[None]:
    """Nothing that runs inside is recorded by autograd or seen by a mode of the caller's, such as a counter of operations."""
    from torch.utils._python_dispatch import _disable_current_modes

    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())  # noqa: SLF001 (torch.overrides has no public form of it)
        yield


@dataclass
class Recorded:
    """A call's structure. `measures` are vectors on the device, read when the file is written."""

    source: Source
    call: Call
    first: Case  # as it was before its gradient and its numbers were seen
    copies: dict[str, Tensor] = field(default_factory=dict)
    measures: dict[str, Tensor | None] = field(default_factory=dict)
    strides: dict[str, tuple[int, ...]] = field(default_factory=dict)
    count: int = 1
    calls: int = 1
    device: str = "cpu"
    room: int = 0  # bytes that may still be stored
    path: Path | None = None
    backward: bool = False
    finite: Tensor | None = None

    @classmethod
    def of(
        cls, source: Source, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, tensors: bool, max_bytes: int
    ) -> Recorded:
        """What is seen before the call; CannotExpressError."""
        grad = torch.is_grad_enabled()
        with unseen():
            call = called.read(source, args, kwargs, grad=grad)
            one = cls(source, call, call.case, device=call.tensors["q"].device.type, room=max_bytes)
            if call.keep is not None:
                one.keep({"keep": call.keep})
            if tensors:
                one.keep({**call.tensors, **one.bias()})
            for name, x in call.tensors.items():
                one.measures[name], one.strides[name] = measured.measure(x), x.stride()
        call.tensors, call.dense = {}, None  # the model's own tensors are not kept alive
        return one

    def bias(self) -> dict[str, Tensor]:
        """The additive values of the dense mask, 0 where nothing may be attended, if the case has a bias."""
        dense = self.call.dense
        return (
            {"bias": dense.masked_fill(dense == -torch.inf, 0.0)} if self.call.case.bias and dense is not None else {}
        )

    def keep(self, wanted: Mapping[str, Tensor]) -> None:
        """Copies of these tensors, if there is room for all of them."""
        size = sum(x.numel() * x.element_size() for x in wanted.values())
        if size > self.room:
            self.call.notes.append(f"{', '.join(wanted)} not stored: {size} bytes, {self.room} allowed (max_bytes)")
            return
        self.room -= size
        dtype = TORCH_DTYPES[self.call.case.dtype]
        for name, x in wanted.items():
            here = x.detach().to("cpu", torch.bool if name == "keep" else dtype)
            self.copies[name] = here.clone(memory_format=torch.contiguous_format)

    def answered(self, out: Any) -> None:
        """See what the call returned, and ask to see its gradient."""
        o = next((x for x in (out if isinstance(out, tuple | list) else (out,)) if isinstance(x, Tensor)), None)
        if o is None:
            return
        with unseen():
            self.finite = torch.isfinite(o.detach().sum(dtype=torch.float32)) if o.is_floating_point() else None
        if o.requires_grad and o.grad_fn is not None and self.first.requires_grad:
            o.register_hook(self._gradient)

    def _gradient(self, grad: Tensor) -> None:
        """Note the layout and the numbers of grad_output; returns nothing, so that autograd goes on with what it had."""
        if self.backward:
            return
        self.backward = True
        try:
            with unseen():
                four = called.four(self.source, grad.detach(), "do", [])
                self.strides["do"], self.measures["do"] = four.stride(), measured.measure(four)
                misaligned = four.data_ptr() % 16 != 0
                name, exact = layout_of(tuple(four.shape), four.stride(), misaligned=misaligned)  # type: ignore[arg-type]
                self.call.case = self.call.case.but(layout_do=name)
                if not exact:
                    self.call.notes.append(f"strides {four.stride()} of grad_output told as {name}")
                if "q" in self.copies:
                    self.keep({"do": four})
        except Exception as e:  # noqa: BLE001 (a backward pass must not end for what is only watched)
            self.call.notes.append(f"grad_output could not be looked at: {type(e).__name__}: {e}")

    @property
    def waits(self) -> bool:
        """Whether writing it now would wait for a device."""
        return self.device != "cpu"

    @property
    def by_contents(self) -> bool:
        """Whether the numbers in an argument, a mask or cu_seqlens, are part of the case."""
        return self.source.packed or bool(self.call.case.mask_form != "flags")

    @property
    def structure(self) -> Any:
        """Equal for calls that are recorded once."""
        bits = self.call.keep
        return self.source.name, self.first.key, None if bits is None else hash(bits.numpy().tobytes())

    def case(self) -> tuple[Case, Case]:
        """(the case as it was called, the one to judge); waits for the device."""
        whole = self.call.case
        of = self.statistics()
        dtype = TORCH_DTYPES[whole.dtype]
        masked = whole.mask.kind != "full" and self.finite is not None and bool(self.finite)
        data = measured.regime(of, whole.resolved_scale, dtype, masked)
        whole = whole.but(data=data, grad=measured.gradient(of.get("do", {})))
        return whole, reduced(whole)

    def statistics(self) -> dict[str, measured.Statistics]:
        """The numbers of every tensor by name; waits for the device."""
        return {n: measured.read(x) for n, x in self.measures.items()}
