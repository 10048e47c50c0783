"""The forward kernel of `hopper`: warpgroups that take turns on the tensor cores, fed by one warp that copies.

A block stays on its multiprocessor and takes tiles of queries until there are none. CONSUMERS warpgroups compute 64 rows each of
the tile; the producer's warp brings Q, K and V through rings of slots in shared memory. In a step a consumer issues the scores of
one key block together with P V of the block before; its softmax runs beneath its own P V and beneath the other consumers'
products. That order is FlashAttention-3's (arXiv 2407.08608, section 3.2); which lines hold it in place says hopper_ops and the
comments here.
"""

from .hopper_ops import (
    arrive,
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
    meet_warps,
    reserve,
    settle,
)
from .hopper_slots import TILE_SLOTS, Memory, next_tile, publish, q_slot
from .hopper_work import ROWS, ForwardWork

LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)


@gluon.jit
def _probabilities(s, row_max, i, j0, work, MASKED: gl.constexpr):
    """(p, what earlier sums shrink by, the new row maximum) of the scores s (64, BN) of keys j0, ... in Q K^T, unscaled."""
    if MASKED:
        j = (j0 + gl.arange(0, work.BN, gl.SliceLayout(0, s.type.layout)))[None, :]
        last = i * 0 + (work.k_len - 1)
        if work.HAS_HIGH:
            last = gl.minimum(i + work.high, work.k_len - 1)
        keep = j <= last[:, None]
        if work.HAS_LOW:
            keep = keep & (j >= (i + work.low)[:, None])
        s = gl.where(keep, s, float("-inf"))
    row_max_now = gl.maximum(row_max, gl.max(s, 1))
    to_log2 = work.scale * LOG2_E
    shift = row_max_now * to_log2
    if MASKED:
        shift = gl.where(row_max_now == float("-inf"), 0.0, shift)  # no key yet: exp2 shall give 0, not nan
    return gl.exp2(s * to_log2 - shift[:, None]), gl.exp2(row_max * to_log2 - shift), row_max_now


