"""libdevice for interpreted kernels: the functions of `triton.language.extra.libdevice` that numpy has, too.

Triton's interpreter leaves them empty, so that `libdevice.tanh(x)` fails with "cannot convert None". The bodies of the empty functions
are replaced, so a kernel that imported one by name finds it too. Results are numpy's, within an ulp or two of the device's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interp
from triton.language.extra import libdevice

from .interpreter_patches import Patches
from .monitor_state import Array

Function = Callable[..., Array]


def _each(function: Callable[[float], float]) -> Function:
    return np.vectorize(function, otypes=[np.float64])


_FUNCTIONS: dict[str, Function] = {
    name: getattr(np, name)
    for name in (
        "floor ceil trunc exp2 sqrt rint isnan signbit copysign isinf nextafter sin cos tan log2 exp cosh sinh tanh "
        "log log10 log1p expm1 hypot cbrt fmod ldexp"
    ).split()
}
_FUNCTIONS |= {
    "abs": np.abs,
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "atanh": np.arctanh,
    "div_rn": np.divide,
    "erf": _each(math.erf),
    "erfc": _each(math.erfc),
    "exp10": lambda x: np.power(x.dtype.type(10), x),
    "fast_cosf": np.cos,
    "fast_dividef": np.divide,
    "fast_expf": np.exp,
    "fast_log10f": np.log10,
    "fast_log2f": np.log2,
    "fast_logf": np.log,
    "fast_powf": np.power,
    "fast_sinf": np.sin,
    "fast_tanf": np.tan,
    "fast_tanhf": np.tanh,
    "fdim": lambda x, y: np.where(np.isnan(x + y), x + y, np.maximum(x - y, 0)),
    "finitef": np.isfinite,
    "fma": lambda x, y, z: x * y + z,
    "isfinited": np.isfinite,
    "nearbyint": np.rint,
    "pow": np.power,
    "rcbrt": lambda x: 1 / np.cbrt(x),
    "rcp_rn": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "rsqrt_rn": lambda x: 1 / np.sqrt(x),
    "saturatef": lambda x: np.clip(np.where(np.isnan(x), 0, x), 0, 1),
    "sqrt_rn": np.sqrt,
}
_PREDICATES = frozenset({"isnan", "isinf", "signbit", "finitef", "isfinited"})


def apply(patches: Patches) -> None:
    """Give every empty function of libdevice a body: numpy's function, or an error that names it."""
    patches.set(libdevice, "_interpreted", _interpreted)
    for name, stub in list(vars(libdevice).items()):
        if callable(stub) and hasattr(stub, "__code__") and stub.__module__ == libdevice.__name__:
            patches.set(stub, "__code__", _trampoline(name))


def _trampoline(name: str) -> Any:
    source = f"def stub(*args): return _interpreted({name!r}, *args)"
    return next(c for c in compile(source, __file__, "exec").co_consts if hasattr(c, "co_code"))


def _interpreted(name: str, *args: Any) -> Any:
    function = _FUNCTIONS.get(name)
    if function is None:
        raise NotImplementedError(f"libdevice.{name} is not supported in interpreter mode")
    tensors = [interp.interpreter_semantic.to_tensor(a) for a in args]
    like = next((t for t in tensors if t.type.is_block()), tensors[0])
    if like.dtype not in (tl.float32, tl.float64):
        raise TypeError(f"libdevice.{name} takes float32 and float64, got {like.dtype}")
    data = function(*(t.handle.data for t in tensors))
    element = tl.int32 if name in _PREDICATES else like.dtype
    handle = interp.TensorHandle(np.asarray(data).astype(interp._get_np_dtype(element)), element)
    return tl.tensor(handle, like.type.with_element_ty(element))
