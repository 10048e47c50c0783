"""Slots in shared memory of the forward kernel of `hopper`, and how its producer tells the consumers which tile comes next."""

from .hopper_ops import aggregate, gl, gluon, mbarrier

TILE_SLOTS: gl.constexpr = gl.constexpr(3)
"""The producer is one tile ahead, and may publish the next before the slowest consumer has read the one that it is in."""


@aggregate
class Memory:
    """Slots in shared memory, and mbarriers that complete when one was filled, or, for Q, is free."""

    q: gl.shared_memory_descriptor  # slot CONSUMERS s + c is slot s of consumer c
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    tile: gl.shared_memory_descriptor
    q_free: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    tile_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, k, v, tile, q_free, q_full, k_full, v_full, tile_full):
        self.q, self.k, self.v, self.tile, self.q_free = q, k, v, tile, q_free
        self.q_full, self.k_full, self.v_full, self.tile_full = q_full, k_full, v_full, tile_full


@gluon.jit
def q_slot(taken, work, WHO: gl.constexpr):
    """The slot of Q, and then of O, of consumer WHO in the block's `taken`-th tile."""
    return taken % work.Q_SLOTS * work.CONSUMERS + WHO


@gluon.jit
def _read(memory, at):
    return gl.max(memory.tile.index(at).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def next_tile(taken, memory):
    """(i0, b, h, first and last + 1 key block) of the `taken`-th tile; i0 is -1 where there is none."""
    mbarrier.wait(memory.tile_full.index(taken % TILE_SLOTS), (taken // TILE_SLOTS) & 1)
    at = taken % TILE_SLOTS * 5
    return _read(memory, at), _read(memory, at + 1), _read(memory, at + 2), _read(memory, at + 3), _read(memory, at + 4)


@gluon.jit
def publish(number, taken, tiles, work, memory):
    """Tell the consumers the `taken`-th tile, and give it back, as `tile` of the work does; i0 is -1 if there is none."""
    i0, b, h, first, end = work.tile(gl.minimum(number, tiles - 1))
    i0 = gl.where(number < tiles, i0, -1)
    at = taken % TILE_SLOTS * 5
    _write(memory, at, i0)
    _write(memory, at + 1, b)
    _write(memory, at + 2, h)
    _write(memory, at + 3, first)
    _write(memory, at + 4, end)
    mbarrier.arrive(memory.tile_full.index(taken % TILE_SLOTS))
    return i0, b, h, first, end


@gluon.jit
def _write(memory, at, value):
    memory.tile.index(at).store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + value)
