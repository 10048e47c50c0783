"""How the work of the Hopper kernels is cut: sizes, the band of allowed pairs, tiles in the order in which they are taken.

A band keeps the pairs with low <= j - i <= high. Where it has an upper edge tiles differ in length; the longest are taken first,
so that none is left for the end, but only among as many heads as the L2 cache holds.
"""

from .hopper_ops import aggregate, gl, gluon

ROWS: gl.constexpr = gl.constexpr(64)
"""Query rows of a consumer: the height of one instruction of the tensor cores."""
KEYS: gl.constexpr = gl.constexpr(64)
"""Keys of a consumer; a tile has two."""


@aggregate
class ForwardWork:
    """Sizes, the band low <= j - i <= high, and how the work is cut."""

    scale: gl.tensor
    batch_heads: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    q_len: gl.tensor
    k_len: gl.tensor
    low: gl.tensor
    high: gl.tensor
    section: gl.tensor  # heads whose tiles are taken longest first, together
    D: gl.constexpr
    BN: gl.constexpr
    CONSUMERS: gl.constexpr
    K_SLOTS: gl.constexpr
    V_SLOTS: gl.constexpr
    HAS_LOW: gl.constexpr
    HAS_HIGH: gl.constexpr
    Q_SLOTS: gl.constexpr  # for each consumer: of a tile's Q, then of its O
    # Named barriers: slots of K, slots of V, then the turn of each consumer.
    K_FREE: gl.constexpr
    V_FREE: gl.constexpr
    TURN: gl.constexpr
    ALL: gl.constexpr  # threads at a barrier of consumers and producer

    @gluon.constexpr_function
    def __init__(
        self, scale, batch_heads, heads, group, q_len, k_len, low, high, section, D, BN, CONSUMERS, K_SLOTS, V_SLOTS, Q_SLOTS,
        HAS_LOW, HAS_HIGH,
    ):  # fmt: skip
        self.scale, self.batch_heads, self.heads, self.group = scale, batch_heads, heads, group
        self.q_len, self.k_len, self.low, self.high, self.section = q_len, k_len, low, high, section
        self.D, self.BN, self.CONSUMERS = gl.constexpr(D), gl.constexpr(BN), gl.constexpr(CONSUMERS)
        self.K_SLOTS, self.V_SLOTS = gl.constexpr(K_SLOTS), gl.constexpr(V_SLOTS)
        self.HAS_LOW, self.HAS_HIGH, self.Q_SLOTS = gl.constexpr(HAS_LOW), gl.constexpr(HAS_HIGH), gl.constexpr(Q_SLOTS)
        # A consumer passes over blocks before it has freed the last V of the tile before.
        assert (CONSUMERS - 1) * 64 <= BN * (V_SLOTS - 1), "consumers must begin less than V_SLOTS key blocks apart"
        first = CONSUMERS + 2  # those below belong to the compiler
        assert first + K_SLOTS + V_SLOTS + CONSUMERS <= 16, "a block has 16 named barriers"
        self.K_FREE, self.V_FREE = gl.constexpr(first), gl.constexpr(first + K_SLOTS)
        self.TURN = gl.constexpr(first + K_SLOTS + V_SLOTS)
        self.ALL = gl.constexpr(128 * CONSUMERS + 32)

    @gluon.jit
    def tile(self, number):
        """(i0, b, h, first and last + 1 key block): tile `number` in the order of taking."""
        n_i = gl.cdiv(self.q_len, ROWS * self.CONSUMERS)
        section = number // (self.section * n_i)
        left = gl.minimum(self.section, self.batch_heads - section * self.section)
        at = number - section * self.section * n_i
        bh = section * self.section + at % left
        i0 = (n_i - 1 - at // left) * ROWS * self.CONSUMERS
        first = self.first_block(i0)
        return i0, bh // self.heads, bh % self.heads, first, self.end_block(i0 + ROWS * self.CONSUMERS, first)

    @gluon.jit
    def first_block(self, i0):
        """The block of the first key that row i0 may see; one that exists, even where it sees none."""
        first = 0
        if self.HAS_LOW:
            first = gl.minimum(gl.maximum(i0 + self.low, 0), self.k_len - 1) // self.BN
        return first

    @gluon.jit
    def end_block(self, end_i, first):
        """One past the block of the last key that row end_i - 1 may see, and past `first` even where it sees none."""
        end = gl.cdiv(self.k_len, self.BN)
        if self.HAS_HIGH:
            end = gl.maximum(gl.minimum(end, gl.cdiv(end_i + self.high, self.BN)), first + 1)
        return end

    @gluon.jit
    def masked_blocks(self, i0, first, end):
        """Of the blocks first..end - 1, how many from the end must be masked for rows i0, ..."""
        full = self.k_len // self.BN
        if self.HAS_HIGH:
            full = gl.minimum(full, gl.maximum(i0 + self.high + 1, 0) // self.BN)
        if self.HAS_LOW:
            full = first
        return end - gl.maximum(gl.minimum(full, end), first)


@aggregate
class BackwardWork:
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
    DQ_ROWS: (
        gl.constexpr
    )  # of a consumer's part of dQ: half of the queries where there are 128, else half of the columns
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
