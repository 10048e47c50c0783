"""The backward kernels of `hopper`: one that computes dk and dv of a key tile and adds to dq, and what comes before and after.

Scores are computed transposed, keys by queries, so that P^T and dS^T come out of the tensor cores in the registers where these
read a left operand: dV += P^T dO and dK += dS^T Q need no shared memory for them. Only dS goes there, for dQ = dS K, because
each consumer has the dS of its own 64 keys and computes a part of dQ for all 128. A warp of its own adds the parts to a float32
dQ in global memory by the copy engine. Tiles and the cast of dS are FlashAttention-3's (arXiv 2407.08608, section 3.3).

A step computes the scores of one query block together with dQ and dK of the block before it: no product is in flight where a
step ends, and the softmax runs beneath dK and dP.
"""

import triton
import triton.language as tl

from .hopper_ops import (
    aggregate, arrive, async_add, async_load, async_store, await_stores, fence_async_shared, free, gl, gluon, matmul, mbarrier, meet,
    reserve, settle,
)  # fmt: skip

KEYS: gl.constexpr = gl.constexpr(64)
"""Keys of a consumer; a tile has two."""
LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)
Q_SLOTS: gl.constexpr = gl.constexpr(3)
"""dK of one block is computed beside the scores of the next, while the one after is loaded."""
DO_SLOTS: gl.constexpr = gl.constexpr(2)

# Named barriers; those up to 4 belong to the compiler. DQ_FULL and DQ_FREE are one for each consumer.
DS_THERE: gl.constexpr = gl.constexpr(5)
DQ_FULL: gl.constexpr = gl.constexpr(6)
DQ_FREE: gl.constexpr = gl.constexpr(8)
DO_FREE: gl.constexpr = gl.constexpr(10)
Q_FREE: gl.constexpr = gl.constexpr(12)
CONSUMERS_AND_ONE: gl.constexpr = gl.constexpr(288)


