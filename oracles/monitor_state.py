"""What the monitor knows: the shadow of a storage, a kernel argument's window on it, a violation."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

NOBODY, SEVERAL = -1, -2
"""Instead of a program's number in `Shadow.writer`, `reader` and `atomic`."""

WINDOW_SHIFT = 44
"""Every kernel argument gets its own 2**44 bytes of addresses, so an address names its argument and never touches real memory."""
HALF_WINDOW = 1 << (WINDOW_SHIFT - 1)

_MAX_READ_LOG = 4_000_000
"""Logged reads of one storage (32 MB) after which they are entered in its owner table."""

_NUMPY = {
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float16: np.dtype(np.float16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.bool: np.dtype(np.bool_),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
}

Array = np.ndarray[Any, Any]


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The numpy type the interpreter calculates with; unsigned bytes for what numpy has no name for (float8)."""
    return _NUMPY.get(dtype, np.dtype(f"u{dtype.itemsize}"))


def memory_of(storage: torch.UntypedStorage, dtype: torch.dtype) -> Array:
    """The storage's own bytes as a flat numpy array of `dtype`, a view that does not keep the storage alive.

    Not by `Tensor.numpy`, which would forbid the program under test to resize the storage.
    """
    count = storage.nbytes() // dtype.itemsize
    if not count:
        return np.empty(0, numpy_dtype(dtype))
    raw: Any = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(storage.data_ptr())
    view: Array = np.frombuffer(raw, np.uint8).view(numpy_dtype(dtype))
    return view


def key_of(tensor: Tensor) -> int:
    """What identifies the tensor's storage while it lives."""
    return int(tensor.untyped_storage()._cdata)


def flat(values: Array, tensor: Tensor) -> Tensor:
    """The elements of `values` (one per element of the tensor's storage) that the tensor shows, in its shape; a view."""
    return torch.from_numpy(values).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


class Shadow:
    """What is known about each element of one storage.

    `initialised` None means all of them. `writer`, `reader` and `atomic` hold the program of this launch that touched an element;
    they are made when something is first written, since memory that is only read can have no race: reads are logged until then.
    """

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.item = tensor.element_size()
        self.memory = memory_of(storage, tensor.dtype)
        self.dtype = tensor.dtype
        self.storage = storage  # kept alive: while the monitor lives, nothing else gets its address
        self.place = storage.data_ptr(), storage.nbytes()
        self.initialised: Array | None = None
        self.poison: bytes | None = None
        self.values: Array | None = None  # exact mode: the unrounded float64 values
        self.lost = ""  # exact mode: the operation after which `values` are no longer exact
        self.reads: list[tuple[int, Array]] = []
        self.logged = 0
        self.writer: Array | None = None
        self.reader: Array | None = None
        self.atomic: Array | None = None

    @property
    def moved(self) -> bool:
        """Whether the storage was resized, so that its memory lies elsewhere."""
        return self.place != (self.storage.data_ptr(), self.storage.nbytes())

    def begin_launch(self) -> None:
        """Forget which program touched what: launches are ordered."""
        self.reads, self.logged, self.writer, self.reader, self.atomic = [], 0, None, None, None
        if self.initialised is not None and self.initialised.all():
            self.initialised = None

    def log_read(self, program: int, elements: Array) -> None:
        """Remember a read for the case that something is written later in this launch."""
        self.reads.append((program, elements))
        self.logged += elements.size
        if self.logged > _MAX_READ_LOG:
            self.owners()

    def owners(self) -> tuple[Array, Array, Array]:
        """writer, reader, atomic; on the first write they are made and the logged reads are entered."""
        if self.writer is None or self.reader is None or self.atomic is None:
            self.writer, self.reader, self.atomic = (np.full(self.memory.size, NOBODY, np.int32) for _ in range(3))
            for program, elements in self.reads:
                enter(self.reader, elements, program)
            self.reads = []
        return self.writer, self.reader, self.atomic

    def unrounded(self) -> Array:
        """The float64 values of the exact mode; at first what memory holds."""
        if self.values is None:
            self.values = self.memory.astype(np.float64)
        return self.values

    def refresh(self) -> None:
        """Take every value from memory again."""
        self.values = self.memory.astype(np.float64)

    def forget(self, elements: Array, why: str) -> None:
        """Something wrote these elements that has no unrounded value."""
        if self.values is not None:
            self.values[elements] = self.memory[elements].astype(np.float64)
            self.lost = self.lost or why

    def regrouped(self, tensor: Tensor) -> Shadow:
        """The shadow of the same storage seen with another element size: an element is initialised when all its bytes are."""
        other = Shadow(tensor)
        if self.values is not None:
            other.lost = "seen with another dtype"
        if self.initialised is None:
            return other
        item = tensor.element_size()
        in_bytes = np.repeat(self.initialised, self.item)
        whole: Array = in_bytes[: in_bytes.size // item * item].reshape(-1, item)
        other.initialised = np.logical_and.reduce(whole, axis=1)
        return other


def enter(owner: Array, elements: Array, program: int) -> None:
    """Note that `program` touched `elements`."""
    before = owner[elements]
    owner[elements] = np.where((before == NOBODY) | (before == program), program, SEVERAL)


@dataclass
class Window:
    """One kernel argument of one launch: a tensor, its shadow and the virtual addresses it answers to."""

    name: str
    tensor: Tensor
    shadow: Shadow
    offset: int  # of the tensor's first element in its storage
    base: int  # virtual address of the tensor's first element
    span: int  # elements from the first to the last the tensor shows
    shown: Array | None  # which elements of the span the tensor shows; None: all
    origin: np.uint64  # virtual address of element 0 of the storage
    shift: int  # log2 of the element size
    last: int  # virtual address of the last element


@dataclass(frozen=True)
class Violation:
    """The first of `accesses` equal wrongs, which together had `lanes` lanes; `element` counts from the tensor's first."""

    kind: str
    kernel: str
    argument: str
    file: str
    line: int
    program: tuple[int, ...]
    index: tuple[int, ...] | None
    element: int
    size: int
    lanes: int
    accesses: int
    floating: bool

    def __str__(self) -> str:
        where = list(self.index) if self.index is not None else f"element {self.element}"
        return f"{self.kind}: {self.kernel}:{self.line} argument {self.argument} {where} program {self.program} ({self.lanes} lanes)"


class Traffic(NamedTuple):
    """How much one kernel moved to or from one argument."""

    bytes: int
    elements: int


@lru_cache(maxsize=4096)
def span_and_shown(size: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, Array | None]:
    """Elements from a view's first to its last, and which of them it shows (None: all)."""
    if 0 in size:
        return 0, None
    span = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if _dense(zip(stride, size, strict=True)):
        return span, None
    shown = torch.zeros(span, dtype=torch.bool)
    shown.as_strided(size, stride).fill_(True)
    return span, None if bool(shown.all()) else shown.numpy()


def _dense(steps: Iterable[tuple[int, int]]) -> bool:
    expected = 1
    for step, n in sorted((s, n) for s, n in steps if n > 1 and s):
        if step != expected:
            return False
        expected = step * n
    return True


def coordinates(tensor: Tensor, element: int) -> tuple[int, ...] | None:
    """Index of the element `element` steps after the tensor's first; None where the tensor shows no such element."""
    index, rest = [0] * tensor.dim(), element
    for dim in sorted(range(tensor.dim()), key=tensor.stride, reverse=True):
        if tensor.size(dim) > 1 and tensor.stride(dim):
            index[dim] = min(rest // tensor.stride(dim), tensor.size(dim) - 1)
            rest -= index[dim] * tensor.stride(dim)
    return tuple(index) if rest == 0 and tensor.numel() else None


def merged(old: Violation | None, new: Callable[[], Violation], lanes: int) -> Violation:
    """The violation with one more access; its place is that of the first."""
    if old is None:
        return new()
    return replace(old, lanes=old.lanes + lanes, accesses=old.accesses + 1)
