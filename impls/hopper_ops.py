"""What the Hopper kernels need beneath them: Gluon's names in Triton 3.6 to 3.9, and barriers between warpgroups.

A named barrier is one of 16 hardware barriers of a block, counted in threads. `arrive` does not wait and, unlike an arrival at an
mbarrier, which the compiler surrounds with waits of the whole warpgroup, costs one instruction. The compiler keeps numbers 0 and 1
and one for each further partition of `warp_specialize`; the kernels number theirs after those.
"""

import triton.experimental.gluon.language as gl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

__all__ = [
    "aggregate", "arrive", "async_add", "async_load", "async_store", "await_stores", "fence_async_shared", "free", "gl", "gluon",
    "matmul", "mbarrier", "meet", "meet_warps", "reserve", "settle",
]  # fmt: skip

NAMES = dir(tma)
async_load = tma.async_load if "async_load" in NAMES else tma.async_copy_global_to_shared
"""async_load(descriptor, coordinates, barrier, buffer): renamed after 3.6, where the old name now raises."""
async_store = tma.async_store if "async_store" in NAMES else tma.async_copy_shared_to_global
await_stores = tma.store_wait
meet_warps = gl.barrier if "barrier" in dir(gl) else gl.thread_barrier
"""meet_warps(): all warps of the caller's partition wait for one another."""
matmul, settle = warpgroup_mma, warpgroup_mma_wait


@builtin
def _reduce_add(descriptor, coordinates, buffer, _semantic=None):
    """Triton 3.6 binds the operation without a function for it."""
    at = _semantic._convert_to_ir_values(coordinates, require_i64=False)  # noqa: SLF001 (nothing public does it)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, at, buffer.handle)


async_add = tma.async_atomic_add if "async_atomic_add" in NAMES else _reduce_add
"""async_add(descriptor, coordinates, buffer): global memory += shared memory, by the copy engine."""


@gluon.constexpr_function
def _barrier(what, number, threads):
    return f"bar.{what} {number}, {threads}; mov.u32 $0, 0;"  # an inline assembly must have a result


@gluon.jit
def meet(NUMBER: gl.constexpr, THREADS: gl.constexpr):
    """Wait at a named barrier until THREADS threads, the callers among them, have met or arrived there."""
    gl.inline_asm_elementwise(_barrier("sync", NUMBER, THREADS), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive(NUMBER: gl.constexpr, THREADS: gl.constexpr):
    """Count the callers at a named barrier without waiting."""
    gl.inline_asm_elementwise(_barrier("arrive", NUMBER, THREADS), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def free(slot, FIRST: gl.constexpr, SLOTS: gl.constexpr, THREADS: gl.constexpr):
    """Say that the slot of a ring may be overwritten; its barrier is FIRST + slot.

    One branch for each slot: ptxas moves an arrival whose number is in a register down below the softmax.
    """
    for i in gl.static_range(SLOTS):
        if slot == i:
            arrive(FIRST + i, THREADS)


@gluon.jit
def reserve(slot, used, FIRST: gl.constexpr, SLOTS: gl.constexpr, THREADS: gl.constexpr):
    """Wait until the slot may be overwritten, which it may be at once if it was not used yet."""
    if used:
        for i in gl.static_range(SLOTS):
            if slot == i:
                meet(FIRST + i, THREADS)
