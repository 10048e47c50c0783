"""What must hold of every run, whatever the values: form of the outputs, untouched inputs and torch state, equal bits on repetition."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..fuzz.tensors import Inputs, autocast_dtype
from .finding import Finding

INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def form_of_output(
    o: Tensor | None, like: Tensor, inputs: Inputs, given: Mapping[str, Tensor] | None = None
) -> list[Finding]:
    """Findings about shape, dtype, device and aliasing of the output; `like` has the form it must have.

    `given` are q, k and v as they were handed over, where that is not on the storages of the inputs.
    """
    if o is None:
        return []
    narrow = autocast_dtype(inputs.case)
    dtypes = (like.dtype,) if narrow in (None, like.dtype) else (like.dtype, narrow)
    return form_of("o", o, tuple(like.shape), dtypes, like.device) or _aliasing("o", o, inputs, given)


def form_of_lse(lse: Tensor | None, inputs: Inputs, shape: tuple[int, ...] | None = None) -> list[Finding]:
    """Findings about the log-sum-exp: (B, Hq, Lq), or the shape given, in float32; float64 inputs may give float64."""
    if lse is None:
        return []
    c = inputs.case
    dtypes = (torch.float32, torch.float64) if c.dtype == "float64" else (torch.float32,)
    return form_of("lse", lse, shape or (c.B, c.Hq, c.Lq), dtypes, inputs.q.device) or _aliasing("lse", lse, inputs)


def form_of_gradient(name: str, grad: Tensor | None, leaf: Tensor) -> list[Finding]:
    """Findings about one gradient: it must exist and have the form of what it is the gradient of."""
    if grad is None:
        return [Finding("grad", name, "is None though the input requires a gradient")]
    return form_of(name, grad, tuple(leaf.shape), (leaf.dtype,), leaf.device)


def form_of(
    name: str, x: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> list[Finding]:
    """Findings about the shape, dtype, device and kind of one tensor."""
    out = []
    if tuple(x.shape) != shape:
        out.append(Finding("shape", name, f"shape must be {shape}, got {tuple(x.shape)}"))
    if x.dtype not in dtypes:
        rule = " or ".join(_short(d) for d in dtypes)
        out.append(Finding("dtype", name, f"dtype must be {rule}, got {_short(x.dtype)}"))
    if x.device != device:
        out.append(Finding("device", name, f"device must be {device}, got {x.device}"))
    if x.layout != torch.strided:
        out.append(Finding("type", name, f"must be a dense tensor, got {x.layout}"))
    return out


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _aliasing(name: str, x: Tensor, inputs: Inputs, given: Mapping[str, Tensor] | None = None) -> list[Finding]:
    """A finding when an output lies in the storage of an input: writing to one would change the other."""
    if not x.numel():
        return []
    for other in ("q", "k", "v"):
        lies_in = getattr(inputs, other) if given is None else given[other]
        if x.untyped_storage().data_ptr() == lies_in.untyped_storage().data_ptr():
            return [Finding("alias", name, f"shares the storage of {other}: writing to one changes the other")]
    return []


def purity(inputs: Inputs) -> list[Finding]:
    """Findings for input tensors, or the guards around them, that the target changed."""
    return [
        Finding("guard" if "guard" in what else "purity", tensor, f"{what} at {list(index)}", index=tuple(index))
        for tensor, index, what in inputs.damage()
    ]


def same_bits(oracle: str, what: str, first: dict[str, Tensor], second: dict[str, Tensor]) -> list[Finding]:
    """One finding per tensor whose bits differ between two runs on the same inputs."""
    out = []
    for name in first.keys() & second.keys():
        differ = bits(first[name]) != bits(second[name])
        if bool(differ.any()):
            index = tuple(int(i) for i in differ.nonzero()[0])
            a, b = float(first[name][index]), float(second[name][index])
            message = f"{what}: {int(differ.sum())} of {differ.numel()} elements differ, first at {list(index)}: {a!r}, then {b!r}"
            out.append(Finding(oracle, name, message, index=index, got=b, want=a, error=abs(a - b), limit=0.0))
    return sorted(out, key=lambda f: f.tensor)


def bits(x: Tensor) -> Tensor:
    """The tensor's elements as integers of the same size: NaN equals itself, 0 differs from -0."""
    return x.detach().contiguous().view(INTEGER_OF_SIZE[x.element_size()])


def _seed_cuda() -> Any:
    return torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def _restore_cuda(state: Any) -> None:
    if state is not None:
        torch.cuda.set_rng_state(state)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


@dataclass(frozen=True)
class Setting:
    """A piece of global torch state that a target must leave as it was. Those of the call the harness itself sets around it."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    random: bool = False
    of_call: bool = False


SETTINGS = (
    Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting(
        "default device", torch.get_default_device, lambda d: torch.set_default_device(None if d.type == "cpu" else d)
    ),
    Setting("number of threads", torch.get_num_threads, torch.set_num_threads),
    Setting("grad mode", torch.is_grad_enabled, torch._C._set_grad_enabled, of_call=True),
    Setting("inference mode", torch.is_inference_mode_enabled, lambda on: None, of_call=True),
    Setting(
        "deterministic algorithms", _deterministic, lambda v: torch.use_deterministic_algorithms(v[0], warn_only=v[1])
    ),
    Setting("float32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    Setting("TF32 in cuDNN", torch._C._get_cudnn_allow_tf32, torch._C._set_cudnn_allow_tf32),
    Setting("anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    Setting("random number generator", torch.get_rng_state, torch.set_rng_state, random=True),
    Setting("CUDA random number generator", _seed_cuda, _restore_cuda, random=True),
)

OF_CALL = tuple(s for s in SETTINGS if s.of_call)
OF_PROCESS = tuple(s for s in SETTINGS if not s.of_call)


class Watched:
    """A callable that compares global torch state before and after the wrapped one, restores it and keeps the findings.

    `random` leaves out the generators, for a target that may draw from them.
    """

    def __init__(self, fn: Callable[..., Any], *, random: bool, settings: Iterable[Setting] = SETTINGS) -> None:
        self.fn = fn
        self.settings = tuple(s for s in settings if not (random and s.random))
        self.findings: list[Finding] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = [s.read() for s in self.settings]
        try:
            return self.fn(*args, **kwargs)
        finally:
            for setting, old in zip(self.settings, before, strict=True):
                self._compare(setting, old)

    def _compare(self, setting: Setting, old: Any) -> None:
        new = setting.read()
        if torch.equal(old, new) if isinstance(old, Tensor) else old == new:
            return
        setting.write(old)
        detail = "" if setting.random else f" from {old} to {new}"
        self.findings.append(
            Finding("global-state", setting.name, f"the target changed torch's {setting.name}{detail}")
        )
