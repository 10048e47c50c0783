"""A GPU of a given architecture pretended on a machine that has none, so that a target compiles what it would compile there.

In the process that calls `pretend`, every tensor says that it is on cuda:0 while it lies in memory, and Triton has a driver that
names the architecture, compiles as always, and launches nothing. Outputs are whatever was in memory: only what is compiled counts.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .execute import Execution, Runner

ARCHITECTURES = {
    "sm_80": (8, 0), "sm_86": (8, 6), "sm_89": (8, 9), "sm_90": (9, 0), "sm_100": (10, 0), "sm_120": (12, 0),
}  # fmt: skip
"""Names as NVIDIA writes them, and compute capabilities."""
SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""Bytes that one block may ask for, from the CUDA programming guide (compute capabilities, opt-in maximum)."""
MULTIPROCESSORS = {80: 108, 86: 84, 89: 128, 90: 132, 100: 148, 120: 170}
"""Of the largest part of each: kernels that ask size their grid by it, not their code."""


def capability(arch: str) -> tuple[int, int]:
    """The compute capability that an architecture's name says; ValueError lists the known names."""
    if arch not in ARCHITECTURES:
        raise ValueError(f"architecture must be one of {', '.join(ARCHITECTURES)}, got {arch!r}")
    return ARCHITECTURES[arch]


def pretend(arch: str) -> None:
    """From now on this process has one CUDA device of the architecture, for torch's Python side and for Triton."""
    major, minor = capability(arch)
    _pretend_torch(major, minor)
    _pretend_triton(10 * major + minor)


class OfflineRunner(Runner):
    """Runs cases for what they compile, on the pretended device. Raises what Runner raises."""

    def __init__(self, target: Any, arch: str, **options: Any) -> None:
        pretend(arch)
        super().__init__(target, **options)

    @contextlib.contextmanager
    def _guards(self, _: Execution, mode: str = "") -> Iterator[dict[str, Tensor]]:  # noqa: ARG002 (as Runner)
        """None: nothing is written, and torch would be asked for memory of the device beneath the pretence."""
        yield {}


class _OnTheCpu(TorchFunctionMode):
    """Calls that name a CUDA device are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        return func(*map(_cpu, args), **{n: _cpu(v) for n, v in (kwargs or {}).items()})


def _cpu(value: Any) -> Any:
    named = isinstance(value, torch.device) or (isinstance(value, str) and re.fullmatch(r"cuda(:\d+)?", value))
    return torch.device("cpu") if named and torch.device(value).type == "cuda" else value


def _pretend_torch(major: int, minor: int) -> None:
    number = 10 * major + minor
    properties = SimpleNamespace(
        name=f"pretended sm_{number}", major=major, minor=minor, warp_size=32, total_memory=1 << 36,
        multi_processor_count=MULTIPROCESSORS[number], shared_memory_per_block_optin=SHARED_MEMORY[number],
        max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, L2_cache_size=50 << 20,
    )  # fmt: skip
    answers: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0, "_lazy_init": None,
        "get_device_capability": (major, minor), "get_device_properties": properties, "get_device_name": properties.name,
        "synchronize": None, "set_device": None, "manual_seed": None, "manual_seed_all": None, "empty_cache": None,
        "_exchange_device": 0, "_maybe_exchange_device": 0, "is_bf16_supported": True, "memory_allocated": 0,
        "current_stream": SimpleNamespace(cuda_stream=0, synchronize=lambda: None), "is_current_stream_capturing": False,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, _constant(answer))
    torch.cuda.device = torch.cuda.device_of = lambda *_: contextlib.nullcontext()  # type: ignore[assignment,misc]
    here = torch.device("cuda", 0)
    for name, value in (("is_cuda", True), ("is_cpu", False), ("device", here)):
        setattr(Tensor, name, property(_constant(value)))
    Tensor.get_device = _constant(0)  # type: ignore[method-assign]
    _OnTheCpu().__enter__()  # type: ignore[no-untyped-call]


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _pretend_triton(number: int) -> None:
    """A driver that names the target and whose kernels do nothing."""
    try:
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver
    except ImportError:  # a target without Triton
        return
    properties = {
        "max_shared_mem": SHARED_MEMORY[number], "multiprocessor_count": MULTIPROCESSORS[number], "warpSize": 32,
        "max_num_regs": 65536, "sm_clock_rate": 1, "mem_clock_rate": 1, "mem_bus_width": 1,
    }  # fmt: skip
    utils = SimpleNamespace(
        load_binary=_constant((0, 0, 0, 0, 1024)),  # module, function, registers, spills, threads
        unload_module=_constant(None),
        get_device_properties=_constant(properties),
        fill_tma_descriptor=_constant(0),
    )
    driver.set_active(SimpleNamespace(
        utils=utils,
        launcher_cls=_constant(_constant(None)),
        get_current_target=_constant(GPUTarget("cuda", number, 32)),
        get_current_device=_constant(0),
        set_current_device=_constant(None),
        get_current_stream=_constant(0),
        get_device_interface=_constant(torch.cuda),
        get_device_capability=_constant(divmod(number, 10)),
        get_active_torch_device=_constant(torch.device("cuda", 0)),
        get_benchmarker=_constant(_run_once),
        get_empty_cache_for_benchmark=lambda: torch.empty(0),
        clear_cache=_constant(None),
        assemble_tensormap_to_arg=lambda _, args: args,
        map_python_to_cpp_type=_constant("void*"),
        is_active=_constant(True),
    ))  # fmt: skip


def _run_once(call: Callable[[], Any], **_: Any) -> list[float]:
    """How Triton's tuner times a configuration: here it is compiled and all take equally long."""
    call()
    return [1.0, 1.0, 1.0]