@aggregate
class Problem:
    """Sizes, the band low <= j - i <= high, and how the work is cut: BM queries in a step."""

    scale: gl.tensor
    kv_heads: gl.tensor
    group: gl.tensor
    q_len: gl.tensor
    k_len: gl.tensor
    low: gl.tensor
    high: gl.tensor
    batch_heads: gl.tensor  # of keys
    section: gl.tensor  # heads whose tiles are taken longest first, together
    D: gl.constexpr
    BM: gl.constexpr
    HAS_LOW: gl.constexpr
    HAS_HIGH: gl.constexpr
    DQ_ROWS: gl.constexpr  # of a consumer's part of dQ: half of the queries where there are 128, else half of the columns
    DQ_COLUMNS: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, scale, kv_heads, group, q_len, k_len, low, high, batch_heads, section, D, BM, HAS_LOW, HAS_HIGH,
    ):  # fmt: skip
        self.scale, self.kv_heads, self.group, self.q_len, self.k_len = scale, kv_heads, group, q_len, k_len
        self.low, self.high, self.batch_heads, self.section = low, high, batch_heads, section
        self.D, self.BM = gl.constexpr(D), gl.constexpr(BM)
        self.HAS_LOW, self.HAS_HIGH = gl.constexpr(HAS_LOW), gl.constexpr(HAS_HIGH)
        self.DQ_ROWS = gl.constexpr(64)
        self.DQ_COLUMNS = gl.constexpr(D if BM == 128 else D // 2)

    @gluon.jit
    def tile(self):
        """(first key, b, key head, first and last + 1 query block) of this program: at least one block, even if masked."""
        n_j = gl.cdiv(self.k_len, 2 * KEYS)
        number = gl.program_id(0)
        section = number // (self.section * n_j)
        left = gl.minimum(self.section, self.batch_heads - section * self.section)
        at = number - section * self.section * n_j
        bh = section * self.section + at % left
        j0 = at // left * 2 * KEYS
        first = 0
        end = gl.cdiv(self.q_len, self.BM)
        if self.HAS_HIGH:
            first = gl.minimum(gl.maximum(j0 - self.high, 0) // self.BM, end - 1)
        if self.HAS_LOW:
            end = gl.maximum(gl.minimum(end, gl.cdiv(j0 + 2 * KEYS - self.low, self.BM)), first + 1)
        return j0, bh // self.kv_heads, bh % self.kv_heads, first, end

    @gluon.jit
    def first_whole(self, j0, first, end):
        """The first query block whose every pair with the tile's keys is allowed; all before it are masked."""
        whole = first
        if self.HAS_HIGH:
            whole = gl.maximum(gl.cdiv(gl.maximum(j0 + 2 * KEYS - 1 - self.high, 0), self.BM), first)
        if j0 + 2 * KEYS > self.k_len or self.HAS_LOW:
            whole = end
        return gl.minimum(whole, end)


@aggregate
class Memory:
    """Slots in shared memory; mbarriers that complete when a slot was filled."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor  # slot 2 s + c: transposed, of consumer c
    dq: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor  # as Q's slots
    delta: gl.shared_memory_descriptor  # as dO's
    kv_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, k, v, q, do, ds, dq, lse, delta, kv_full, q_full, do_full):
        self.k, self.v, self.q, self.do, self.ds, self.dq = k, v, q, do, ds, dq
        self.lse, self.delta, self.kv_full, self.q_full, self.do_full = lse, delta, kv_full, q_full, do_full


@gluon.constexpr_function
def _accumulator(columns):
    """The layout of a (64, columns) result of one warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def _operand(columns):
    return gl.DotOperandLayout(0, _accumulator(columns), 2)


@gluon.jit
def _scores(count, problem, memory, WHO: gl.constexpr):
    """K Q^T (64, BM) of the Q that `count` leads to, as issued once it is there."""
    slot = count % Q_SLOTS
    mbarrier.wait(memory.q_full.index(slot), (count // Q_SLOTS) & 1)
    k = memory.k.index(WHO).reshape([KEYS, problem.D])
    q = memory.q.index(slot).reshape([problem.BM, problem.D])
    zero = gl.zeros([KEYS, problem.BM], gl.float32, _accumulator(problem.BM))
    return matmul(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _dp(count, problem, memory, WHO: gl.constexpr):
    """V dO^T (64, BM), as issued once dO is there."""
    slot = count % DO_SLOTS
    mbarrier.wait(memory.do_full.index(slot), (count // DO_SLOTS) & 1)
    v = memory.v.index(WHO).reshape([KEYS, problem.D])
    do = memory.do.index(slot).reshape([problem.BM, problem.D])
    zero = gl.zeros([KEYS, problem.BM], gl.float32, _accumulator(problem.BM))
    return matmul(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _dq(count, problem, memory, WHO: gl.constexpr):
    """This consumer's part of dS K, as issued."""
    ROWS: gl.constexpr = problem.DQ_ROWS
    COLUMNS: gl.constexpr = problem.DQ_COLUMNS
    part = gl.zeros([ROWS, COLUMNS], gl.float32, _accumulator(COLUMNS))
    for half in gl.static_range(2):
        ds = memory.ds.index(count % 2 * 2 + half)
        k = memory.k.index(half).reshape([KEYS, problem.D])
        if problem.BM == 128:
            ds = ds.slice(WHO * ROWS, ROWS, dim=1)
        else:
            k = k.slice(WHO * COLUMNS, COLUMNS, dim=1)
        part = matmul(ds.permute((1, 0)), k, part, use_acc=half > 0, is_async=True)
    return part


@gluon.jit
def _probabilities(s, count, block, j, problem, memory, MASKED: gl.constexpr):
    """P^T from the scores K Q^T (64, BM), unscaled."""
    S: gl.constexpr = _accumulator(problem.BM)
    lse = memory.lse.index(count % Q_SLOTS).reshape([problem.BM]).load(gl.SliceLayout(0, S))
    p = gl.exp2(s * (problem.scale * LOG2_E) - lse[None, :])
    if MASKED:
        i = (block * problem.BM + gl.arange(0, problem.BM, gl.SliceLayout(0, S)))[None, :]
        keep = (j < problem.k_len)[:, None]
        if problem.HAS_HIGH:
            keep = keep & (i >= (j - problem.high)[:, None])
        if problem.HAS_LOW:
            keep = keep & (i <= (j - problem.low)[:, None])
        p = gl.where(keep, p, 0.0)
    return p


@gluon.jit
def _softmax(s, dp, count, block, j, dv, problem, memory, WHO: gl.constexpr, MASKED: gl.constexpr):
    """(dS^T as an operand, dV): from scores and dP as issued, P^T, then dV beneath dS, which is also left in shared memory."""
    s = settle(1, [s])
    p = _probabilities(s, count, block, j, problem, memory, MASKED)
    do = memory.do.index(count % DO_SLOTS).reshape([problem.BM, problem.D])
    dv = matmul(gl.convert_layout(p.to(memory.q.dtype), _operand(problem.D)), do, dv, is_async=True)
    delta = memory.delta.index(count % DO_SLOTS).reshape([problem.BM]).load(gl.SliceLayout(0, _accumulator(problem.BM)))
    dp = settle(1, [dp])
    ds = (p * (dp - delta[None, :])).to(memory.q.dtype)
    memory.ds.index(count % 2 * 2 + WHO).store(ds)
    fence_async_shared()
    dv = settle(0, [dv])
    free(count % DO_SLOTS, DO_FREE, DO_SLOTS, CONSUMERS_AND_ONE)
    meet(DS_THERE, 256)
    return gl.convert_layout(ds, _operand(problem.D)), dv


@gluon.jit
def _dk(ds, count, dk, problem, memory):
    """dK + dS^T Q, as issued."""
    return matmul(ds, memory.q.index(count % Q_SLOTS).reshape([problem.BM, problem.D]), dk, is_async=True)


@gluon.jit
def _hand_over(dq, problem, memory, WHO: gl.constexpr):
    """Leave a part of dQ for the warp that adds it to global memory."""
    meet(DQ_FREE + WHO, 160)
    memory.dq.index(WHO).reshape([problem.DQ_ROWS, problem.DQ_COLUMNS]).store(dq)
    fence_async_shared()
    arrive(DQ_FULL + WHO, 160)


@gluon.jit
def _step(count, block, ds, dk, dv, j, problem, memory, WHO: gl.constexpr, MASKED: gl.constexpr):
    """Query block `block`, the count-th, up to its dS and dV; dQ and dK of the one before, whose dS is given."""
    dq = _dq(count - 1, problem, memory, WHO)
    s = _scores(count, problem, memory, WHO)
    dk = _dk(ds, count - 1, dk, problem, memory)
    dq = settle(2, [dq])
    _hand_over(dq, problem, memory, WHO)
    dp = _dp(count, problem, memory, WHO)
    dk = settle(1, [dk])
    free((count - 1) % Q_SLOTS, Q_FREE, Q_SLOTS, CONSUMERS_AND_ONE)
    ds, dv = _softmax(s, dp, count, block, j, dv, problem, memory, WHO, MASKED)
    return ds, dk, dv
