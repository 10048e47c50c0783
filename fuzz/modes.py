"""Ways of calling a target beyond the plain one: under autocast, through torch.compile, after torch.library.opcheck."""

from __future__ import annotations

import contextlib
import io
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..impls.loading import is_operator
from ..oracles.finding import Finding
from .case import Case
from .region import Region
from .tensors import Inputs, autocast_dtype

Call = Callable[..., Any]

SHAPES_COMPILED = 8
"""torch.compile gives up on a function after so many recompilations and runs it plainly, so it is told to begin anew."""
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def entered(fn: Call, case: Case, device: str) -> Call:
    """The target as the case's mode calls it; itself in the plain mode."""
    if case.mode == "compile":
        return compiled(fn, case, device)
    dtype = autocast_dtype(case)
    if dtype is None:
        return fn

    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.partition(":")[0], dtype=dtype):
            return fn(*args, **kwargs)

    return under_autocast


def seen(inputs: Inputs, outputs: dict[str, Tensor]) -> Inputs:
    """The inputs as the computation saw them: rounded where autocast cast them, which the dtype of the output tells.

    A target that autocast does not reach answers in the dtype of its inputs, and is held to those. What autocast casts
    are q, k, v, and a bias or additive mask; the incoming gradient has the dtype of the output.
    """
    dtype, o = autocast_dtype(inputs.case), outputs.get("o")
    if dtype is None or o is None or o.dtype != dtype or inputs.q.dtype == dtype:
        return inputs
    bias = None if inputs.bias is None else inputs.bias.to(dtype)
    q, k, v, do = (t.to(dtype) for t in (inputs.q, inputs.k, inputs.v, inputs.do))
    return replace(inputs, q=q, k=k, v=v, do=do, bias=bias)


_COMPILED: dict[Call, Call] = {}
_SHAPES: set[str] = set()


def compiled(fn: Call, case: Case, device: str) -> Call:
    """The target through torch.compile, one graph for each shape; the same compiled function for every case."""
    _SHAPES.add(case.but(seed=0).key)
    if len(_SHAPES) > SHAPES_COMPILED:
        torch.compiler.reset()
        _COMPILED.clear()
        _SHAPES.clear()
    if fn not in _COMPILED:
        native = device != "cpu" or any(map(shutil.which, ("g++", "clang++")))
        backend = "inductor" if native else "aot_eager"  # Inductor writes C++ for a CPU
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch imports here is deprecated by torch itself
            _COMPILED[fn] = torch.compile(fn, backend=backend, dynamic=False)
    return _COMPILED[fn]


def checked_as_operator(fn: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Finding]:
    """Findings of torch.library.opcheck: schema, autograd registration, fake tensors, AOT dispatch."""
    with contextlib.redirect_stdout(io.StringIO()):
        results = torch.library.opcheck(fn, args, kwargs, test_utils=OPCHECKS, raise_exception=False)  # type: ignore[arg-type]
    return [
        Finding("opcheck", name.removeprefix("test_"), f"torch.library.opcheck: {_short(error)}")
        for name, error in results.items()
        if error != "SUCCESS"
    ]


def _short(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines)
    return text if len(text) <= 300 else f"{text[:300]}..."


class Captured(Exception):
    """Carries the arguments of a call that was not made."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__("captured")
        self.arguments, self.keywords = args, kwargs


def capture(*args: Any, **kwargs: Any) -> Any:
    """Stands in for a target; raises what it was called with."""
    raise Captured(args, kwargs)


def served_modes(fn: Call, region: Region) -> Region:
    """The region with opcheck for an operator, which is what it is for, unless the region names modes of its own."""
    return replace(region, modes=("opcheck",)) if is_operator(fn) and not region.modes else region


def unserved(fn: Call, case: Case) -> str:
    """Why the target cannot be called in the case's mode; empty when it can."""
    if case.mode == "opcheck" and not is_operator(fn):
        return "the target is no torch.library operator, so opcheck does not apply"
    return ""
