"""The backward kernel of `hopper`: a block computes dk and dv of a tile of keys, and adds what these keys give to dq.

Scores are computed transposed, keys by queries, so that P^T and dS^T come out of the tensor cores in the registers where these
read a left operand: dV += P^T dO and dK += dS^T Q need no shared memory for them. Only dS goes there, for dQ = dS K, because
each consumer has the dS of its own 64 keys and computes a part of dQ for all 128. A warp of its own adds the parts to a float32
dQ in global memory by the copy engine. Tiles and the cast of dS are FlashAttention-3's (arXiv 2407.08608, section 3.3).

A step computes the scores of one query block together with dQ and dK of the block before it, so that dV covers the meeting of the
consumers at dS, and the softmax runs beneath dP.
"""

from .hopper_ops import (
    aggregate,
    arrive,
    async_add,
    async_load,
    async_store,
    await_stores,
    fence_async_shared,
    free,
    gl,
    gluon,
    matmul,
    mbarrier,
    meet,
    reserve,
    settle,
)
from .hopper_work import KEYS, BackwardWork

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
def _scores(count, work, memory, WHO: gl.constexpr):
    """K Q^T (64, BM) of the Q that `count` leads to, as issued once it is there."""
    slot = count % Q_SLOTS
    mbarrier.wait(memory.q_full.index(slot), (count // Q_SLOTS) & 1)
    k = memory.k.index(WHO).reshape([KEYS, work.D])
    q = memory.q.index(slot).reshape([work.BM, work.D])
    zero = gl.zeros([KEYS, work.BM], gl.float32, _accumulator(work.BM))
    return matmul(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _dp(count, work, memory, WHO: gl.constexpr):
    """V dO^T (64, BM), as issued once dO is there."""
    slot = count % DO_SLOTS
    mbarrier.wait(memory.do_full.index(slot), (count // DO_SLOTS) & 1)
    v = memory.v.index(WHO).reshape([KEYS, work.D])
    do = memory.do.index(slot).reshape([work.BM, work.D])
    zero = gl.zeros([KEYS, work.BM], gl.float32, _accumulator(work.BM))
    return matmul(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _dq(count, work, memory, WHO: gl.constexpr):
    """This consumer's part of dS K, as issued."""
    ROWS: gl.constexpr = work.DQ_ROWS
    COLUMNS: gl.constexpr = work.DQ_COLUMNS
    part = gl.zeros([ROWS, COLUMNS], gl.float32, _accumulator(COLUMNS))
    for half in gl.static_range(2):
        ds = memory.ds.index(count % 2 * 2 + half)
        k = memory.k.index(half).reshape([KEYS, work.D])
        if work.BM == 128:
            ds = ds.slice(WHO * ROWS, ROWS, dim=1)
        else:
            k = k.slice(WHO * COLUMNS, COLUMNS, dim=1)
        part = matmul(ds.permute((1, 0)), k, part, use_acc=half > 0, is_async=True)
    return part


@gluon.jit
def _probabilities(s, count, block, j, work, memory, MASKED: gl.constexpr):
    """P^T from the scores K Q^T (64, BM), unscaled."""
    S: gl.constexpr = _accumulator(work.BM)
    lse = memory.lse.index(count % Q_SLOTS).reshape([work.BM]).load(gl.SliceLayout(0, S))
    p = gl.exp2(s * (work.scale * LOG2_E) - lse[None, :])
    if MASKED:
        i = (block * work.BM + gl.arange(0, work.BM, gl.SliceLayout(0, S)))[None, :]
        keep = (j < work.k_len)[:, None]
        if work.HAS_HIGH:
            keep = keep & (i >= (j - work.high)[:, None])
        if work.HAS_LOW:
            keep = keep & (i <= (j - work.low)[:, None])
        p = gl.where(keep, p, 0.0)
    return p


@gluon.jit
def _finish(p, dp, count, dv, work, memory, WHO: gl.constexpr):
    """(dS^T as an operand, dV) of a block from its P^T and its dP as issued. dS is left in shared memory too.

    dV is issued after dS was computed: beneath an unfinished dV, ptxas 12.8 (Triton 3.6) dies of the arithmetic of dS.
    """
    operand = gl.convert_layout(p.to(memory.q.dtype), _operand(work.D))
    delta = memory.delta.index(count % DO_SLOTS).reshape([work.BM]).load(gl.SliceLayout(0, _accumulator(work.BM)))
    dp = settle(0, [dp])
    ds = (p * (dp - delta[None, :])).to(memory.q.dtype)
    memory.ds.index(count % 2 * 2 + WHO).store(ds)
    fence_async_shared()
    do = memory.do.index(count % DO_SLOTS).reshape([work.BM, work.D])
    dv = matmul(operand, do, dv, is_async=True)
    meet(DS_THERE, 256)
    dv = settle(0, [dv])
    free(count % DO_SLOTS, DO_FREE, DO_SLOTS, CONSUMERS_AND_ONE)
    return gl.convert_layout(ds, _operand(work.D)), dv


@gluon.jit
def _dk(ds, count, dk, work, memory):
    """dK + dS^T Q, as issued."""
    return matmul(ds, memory.q.index(count % Q_SLOTS).reshape([work.BM, work.D]), dk, is_async=True)


@gluon.jit
def _hand_over(dq, work, memory, WHO: gl.constexpr):
    """Leave a part of dQ for the warp that adds it to global memory."""
    meet(DQ_FREE + WHO, 160)
    memory.dq.index(WHO).reshape([work.DQ_ROWS, work.DQ_COLUMNS]).store(dq)
    fence_async_shared()
    arrive(DQ_FULL + WHO, 160)


@gluon.jit
def _step(count, block, ds, dk, dv, j, work, memory, WHO: gl.constexpr, MASKED: gl.constexpr):
    """Query block `block`, the count-th, up to its dS and dV; dQ and dK of the one before, whose dS is given."""
    dq = _dq(count - 1, work, memory, WHO)
    dk = _dk(ds, count - 1, dk, work, memory)
    s = _scores(count, work, memory, WHO)
    if work.D == 64:  # registers for all four results: dQ is handed over while dP is computed
        dp = _dp(count, work, memory, WHO)
        dq, dk, s = settle(1, [dq, dk, s])
        free((count - 1) % Q_SLOTS, Q_FREE, Q_SLOTS, CONSUMERS_AND_ONE)
        p = _probabilities(s, count, block, j, work, memory, MASKED)
        _hand_over(dq, work, memory, WHO)
    else:
        dq = settle(2, [dq])
        _hand_over(dq, work, memory, WHO)
        dp = _dp(count, work, memory, WHO)
        dk, s = settle(1, [dk, s])
        free((count - 1) % Q_SLOTS, Q_FREE, Q_SLOTS, CONSUMERS_AND_ONE)
        p = _probabilities(s, count, block, j, work, memory, MASKED)
    ds, dv = _finish(p, dp, count, dv, work, memory, WHO)
    return ds, dk, dv


@gluon.jit
def _consumer(work, memory, dk_at, dv_at, WHO: gl.constexpr):
    """dk and dv of keys 64 WHO, ... of the tile, and its part of dQ for all queries that see the tile."""
    # 1. Where; the first query block has none before it.
    D: gl.constexpr = work.D
    j0, b, h, first, end = work.tile()
    whole = work.first_whole(j0, first, end)
    j = j0 + WHO * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, _accumulator(work.BM)))
    dk = gl.zeros([KEYS, D], gl.float32, _accumulator(D))
    dv = gl.zeros([KEYS, D], gl.float32, _accumulator(D))
    mbarrier.wait(memory.kv_full, 0)
    s = _scores(0, work, memory, WHO)
    dp = _dp(0, work, memory, WHO)
    s = settle(1, [s])
    p = _probabilities(s, 0, first, j, work, memory, True)
    ds, dv = _finish(p, dp, 0, dv, work, memory, WHO)

    # 2. The other blocks of all query heads of the group.
    count = 1
    begin = first + 1
    for _ in range(work.group):
        for block in range(begin, whole):
            ds, dk, dv = _step(count, block, ds, dk, dv, j, work, memory, WHO, True)
            count += 1
        for block in range(gl.maximum(begin, whole), end):
            ds, dk, dv = _step(count, block, ds, dk, dv, j, work, memory, WHO, False)
            count += 1
        begin = first

    # 3. dQ and dK of the last one.
    dq = _dq(count - 1, work, memory, WHO)
    dk = _dk(ds, count - 1, dk, work, memory)
    dq = settle(1, [dq])
    _hand_over(dq, work, memory, WHO)
    dk = settle(0, [dk])
    free((count - 1) % Q_SLOTS, Q_FREE, Q_SLOTS, CONSUMERS_AND_ONE)

    # 4. dk and dv leave through the slots of k and v, once the other consumer has computed its last dQ from k.
    meet(DS_THERE, 256)
    memory.v.index(WHO).reshape([KEYS, D]).store(dv.to(memory.v.dtype))
    memory.k.index(WHO).reshape([KEYS, D]).store((dk * work.scale).to(memory.k.dtype))
    fence_async_shared()
    async_store(dv_at, [b, h, j0 + WHO * KEYS, 0], memory.v.index(WHO))
    async_store(dk_at, [b, h, j0 + WHO * KEYS, 0], memory.k.index(WHO))
    meet(DQ_FREE + WHO, 160)
    await_stores(0)


@gluon.jit
def _loader(work, memory, q_at, k_at, v_at, do_at, lse_at, delta_at):
    """Brings the tile's K and V, then Q, lse, dO and delta of each query block."""
    D: gl.constexpr = work.D
    BYTES: gl.constexpr = work.BM * D * 2 + work.BM * 4
    j0, b, h, first, end = work.tile()
    mbarrier.expect(memory.kv_full, 4 * KEYS * D * 2)
    for half in gl.static_range(2):
        async_load(k_at, [b, h, j0 + half * KEYS, 0], memory.kv_full, memory.k.index(half))
        async_load(v_at, [b, h, j0 + half * KEYS, 0], memory.kv_full, memory.v.index(half))
    count = 0
    for g in range(work.group):
        head = h * work.group + g
        row = (b * work.kv_heads * work.group) + head
        for block in range(first, end):
            slot = count % Q_SLOTS
            reserve(slot, count >= Q_SLOTS, Q_FREE, Q_SLOTS, CONSUMERS_AND_ONE)
            mbarrier.expect(memory.q_full.index(slot), BYTES)
            async_load(q_at, [b, head, block * work.BM, 0], memory.q_full.index(slot), memory.q.index(slot))
            async_load(lse_at, [row, block * work.BM], memory.q_full.index(slot), memory.lse.index(slot))
            slot = count % DO_SLOTS
            reserve(slot, count >= DO_SLOTS, DO_FREE, DO_SLOTS, CONSUMERS_AND_ONE)
            mbarrier.expect(memory.do_full.index(slot), BYTES)
            async_load(do_at, [b, head, block * work.BM, 0], memory.do_full.index(slot), memory.do.index(slot))
            async_load(delta_at, [row, block * work.BM], memory.do_full.index(slot), memory.delta.index(slot))
            count += 1
    # The last arrivals need somebody to meet.
    for i in gl.static_range(Q_SLOTS):
        if count > i:
            meet(Q_FREE + i, CONSUMERS_AND_ONE)
    for i in gl.static_range(DO_SLOTS):
        if count > i:
            meet(DO_FREE + i, CONSUMERS_AND_ONE)


@gluon.jit
def _adder(work, memory, dq_at):
    """Adds the consumers' parts of dQ to global memory."""
    _, b, h, first, end = work.tile()
    for who in gl.static_range(2):
        arrive(DQ_FREE + who, 160)
    for g in range(work.group):
        head = h * work.group + g
        for block in range(first, end):
            for who in gl.static_range(2):
                meet(DQ_FULL + who, 160)
                if work.BM == 128:
                    async_add(dq_at, [b, head, block * work.BM + who * work.DQ_ROWS, 0], memory.dq.index(who))
                else:
                    async_add(dq_at, [b, head, block * work.BM, who * work.DQ_COLUMNS], memory.dq.index(who))
            await_stores(1)
            arrive(DQ_FREE, 160)
            await_stores(0)
            arrive(DQ_FREE + 1, 160)


RUNTIME = ["kv_heads", "group", "q_len", "k_len", "low", "high", "batch_heads", "section"]
"""Arguments whose values must not start another compilation."""


@gluon.jit(do_not_specialize=RUNTIME)
def backward_kernel(
    q_at, k_at, v_at, do_at, lse_at, delta_at, dq_at, dk_at, dv_at, scale, kv_heads, group, q_len, k_len, low, high, batch_heads, section,
    D: gl.constexpr, BM: gl.constexpr,
    HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, REGISTERS: gl.constexpr,
    WARP_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Writes dk and dv and adds dq / scale to a float32 tensor that is zero at first. Grid: key tiles of all batches and key heads.

    Descriptors are of (B, H, L, D) in any strides: tiles of BM rows of q and do, 64 of k, v, dk and dv, a part of dq. lse and delta
    are what `prepare_kernel` makes, (B Hq, L padded), in tiles of BM.
    """
    work = BackwardWork(scale, kv_heads, group, q_len, k_len, low, high, batch_heads, section, D, BM, HAS_LOW, HAS_HIGH)
    dtype: gl.constexpr = q_at.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, BM], dtype)
    memory = Memory(
        gl.allocate_shared_memory(dtype, [2, 1, 1, KEYS, D], k_at.layout),
        gl.allocate_shared_memory(dtype, [2, 1, 1, KEYS, D], v_at.layout),
        gl.allocate_shared_memory(dtype, [Q_SLOTS, 1, 1, BM, D], q_at.layout),
        gl.allocate_shared_memory(dtype, [DO_SLOTS, 1, 1, BM, D], do_at.layout),
        gl.allocate_shared_memory(dtype, [4, KEYS, BM], DS),
        gl.allocate_shared_memory(gl.float32, [2, 1, 1, work.DQ_ROWS, work.DQ_COLUMNS], dq_at.layout),
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
        (_consumer, (work, memory, dk_at, dv_at, 0)),
        (_consumer, (work, memory, dk_at, dv_at, 1)),
        (_loader, (work, memory, q_at, k_at, v_at, do_at, lse_at, delta_at)),
        (_adder, (work, memory, dq_at)),
    ], [4, 1, 1], [REGISTERS, WARP_REGISTERS, WARP_REGISTERS])  # fmt: skip
