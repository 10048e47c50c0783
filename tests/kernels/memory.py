"""Small kernels, each right or wrong in one way; imported by the tests when the interpreter is on."""

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.libdevice import atan2


@triton.jit
def copy(A, C, n, step, N: tl.constexpr, LOAD_MASK: tl.constexpr, STORE_MASK: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(A + i * step, mask=i < n) if LOAD_MASK else tl.load(A + i * step)
    tl.store(C + i, x, mask=(i < n) if STORE_MASK else (i < 10**6))


@triton.jit
def device_descriptor(A, C, L, D, BM: tl.constexpr, BD: tl.constexpr):
    a = tl.make_tensor_descriptor(A, shape=[L, D], strides=[D, 1], block_shape=[BM, BD])
    c = tl.make_tensor_descriptor(C, shape=[L, D], strides=[D, 1], block_shape=[BM, BD])
    for i in range(0, L, BM):
        c.store([i, 0], a.load([i, 0]) * 2)


@triton.jit
def host_descriptor(a, c, L, BM: tl.constexpr):
    for i in range(0, L, BM):
        c.store([i, 0], a.load([i, 0]) * 2)


@triton.jit
def add_one(C, ATOMIC: tl.constexpr):
    if ATOMIC:
        tl.atomic_add(C, 1.0)
    else:
        tl.store(C, tl.load(C) + 1.0)


@triton.jit
def add_under_lock(C, LOCK):
    while tl.atomic_cas(LOCK, 0, 1) == 1:
        pass
    tl.store(C, tl.load(C) + 1.0)
    tl.atomic_xchg(LOCK, 0)


@triton.jit
def hand_over(A, B):
    if tl.program_id(0) == 0:
        tl.store(A, 1.0)
    else:
        tl.store(B, tl.load(A))


@triton.jit
def read_between_writes(A, B):
    program = tl.program_id(0)
    if program == 1:
        tl.store(B, tl.load(A + 1))
    else:
        tl.store(A + program // 2, 1.0)


@triton.jit
def store_lanes(C, SAME: tl.constexpr):
    i = tl.arange(0, 8)
    tl.store(C + i // 2, tl.zeros([8], tl.float32) if SAME else i.to(tl.float32))


@triton.jit
def drop_tail(A, C, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(C + i, tl.where(i < n, tl.load(A + i), 0.0))


@triton.jit
def wrapped_offset(A, C, big, USE: tl.constexpr):
    i = tl.arange(0, 8)
    offset = i * big  # big = 2**30: int32 wraps from lane 2 on, and lane 4 is back at 0
    used = (i % 4 == 0) if USE else (i == 0)
    tl.store(C + i, tl.load(A + offset, mask=used, other=0.0))


@triton.jit
def hashed_index(A, C, big):
    i = tl.arange(0, 8)
    tl.store(C + i, tl.load(A + ((i * big + 12345) & 7)))


@triton.jit
def wrong_width(A, C):
    tl.store(C, tl.load(A.to(tl.pointer_type(tl.int16))).to(tl.float32))


@triton.jit
def in_device_function(A, C, n):
    i = tl.arange(0, 16)
    tl.store(C + i, _read(A + i), mask=i < n)


@triton.jit
def _read(P):
    return tl.load(P)


@triton.autotune([triton.Config({"N": 16}), triton.Config({"N": 8}), triton.Config({"N": 32})], key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["N"] == 0})
@triton.jit
def tuned(A, C, n, N: tl.constexpr, EVEN: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    if EVEN:
        tl.store(C + i, tl.load(A + i) * N)
    else:
        tl.store(C + i, tl.load(A + i, mask=i < n) * N, mask=i < n)


def _at_least_32(configs, _, **__):
    return [c for c in configs if c.kwargs["N"] >= 32]


@triton.autotune(
    [triton.Config({"N": 16}), triton.Config({"N": 32})],
    key=["n"],
    prune_configs_by={"early_config_prune": _at_least_32},
)
@triton.jit
def pruned(C, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(C + i, i * 0.0 + N, mask=i < n)


def _ask_the_device(configs, _, **__):
    raise RuntimeError(f"no device to choose among {len(configs)} configurations")


@triton.autotune(
    [triton.Config({"N": 16}), triton.Config({"N": 32})],
    key=["n"],
    prune_configs_by={"early_config_prune": _ask_the_device},
)
@triton.jit
def pruned_by_device(C, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(C + i, i * 0.0 + N, mask=i < n)


@triton.autotune([triton.Config({"N": n}, pre_hook=lambda args: args["D"].fill_(1)) for n in (16, 32)], key=["n"])
@triton.jit
def hooked(C, D, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(C + i, tl.load(D + i, mask=i < n), mask=i < n)


def closure(n):
    @triton.jit
    def inner(C):
        tl.store(C, tl.load(C) + n)

    return inner


@triton.jit
def in_tuple(pair, n):
    i = tl.arange(0, 16)
    tl.store(pair[1] + i, tl.load(pair[0] + i, mask=i < n), mask=i < n)


@triton.jit
def cast(A, C, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(C + i, tl.load(A + i).to(C.dtype.element_ty))


@triton.jit
def truncate(A, C, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(C + i, tl.load(A + i).to(tl.bfloat16, fp_downcast_rounding="rtz"))


@triton.jit
def elementwise(A, B, C, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(A + i)
    b = tl.load(B + i)
    tl.store(C + i, a + b)
    tl.store(C + N + i, a * b)
    tl.store(C + 2 * N + i, a - b)
    tl.store(C + 3 * N + i, tl.maximum(a, b))
    tl.store(C + 4 * N + i, tl.abs(a))
    tl.store(C + 5 * N + i, (a.to(tl.float32) * 3.0).to(tl.bfloat16))


@triton.jit
def matmul(A, B, C):
    i = tl.arange(0, 16)
    a = tl.load(A + i[:, None] * 16 + i[None, :])
    b = tl.load(B + i[:, None] * 16 + i[None, :])
    tl.store(C + i[:, None] * 16 + i[None, :], tl.dot(a, b))


@triton.jit
def zeros(C, zero: tl.constexpr):
    i = tl.arange(0, 2)
    tl.store(C + i, tl.where(i < 2, zero, 1.0) * tl.load(C + i))


@triton.jit
def add_tenth(C, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(C + i, tl.load(C + i) + 0.1)


@triton.jit
def reductions(A, R):
    x = tl.load(A + tl.arange(0, 8))
    tl.store(R, x.sum(0))
    tl.store(R + 1, tl.sum(x))
    tl.store(R + 2, x.max(axis=0))
    tl.store(R + 3, tl.zeros([], tl.float32) + tl.cdiv(7, 2))


@triton.jit
def libdevice_tanh(A, C):
    x = tl.load(A + tl.arange(0, 16))
    tl.store(C + tl.arange(0, 16), libdevice.tanh(x) + atan2(x, 2.0))


@triton.jit
def libdevice_bessel(C):
    tl.store(C, libdevice.j0(tl.load(C)))


@triton.jit
def wrong_shape(C):
    tl.store(C + tl.arange(0, 16), tl.load(C + tl.arange(0, 16)) + tl.zeros([8], tl.float32))


@triton.jit
def inline_assembly(C):
    x = tl.load(C)
    tl.store(C, tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1))


@triton.jit
def block_pointer(A, C, BM: tl.constexpr):
    a = tl.make_block_ptr(A, shape=(20,), strides=(1,), offsets=(0,), block_shape=(BM,), order=(0,))
    tl.store(C + tl.arange(0, BM), tl.load(a, boundary_check=(0,), padding_option="zero"))


@triton.jit
def arithmetic(A, B, O, F: tl.constexpr):
    """Every operation the fast path touches, on operands of every shape: five tiles of 16 x 8 and one of 16 x 16."""
    i = tl.arange(0, 16)
    j = tl.arange(0, 8)
    tile = O + i[:, None] * 8 + j[None, :]
    a = tl.load(A + i[:, None] * 8 + j[None, :])
    b = tl.load(B + i)[:, None]
    row = tl.load(B + j)[None, :]
    s = tl.load(B)
    x = a + b * row - 2 * a
    tl.store(tile, x.to(tl.float32))
    tl.store(tile + 128, (a / b + a / (b * b + 1.5) + 1 / (row + 2) - a / 3 + s / b).to(tl.float32))
    x = tl.where(i[:, None] % 3 == j[None, :] // 2, x, -0.0 * a)
    x = tl.maximum(tl.minimum(x, b), row - 1) + tl.where(x > s, 1, 0.25)
    tl.store(tile + 256, x.to(tl.float32))
    x = x + (tl.sum(a, 1)[:, None] - tl.max(a, 0)[None, :]) * (3 - s) + (i[:, None] << 1) + (7 // (j[None, :] + 1))
    tl.store(tile + 384, tl.clamp(x.to(tl.float32), -10.0, 10.0) + tl.exp2(-tl.abs(b).to(tl.float32)))
    n = b.to(tl.int32)
    tl.store(tile + 512, (((n * 3 + i[:, None]) % 5) ^ (n & 6) | (j[None, :] >> 1)).to(tl.float32))
    x = tl.dot(x.to(F), tl.trans(x).to(F), input_precision="ieee")
    tl.store(O + 640 + i[:, None] * 16 + i[None, :], x + tl.cumsum(x, 1) * 0.5)


@triton.jit
def offsets(ROWS, STRIDE, C, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    rows, stride = tl.load(ROWS + i), tl.load(STRIDE)  # int32 (N, 1) and an int64 number
    tl.store(C + i * N + j, rows * stride + j)
