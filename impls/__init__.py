"""Implementations under test: what one is, those that come with flashproof, and how a target is loaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..fuzz.region import Region


@dataclass(frozen=True)
class Implementation:
    """A callable under test with what it declares about itself.

    `dialect` names the signature it follows ("" means: recognise it). `supports` None means: learn the region from refusals.
    `contract` is a preset name with optional changes, e.g. "ieee" or "torch-cpu-flash" or "hopper,ds_scaled=true";
    "" means the default for dtype and device. `devices` are the device types it runs on, `refuses` further exceptions that
    are refusals. `adapter` is what `flashproof.target` declared of a function with a signature of its own.
    """

    name: str
    call: Callable[..., Any]
    dialect: str = ""
    supports: Region | None = None
    contract: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")
    summary: str = ""
    triton: bool = False  # contains Triton kernels: on a CPU it needs the interpreter
    refuses: tuple[type[Exception], ...] = ()
    adapter: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the callable itself returns."""
        return self.call(*args, **kwargs)


MODULES = (
    "textbook",
    "blockwise",
    "packed_loop",
    "split_keys",
    "triton_flash",
    "hopper",
    "peers",
    "approximate",
    "planted",
)
"""Modules of this package that register implementations."""

REGISTRY: dict[str, Implementation] = {}


def register(**declared: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: add a callable to the registry under `name` (default: its own) with the fields of Implementation."""

    def add(call: Callable[..., Any]) -> Callable[..., Any]:
        name = declared.pop("name", call.__name__)
        summary = declared.pop("summary", (call.__doc__ or "").strip().partition("\n")[0])
        REGISTRY[name] = Implementation(name=name, call=call, summary=summary, **declared)
        return call

    return add


def load_registry() -> dict[str, Implementation]:
    """Import every module of MODULES; returns the registry."""
    for module in MODULES:
        importlib.import_module(f".{module}", __name__)
    return REGISTRY
