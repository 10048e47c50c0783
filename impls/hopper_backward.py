"""The backward kernels of `hopper`: one that computes dk and dv of a key tile and adds to dq, and what comes before and after.

Scores are computed transposed, keys by queries, so that P^T and dS^T come out of the tensor cores in the registers where these
read a left operand: dV += P^T dO and dK += dS^T Q need no shared memory for them. Only dS goes there, for dQ = dS K, because
each consumer has the dS of its own 64 keys and computes a part of dQ for all 128. A warp of its own adds the parts to a float32
dQ in global memory by the copy engine. Tiles and the cast of dS are FlashAttention-3's (arXiv 2407.08608, section 3.3).

A step computes the scores of one query block together with dQ and dK of the block before it, so that dV covers the meeting of the
consumers at dS, and the softmax runs beneath dP.
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
def _finish(s, dp, count, block, dv, j, problem, memory, WHO: gl.constexpr, MASKED: gl.constexpr):
    """(dS^T as an operand, dV) of a block whose scores are done and whose dP is issued. dS is left in shared memory too.

    dV is issued after dS was computed: beneath an unfinished dV, ptxas 12.8 (Triton 3.6) dies of the arithmetic of dS.
    """
    p = _probabilities(s, count, block, j, problem, memory, MASKED)
    operand = gl.convert_layout(p.to(memory.q.dtype), _operand(problem.D))
    delta = memory.delta.index(count % DO_SLOTS).reshape([problem.BM]).load(gl.SliceLayout(0, _accumulator(problem.BM)))
    dp = settle(0, [dp])
    ds = (p * (dp - delta[None, :])).to(memory.q.dtype)
    memory.ds.index(count % 2 * 2 + WHO).store(ds)
    fence_async_shared()
    do = memory.do.index(count % DO_SLOTS).reshape([problem.BM, problem.D])
    dv = matmul(operand, do, dv, is_async=True)
    meet(DS_THERE, 256)
    dv = settle(0, [dv])
    free(count % DO_SLOTS, DO_FREE, DO_SLOTS, CONSUMERS_AND_ONE)
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
    dk = _dk(ds, count - 1, dk, problem, memory)
    s = _scores(count, problem, memory, WHO)
    dq = settle(2, [dq])
    _hand_over(dq, problem, memory, WHO)
    dp = _dp(count, problem, memory, WHO)
    dk, s = settle(1, [dk, s])
    free((count - 1) % Q_SLOTS, Q_FREE, Q_SLOTS, CONSUMERS_AND_ONE)
    ds, dv = _finish(s, dp, count, block, dv, j, problem, memory, WHO, MASKED)
    return ds, dk, dv


@gluon.jit
def _consumer(problem, memory, dk_at, dv_at, WHO: gl.constexpr):
    """dk and dv of keys 64 WHO, ... of the tile, and its part of dQ for all queries that see the tile."""
    # 1. Where; the first query block has none before it.
    D: gl.constexpr = problem.D
    j0, b, h, first, end = problem.tile()
    whole = problem.first_whole(j0, first, end)
    j = j0 + WHO * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, _accumulator(problem.BM)))
    dk = gl.zeros([KEYS, D], gl.float32, _accumulator(D))
    dv = gl.zeros([KEYS, D], gl.float32, _accumulator(D))
    mbarrier.wait(memory.kv_full, 0)
    s = _scores(0, problem, memory, WHO)
    dp = _dp(0, problem, memory, WHO)
    s = settle(1, [s])
    ds, dv = _finish(s, dp, 0, first, dv, j, problem, memory, WHO, True)

    # 2. The other blocks of all query heads of the group.
    count = 1
    begin = first + 1
    for _ in range(problem.group):
        for block in range(begin, whole):
            ds, dk, dv = _step(count, block, ds, dk, dv, j, problem, memory, WHO, True)
            count += 1
        for block in range(gl.maximum(begin, whole), end):
            ds, dk, dv = _step(count, block, ds, dk, dv, j, problem, memory, WHO, False)
            count += 1
        begin = first

    # 3. dQ and dK of the last one.
    dq = _dq(count - 1, problem, memory, WHO)
    dk = _dk(ds, count - 1, dk, problem, memory)
    dq = settle(1, [dq])
    _hand_over(dq, problem, memory, WHO)
    dk = settle(0, [dk])
    free((count - 1) % Q_SLOTS, Q_FREE, Q_SLOTS, CONSUMERS_AND_ONE)

    # 4. dk and dv leave through the slots of k and v, once the other consumer has computed its last dQ from k.
    meet(DS_THERE, 256)
    memory.v.index(WHO).reshape([KEYS, D]).store(dv.to(memory.v.dtype))
    memory.k.index(WHO).reshape([KEYS, D]).store((dk * problem.scale).to(memory.k.dtype))
    fence_async_shared()
    async_store(dv_at, [b, h, j0 + WHO * KEYS, 0], memory.v.index(WHO))
    async_store(dk_at, [b, h, j0 + WHO * KEYS, 0], memory.k.index(WHO))
    meet(DQ_FREE + WHO, 160)
    await_stores(0)


@gluon.jit
def _loader(problem, memory, q_at, k_at, v_at, do_at, lse_at, delta_at):
    """Brings the tile's K and V, then Q, lse, dO and delta of each query block."""
    D: gl.constexpr = problem.D
    BYTES: gl.constexpr = problem.BM * D * 2 + problem.BM * 4
    j0, b, h, first, end = problem.tile()
    mbarrier.expect(memory.kv_full, 4 * KEYS * D * 2)
    for half in gl.static_range(2):
        async_load(k_at, [b, h, j0 + half * KEYS, 0], memory.kv_full, memory.k.index(half))
        async_load(v_at, [b, h, j0 + half * KEYS, 0], memory.kv_full, memory.v.index(half))
    count = 0
    for g in range(problem.group):
        head = h * problem.group + g
        row = (b * problem.kv_heads * problem.group) + head
        for block in range(first, end):
            slot = count % Q_SLOTS
            reserve(slot, count >= Q_SLOTS, Q_FREE, Q_SLOTS, CONSUMERS_AND_ONE)
            mbarrier.expect(memory.q_full.index(slot), BYTES)
            async_load(q_at, [b, head, block * problem.BM, 0], memory.q_full.index(slot), memory.q.index(slot))
            async_load(lse_at, [row, block * problem.BM], memory.q_full.index(slot), memory.lse.index(slot))
            slot = count % DO_SLOTS
            reserve(slot, count >= DO_SLOTS, DO_FREE, DO_SLOTS, CONSUMERS_AND_ONE)
            mbarrier.expect(memory.do_full.index(slot), BYTES)
            async_load(do_at, [b, head, block * problem.BM, 0], memory.do_full.index(slot), memory.do.index(slot))
            async_load(delta_at, [row, block * problem.BM], memory.do_full.index(slot), memory.delta.index(slot))
            count += 1
    # The last arrivals need somebody to meet.
    for i in gl.static_range(Q_SLOTS):
        if count > i:
            meet(Q_FREE + i, CONSUMERS_AND_ONE)
    for i in gl.static_range(DO_SLOTS):
        if count > i:
            meet(DO_FREE + i, CONSUMERS_AND_ONE)