@gluon.jit
def _partial_sums(p, BN: gl.constexpr):
    """Four sums of each row, one per lane that holds it: they are added across lanes once, at the end."""
    return gl.sum(gl.sum(p.reshape([ROWS, BN // 8, 4, 2]), 3), 1)


@gluon.jit
def _scale_rows(x, factor):
    return x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None]


@gluon.constexpr_function
def _accumulator(columns):
    """The layout of a (64, columns) result of one warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def _scores(q, count, work, memory):
    """Q K^T of the K that `count` leads to, as issued."""
    k = memory.k.index(count % work.K_SLOTS).reshape([work.BN, work.D])
    zero = gl.zeros([ROWS, work.BN], gl.float32, _accumulator(work.BN))
    return matmul(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _weighted_values(p, acc, count, work, memory):
    """acc + P V of the V that `count` leads to, as issued once V is there."""
    slot = count % work.V_SLOTS
    mbarrier.wait(memory.v_full.index(slot), (count // work.V_SLOTS) & 1)
    return matmul(p, memory.v.index(slot).reshape([work.BN, work.D]), acc, is_async=True)


@gluon.jit
def _await_k(count, wanted, work, memory):
    mbarrier.wait(memory.k_full.index(count % work.K_SLOTS), (count // work.K_SLOTS) & 1, pred=wanted)


@gluon.jit
def _pass_turn(work, WHO: gl.constexpr):
    arrive(work.TURN + (WHO + 1) % work.CONSUMERS, 256)


@gluon.jit
def _as_operand(p, memory, D: gl.constexpr):
    """P in the dtype of V, in the registers where the tensor cores read a left operand."""
    return gl.convert_layout(p.to(memory.v.dtype), gl.DotOperandLayout(0, _accumulator(D), 2))


@gluon.jit
def _step(q, block, more, count, acc, p, row_max, row_sum, i, work, memory, WHO: gl.constexpr, MASKED: gl.constexpr):
    """Scores and softmax of key block `block`, P V of the block before it; `more` says that another block follows."""
    # 1. Both products are issued in this consumer's turn.
    meet(work.TURN + WHO, 256)
    s = _scores(q, count + 1, work, memory)
    acc = _weighted_values(p, acc, count, work, memory)
    _pass_turn(work, WHO)

    # 2. Softmax, beneath P V.
    s = settle(1, [s])
    free((count + 1) % work.K_SLOTS, work.K_FREE, work.K_SLOTS, work.ALL)
    p, shrink, row_max = _probabilities(s, row_max, i, block * work.BN, work, MASKED)
    row_sum = _scale_rows(row_sum, shrink) + _partial_sums(p, work.BN)

    # 3. The loop of the wait for the next K ends a basic block: without it here ptxas waits for P V before the softmax.
    _await_k(count + 2, more, work, memory)
    acc = settle(0, [acc])
    free(count % work.V_SLOTS, work.V_FREE, work.V_SLOTS, work.ALL)
    return count + 1, _scale_rows(acc, shrink), _as_operand(p, memory, work.D), row_max, row_sum


@gluon.jit
def _pass_over(blocks, count, work, memory, WHO: gl.constexpr):
    """Let `blocks` last key blocks of a tile go by that only consumers of later rows see, keeping rings and turns in step."""
    for _ in range(blocks):
        meet(work.TURN + WHO, 256)
        _pass_turn(work, WHO)
        _await_k(count, True, work, memory)
        free(count % work.K_SLOTS, work.K_FREE, work.K_SLOTS, work.ALL)
        slot = count % work.V_SLOTS
        mbarrier.wait(memory.v_full.index(slot), (count // work.V_SLOTS) & 1)
        free(slot, work.V_FREE, work.V_SLOTS, work.ALL)
        count += 1
    return count


@gluon.jit
def _idle_step(count, work, memory, WHO: gl.constexpr):
    """What `_step` is to the other consumers and the producer, without products: for rows that do not exist."""
    meet(work.TURN + WHO, 256)
    _pass_turn(work, WHO)
    _await_k(count + 1, True, work, memory)
    free((count + 1) % work.K_SLOTS, work.K_FREE, work.K_SLOTS, work.ALL)
    slot = count % work.V_SLOTS
    mbarrier.wait(memory.v_full.index(slot), (count // work.V_SLOTS) & 1)
    free(slot, work.V_FREE, work.V_SLOTS, work.ALL)
    return count + 1


@gluon.jit
def _begin(i0, first, end, taken, count, work, memory, WHO: gl.constexpr):
    """(count, the consumer's own end, scores as issued) of the last key block of a tile; of nothing where i0 is -1.

    Then the scores are of what is left in the slots and nobody reads them: a branch around a product would cost more.
    """
    there = i0 >= 0
    own_end = end
    if work.HAS_HIGH:
        own_end = gl.minimum(end, work.end_block(i0 + (WHO + 1) * ROWS, first))
        count = _pass_over(gl.where(there, end - own_end, 0), count, work, memory, WHO)
    slot = q_slot(taken, work, WHO)
    mbarrier.wait(memory.q_full.index(slot), (taken // work.Q_SLOTS) & 1, pred=there)
    _await_k(count, there, work, memory)
    meet(work.TURN + WHO, 256)
    s = _scores(memory.q.index(slot).reshape([ROWS, work.D]), count, work, memory)
    _pass_turn(work, WHO)
    return count, own_end, s


@gluon.jit
def _consumer(work, memory, o_at, lse_at, WHO: gl.constexpr):
    """Rows 64 WHO, ... of every tile that the block takes."""
    D: gl.constexpr = work.D
    S: gl.constexpr = _accumulator(work.BN)
    count = 0  # of key blocks so far: it leads to the slots of both rings, and to their phases
    taken = 0
    if WHO == work.CONSUMERS - 1:
        arrive(work.TURN, 256)
    i0, b, h, first, end = next_tile(taken, memory)
    count, own_end, s = _begin(i0, first, end, taken, count, work, memory, WHO)
    s = settle(0, [s])
    free(count % work.K_SLOTS, work.K_FREE, work.K_SLOTS, work.ALL)
    while i0 >= 0:
        # 1. The last key block has no block before it.
        i0 += WHO * ROWS
        i = i0 + gl.arange(0, ROWS, gl.SliceLayout(1, S))
        q = memory.q.index(q_slot(taken, work, WHO)).reshape([ROWS, D])
        row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
        p, _, row_max = _probabilities(s, row_max, i, (own_end - 1) * work.BN, work, True)
        row_sum = _partial_sums(p, work.BN)
        p = _as_operand(p, memory, D)
        acc = gl.zeros([ROWS, D], gl.float32, _accumulator(D))
        if work.Q_SLOTS > 1:  # by now the other slot's O has left
            await_stores(0)
            mbarrier.arrive(memory.q_free.index(q_slot(taken + 1, work, WHO)), pred=taken > 0)
        own_first = gl.where(i0 < work.q_len, first, own_end - 1)
        for _ in range(own_first - first):
            count = _idle_step(count, work, memory, WHO)
        # The compiler puts a barrier between two waits at one array of mbarriers: here, so that it need not in every step.
        meet_warps()
        _await_k(count + 1, own_end - 1 > own_first, work, memory)

        # 2. The others, the masked ones before those that are wholly allowed.
        whole_end = gl.minimum(own_end - work.masked_blocks(i0, first, own_end), own_end - 1)
        whole_end = gl.maximum(whole_end, own_first)
        if work.HAS_HIGH or work.HAS_LOW:
            for n in range(own_end - 1 - whole_end):
                block = own_end - 2 - n
                count, acc, p, row_max, row_sum = _step(
                    q, block, block > first, count, acc, p, row_max, row_sum, i, work, memory, WHO, True
                )
        if not work.HAS_LOW:
            for n in range(whole_end - own_first):
                block = whole_end - 1 - n
                count, acc, p, row_max, row_sum = _step(
                    q, block, block > first, count, acc, p, row_max, row_sum, i, work, memory, WHO, False
                )

        # 3. P V of the first block, and the next tile's first scores; beneath them, the sums and lse.
        acc = _weighted_values(p, acc, count, work, memory)
        v_slot = count % work.V_SLOTS
        count += 1
        next_i0, next_b, next_h, first, end = next_tile(taken + 1, memory)
        if work.Q_SLOTS > 1:
            count, own_end, s = _begin(next_i0, first, end, taken + 1, count, work, memory, WHO)
        total = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, S))
        dead = total == 0.0
        lse = gl.where(dead, float("-inf"), row_max * work.scale + gl.log(gl.where(dead, 1.0, total)))
        at = (b * work.heads + h).to(gl.int64) * work.q_len + i
        gl.store(lse_at + at, lse, mask=i < work.q_len)
        if work.Q_SLOTS > 1:
            acc = settle(1, [acc])
        else:
            acc = settle(0, [acc])
        free(v_slot, work.V_FREE, work.V_SLOTS, work.ALL)

        # 4. O leaves through Q's slot.
        acc = _scale_rows(acc, 1.0 / gl.where(dead, 1.0, total))
        q.store(acc.to(memory.q.dtype))
        fence_async_shared()
        async_store(o_at, [b, h, i0, 0], memory.q.index(q_slot(taken, work, WHO)))
        if work.Q_SLOTS == 1:
            await_stores(0)
            mbarrier.arrive(memory.q_free.index(WHO))
            count, own_end, s = _begin(next_i0, first, end, taken + 1, count, work, memory, WHO)
        taken += 1
        i0, b, h = next_i0, next_b, next_h
        s = settle(0, [s])
        if i0 >= 0:
            free(count % work.K_SLOTS, work.K_FREE, work.K_SLOTS, work.ALL)
    await_stores(0)


@gluon.jit
def _load(descriptor, at, full, slots, slot):
    mbarrier.expect(full.index(slot), descriptor.block_type.nbytes)
    async_load(descriptor, at, full.index(slot), slots.index(slot))


@gluon.jit
def _producer(work, memory, q_at, k_at, v_at, counter, tiles):
    """Takes tiles and brings what they need, K one key block ahead of V.

    Tiles after a block's first come from `counter`. Every block draws until it gets none, so `tiles` numbers are drawn in
    all; who draws the last sets the counter back to 0 for the next launch.
    """
    blocks = 0
    taken = 0
    i0, b, h, first, end = publish(gl.program_id(0), taken, tiles, work, memory)
    while i0 >= 0:
        kv = h // work.group
        slot = blocks % work.K_SLOTS
        reserve(slot, blocks >= work.K_SLOTS, work.K_FREE, work.K_SLOTS, work.ALL)
        _load(k_at, [b, kv, (end - 1) * work.BN, 0], memory.k_full, memory.k, slot)
        for who in gl.static_range(work.CONSUMERS):
            slot = q_slot(taken, work, who)
            mbarrier.wait(memory.q_free.index(slot), (taken // work.Q_SLOTS + 1) & 1, pred=taken >= work.Q_SLOTS)
            _load(q_at, [b, h, i0 + who * ROWS, 0], memory.q_full, memory.q, slot)
        # Early, so that nobody waits for the answer of the L2 cache.
        drawn = gl.atomic_add(counter, 1, sem="relaxed")
        if drawn == tiles - 1:
            gl.store(counter, 0)
        taken += 1
        next_i0, next_b, next_h, next_first, next_end = publish(drawn + gl.num_programs(0), taken, tiles, work, memory)
        for n in range(end - first):
            block = end - 1 - n
            if block > first:
                slot = (blocks + 1) % work.K_SLOTS
                reserve(slot, blocks + 1 >= work.K_SLOTS, work.K_FREE, work.K_SLOTS, work.ALL)
                _load(k_at, [b, kv, (block - 1) * work.BN, 0], memory.k_full, memory.k, slot)
            slot = blocks % work.V_SLOTS
            reserve(slot, blocks >= work.V_SLOTS, work.V_FREE, work.V_SLOTS, work.ALL)
            _load(v_at, [b, kv, block * work.BN, 0], memory.v_full, memory.v, slot)
            blocks += 1
        i0, b, h, first, end = next_i0, next_b, next_h, next_first, next_end
    # The last arrivals need somebody to meet.
    for i in gl.static_range(work.K_SLOTS):
        if blocks > i:
            meet(work.K_FREE + i, work.ALL)
    for i in gl.static_range(work.V_SLOTS):
        if blocks > i:
            meet(work.V_FREE + i, work.ALL)


RUNTIME = ["batch_heads", "heads", "group", "q_len", "k_len", "low", "high", "section", "tiles"]
"""Arguments whose values must not start another compilation."""


@gluon.jit(do_not_specialize=RUNTIME)
def forward_kernel(
    q_at, k_at, v_at, o_at, lse_at, counter, scale, batch_heads, heads, group, q_len, k_len, low, high, section, tiles,
    D: gl.constexpr, BN: gl.constexpr, CONSUMERS: gl.constexpr, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr, Q_SLOTS: gl.constexpr,
    HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Writes O and LSE (natural logarithm, float32, contiguous) of all tiles. Grid: as many blocks as run at once.

    Descriptors are of (B, H, L, D) in any strides, with tiles of 64 rows of q and o, BN of k and v. counter is an int32 zero,
    and zero again afterwards.
    """
    work = ForwardWork(
        scale,
        batch_heads,
        heads,
        group,
        q_len,
        k_len,
        low,
        high,
        section,
        D,
        BN,
        CONSUMERS,
        K_SLOTS,
        V_SLOTS,
        Q_SLOTS,
        HAS_LOW,
        HAS_HIGH,
    )
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    memory = Memory(
        gl.allocate_shared_memory(q_at.dtype, [Q_SLOTS * CONSUMERS, 1, 1, ROWS, D], q_at.layout),
        gl.allocate_shared_memory(k_at.dtype, [K_SLOTS, 1, 1, BN, D], k_at.layout),
        gl.allocate_shared_memory(v_at.dtype, [V_SLOTS, 1, 1, BN, D], v_at.layout),
        gl.allocate_shared_memory(gl.int32, [5 * TILE_SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.int64, [Q_SLOTS * CONSUMERS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [Q_SLOTS * CONSUMERS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [K_SLOTS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [V_SLOTS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [TILE_SLOTS, 1], BARRIER),
    )
    for i in gl.static_range(Q_SLOTS * CONSUMERS):
        mbarrier.init(memory.q_free.index(i), count=1)
        mbarrier.init(memory.q_full.index(i), count=1)
    for i in gl.static_range(K_SLOTS):
        mbarrier.init(memory.k_full.index(i), count=1)
    for i in gl.static_range(V_SLOTS):
        mbarrier.init(memory.v_full.index(i), count=1)
    for i in gl.static_range(TILE_SLOTS):
        mbarrier.init(memory.tile_full.index(i), count=1)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (work, memory, o_at, lse_at, 0)),
            (_consumer, (work, memory, o_at, lse_at, 1)),
            (_producer, (work, memory, q_at, k_at, v_at, counter, tiles)),
        ], [4, 1], [REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize([
            (_consumer, (work, memory, o_at, lse_at, 0)),
            (_consumer, (work, memory, o_at, lse_at, 1)),
            (_consumer, (work, memory, o_at, lse_at, 2)),
            (_producer, (work, memory, q_at, k_at, v_at, counter, tiles)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
