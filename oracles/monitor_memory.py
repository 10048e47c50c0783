"""Global memory as an interpreted kernel sees it: every load, store and atomic goes through the monitor that is active.

Triton's interpreter reaches memory through four functions of its module attribute `_interpreter`; `Memory` takes its place. Loads and
stores index numpy views of the arguments' own storages, so that no address a kernel calculates is ever dereferenced: a stray store
cannot damage the process, monitored or not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .monitor import Access, Monitor
from .monitor_state import Array, numpy_dtype

_BFLOAT16 = numpy_dtype(torch.bfloat16)


class Memory:
    """Stands in for `triton.runtime.interpreter._interpreter`; everything but memory is the real module's."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.stack = [
            Monitor(races=False, uninitialised=False, remembers=False)
        ]  # the first is the guard outside `monitored()`

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    @property
    def monitor(self) -> Monitor:
        """The innermost active monitor."""
        return self.stack[-1]

    def load(self, addresses: Array, mask: Array, other: Array, dtype: Any) -> Array:
        """The values at the legal addresses; `other` in lanes that are masked off or illegal."""
        dtype, monitor = np.dtype(dtype), self.stack[-1]
        exact = monitor.exact and dtype.kind == "f"
        access = monitor.access(addresses, mask, 0 if exact else dtype.itemsize, "load")
        if access is not None and access.active is None:
            return self._source(access, dtype, exact)[access.elements]
        out = np.array(np.broadcast_to(other, addresses.shape), dtype)
        if access is not None:
            out[access.active] = self._source(access, dtype, exact)[access.elements]
        return out

    def _source(self, access: Access, dtype: np.dtype[Any], exact: bool) -> Array:
        shadow = access.window.shadow
        if exact and shadow.dtype.is_floating_point:
            return shadow.unrounded()
        return shadow.memory if exact or shadow.memory.dtype == dtype else shadow.memory.view(dtype)

    def store(self, addresses: Array, value: Array, mask: Array) -> None:
        """Write the legal lanes."""
        monitor = self.stack[-1]
        exact = monitor.exact and value.dtype.kind == "f"
        access = monitor.access(addresses, mask, 0 if exact else value.dtype.itemsize, "store")
        if access is None:
            return
        shadow, elements = access.window.shadow, access.elements
        lanes = np.broadcast_to(value, addresses.shape)
        if access.active is not None:
            lanes = lanes[access.active]
        if exact and shadow.dtype.is_floating_point:
            shadow.unrounded()[elements] = lanes
            shadow.memory[elements] = lanes.astype(shadow.memory.dtype)
            stored = shadow.unrounded()
        else:
            stored = shadow.memory if exact or shadow.memory.dtype == lanes.dtype else shadow.memory.view(lanes.dtype)
            stored[elements] = lanes
            shadow.forget(elements, "an integer store")
        if monitor.races:
            _check_lanes(monitor, access, stored[elements], lanes)

    def atomic_rmw(self, op: Any, addresses: Array, value: Array, mask: Array, sem: Any) -> Array:
        """Read, modify, write the legal lanes one after another; the old values."""
        monitor = self.stack[-1]
        exact = monitor.exact and value.dtype.kind == "f"
        access = monitor.access(addresses, mask, 0 if exact else value.dtype.itemsize, "atomic")
        value = np.ascontiguousarray(np.broadcast_to(value, addresses.shape))
        if access is None:
            return np.zeros(addresses.shape, value.dtype)
        if op == self.real.RMW_OP.XCHG or not access.window.tensor.is_floating_point():
            monitor.locking.add(monitor.launch.kernel)
        if exact or value.dtype == _BFLOAT16:
            return self._one_by_one(op, access, value, exact)
        pointers, active = _real(access, addresses.shape)
        old: Array = self.real.atomic_rmw(op, pointers, value, active, sem)
        access.window.shadow.forget(access.elements, "an integer atomic")
        return old

    def _one_by_one(self, op: Any, access: Access, value: Array, exact: bool) -> Array:
        """bfloat16 and unrounded float64, which the C++ side does not know."""
        shadow, real = access.window.shadow, self.real.RMW_OP
        if op not in (real.FADD, real.XCHG):
            raise NotImplementedError(f"atomic {op} on {shadow.dtype} is not supported by Triton's interpreter")
        target = shadow.unrounded() if exact else shadow.memory
        active = np.ones(value.shape, bool) if access.active is None else access.active
        old, lanes = np.zeros(value.shape, value.dtype), value[active]
        before = np.empty(lanes.shape, value.dtype)
        for lane, element in enumerate(access.elements.ravel()):
            before[lane] = target[element]
            target[element] = target[element] + lanes[lane] if op == real.FADD else lanes[lane]
        old[active] = before
        if exact:
            shadow.memory[access.elements] = target[access.elements].astype(shadow.memory.dtype)
        return old

    def atomic_cas(self, addresses: Array, expected: Array, value: Array, sem: Any) -> Array:
        """Compare and swap; the old values. Nothing happens when a lane is illegal."""
        monitor = self.stack[-1]
        access = monitor.access(addresses, np.ones(addresses.shape, bool), value.dtype.itemsize, "atomic")
        monitor.locking.add(monitor.launch.kernel)
        if access is None or access.active is not None:
            return expected
        pointers, _ = _real(access, addresses.shape)
        old: Array = self.real.atomic_cas(pointers, expected, value, sem)
        access.window.shadow.forget(access.elements, "an atomic compare and swap")
        return old


def _real(access: Access, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Real addresses of the legal lanes (0 elsewhere) and which lanes those are."""
    memory = access.window.shadow.memory
    addresses = np.uint64(memory.ctypes.data) + access.elements.astype(np.uint64) * np.uint64(memory.itemsize)
    if access.active is None:
        return np.ascontiguousarray(addresses.reshape(shape)), np.ones(shape, bool)
    pointers = np.zeros(shape, np.uint64)
    pointers[access.active] = addresses
    return pointers, np.ascontiguousarray(access.active)


def _check_lanes(monitor: Monitor, access: Access, stored: Array, lanes: Array) -> None:
    """Two lanes of one store that wrote different values to one element: which one stays is undefined."""
    differ = stored != lanes
    if differ.any():
        differ &= ~((stored != stored) & (lanes != lanes))
        monitor.flag("race-lanes", access.window, access.elements - access.window.offset, differ)