@gluon.jit
def _adder(problem, memory, dq_at):
    """Adds the consumers' parts of dQ to global memory."""
    _, b, h, first, end = problem.tile()
    for who in gl.static_range(2):
        arrive(DQ_FREE + who, 160)
    for g in range(problem.group):
        head = h * problem.group + g
        for block in range(first, end):
            for who in gl.static_range(2):
                meet(DQ_FULL + who, 160)
                if problem.BM == 128:
                    async_add(dq_at, [b, head, block * problem.BM + who * problem.DQ_ROWS, 0], memory.dq.index(who))
                else:
                    async_add(dq_at, [b, head, block * problem.BM, who * problem.DQ_COLUMNS], memory.dq.index(who))
            await_stores(1)
            arrive(DQ_FREE, 160)
            await_stores(0)
            arrive(DQ_FREE + 1, 160)


RUNTIME = ["kv_heads", "group", "q_len", "k_len", "low", "high", "batch_heads", "section"]
"""Arguments whose values must not start another compilation."""


@gluon.jit(do_not_specialize=RUNTIME)
def backward_kernel(
    q_at, k_at, v_at, do_at, lse_at, delta_at, dq_at, dk_at, dv_at, scale, kv_heads, group, q_len, k_len, low, high, batch_heads, section,
    D: gl.constexpr, BM: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, REGISTERS: gl.constexpr,
    WARP_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Writes dk and dv and adds dq / scale to a float32 tensor that is zero at first. Grid: key tiles of all batches and key heads.

    Descriptors are of (B, H, L, D) in any strides: tiles of BM rows of q and do, 64 of k, v, dk and dv, a part of dq. lse and delta
    are what `prepare_kernel` makes, (B Hq, L padded), in tiles of BM.
    """
    problem = Problem(scale, kv_heads, group, q_len, k_len, low, high, batch_heads, section, D, BM, HAS_LOW, HAS_HIGH)
    dtype: gl.constexpr = q_at.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, BM], dtype)
    memory = Memory(
        gl.allocate_shared_memory(dtype, [2, 1, 1, KEYS, D], k_at.layout),
        gl.allocate_shared_memory(dtype, [2, 1, 1, KEYS, D], v_at.layout),
        gl.allocate_shared_memory(dtype, [Q_SLOTS, 1, 1, BM, D], q_at.layout),
        gl.allocate_shared_memory(dtype, [DO_SLOTS, 1, 1, BM, D], do_at.layout),
        gl.allocate_shared_memory(dtype, [4, KEYS, BM], DS),
        gl.allocate_shared_memory(gl.float32, [2, 1, 1, problem.DQ_ROWS, problem.DQ_COLUMNS], dq_at.layout),
        gl.allocate_shared_memory(gl.float32, [Q_SLOTS, 1, BM], lse_at.layout),
        gl.allocate_shared_memory(gl.float32, [DO_SLOTS, 1, BM], delta_at.layout),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [DO_SLOTS, 1], BARRIER),
    )
    mbarrier.init(memory.kv_full, count=1)
    for i in gl.static_range(Q_SLOTS):
        mbarrier.init(memory.q_full.index(i), count=1)
    for i in gl.static_range(DO_SLOTS):
        mbarrier.init(memory.do_full.index(i), count=1)
    gl.warp_specialize([
        (_consumer, (problem, memory, dk_at, dv_at, 0)),
        (_consumer, (problem, memory, dk_at, dv_at, 1)),
        (_loader, (problem, memory, q_at, k_at, v_at, do_at, lse_at, delta_at)),
        (_adder, (problem, memory, dq_at)),
    ], [4, 1, 1], [REGISTERS, WARP_REGISTERS, WARP_REGISTERS])  # fmt: skip


@triton.jit(do_not_specialize=["heads", "q_len", "padded"])
def prepare_kernel(
    o_at, o0, o1, o2, do_at, g0, g1, g2, lse_at, dlse_at, lse2_at, delta_at, dq_at, heads, q_len, padded,
    D: tl.constexpr, BM: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """Writes lse in base 2 (inf where P is 0) and delta = sum(do o) - dlse, both padded, and zeros to a float32 dq.

    Strides are passed divided by 8, from which the compiler learns that rows begin at 16 bytes. Grid: (B Hq, query tiles).
    """
    bh, i = tl.program_id(0).to(tl.int64), (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    b, h = bh // heads, bh % heads
    d = tl.arange(0, D)[None, :]
    there = i < q_len
    o = tl.load(o_at + 8 * (b * o0 + h * o1 + i[:, None] * o2) + d, mask=there[:, None], other=0.0).to(tl.float32)
    do = tl.load(do_at + 8 * (b * g0 + h * g1 + i[:, None] * g2) + d, mask=there[:, None], other=0.0).to(tl.float32)
    delta = tl.sum(o * do, 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_at + bh * q_len + i, mask=there, other=0.0)
    lse = tl.load(lse_at + bh * q_len + i, mask=there, other=float("-inf"))
    dead = lse == float("-inf")
    tl.store(lse2_at + bh * padded + i, tl.where(dead, float("inf"), lse * 1.4426950408889634), mask=i < padded)
    tl.store(delta_at + bh * padded + i, tl.where(dead, 0.0, delta), mask=i < padded)
    tl.store(dq_at + (bh * q_len + i[:, None]) * D + d, tl.zeros([BM, D], tl.float32), mask=there[:, None])


@triton.jit(do_not_specialize=["heads", "q_len"])
def round_kernel(
    sum_at, dq_at, q0, q1, q2, scale, heads, q_len, D: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """Writes dq = scale times the float32 sum. Strides divided by 8, grid (B Hq, query tiles)."""
    bh, i = tl.program_id(0).to(tl.int64), (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    b, h = bh // heads, bh % heads
    d, there = tl.arange(0, D)[None, :], (i < q_len)[:, None]
    total = tl.load(sum_at + (bh * q_len + i[:, None]) * D + d, mask=there) * scale
    tl.store(dq_at + 8 * (b * q0 + h * q1 + i[:, None] * q2) + d, total.to(dq_at.dtype.element_ty), mask=there)
