"""Messages between a judge and its worker: a JSON object and raw tensor bytes, with lengths in front. Never pickle.

Frame: 4 bytes magic, uint32 length of the JSON, uint64 length of the tensor bytes (little endian), JSON, bytes. The JSON's "tensors"
lists [name, dtype, shape] in the order of the bytes.
"""

from __future__ import annotations

import json
import math
import os
import select
import struct
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

MAGIC = b"fpf1"
HEAD = struct.Struct("<4sIQ")
MAX_JSON = 1 << 26
DTYPES = {str(d).removeprefix("torch."): d for d in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
)}  # fmt: skip


class Closed(Exception):
    """The other side is gone."""


class Late(Exception):
    """Nothing complete arrived before the deadline."""


class Garbled(Exception):
    """What arrived is no message."""


def send(fd: int, message: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
    """Write one message; raises Closed."""
    flat = {name: x.detach().cpu().contiguous() for name, x in (tensors or {}).items()}
    listed = [[name, str(x.dtype).removeprefix("torch."), list(x.shape)] for name, x in flat.items()]
    text = json.dumps({**message, "tensors": listed}).encode()
    body = [_bytes(x) for x in flat.values()]
    _write(fd, b"".join([HEAD.pack(MAGIC, len(text), sum(map(len, body))), text, *body]))


def receive(fd: int, deadline: float | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The next message and its tensors; `deadline` is a time.monotonic(). Raises Closed, Late or Garbled."""
    magic, text_length, body_length = HEAD.unpack(_read(fd, HEAD.size, deadline))
    if magic != MAGIC or text_length > MAX_JSON:
        raise Garbled(f"message must begin with {MAGIC!r}, got {magic!r}")
    message = json.loads(bytes(_read(fd, text_length, deadline)))
    body = _read(fd, body_length, deadline)
    tensors, at = {}, 0
    for name, dtype, shape in message.pop("tensors"):
        count = math.prod(shape)
        tensors[name] = _tensor(body, DTYPES[dtype], at, shape, count)
        at += count * DTYPES[dtype].itemsize
    return message, tensors


def _bytes(x: Tensor) -> memoryview:
    if not x.numel():
        return memoryview(b"")
    flat = x.as_strided((x.numel(),), (1,))  # one element is contiguous whatever its stride, which `view` minds
    return memoryview(flat.view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]


def _tensor(body: bytearray, dtype: torch.dtype, at: int, shape: list[int], count: int) -> Tensor:
    if not count:
        return torch.empty(shape, dtype=dtype)
    return (
        torch.frombuffer(body, dtype=torch.uint8, offset=at, count=count * dtype.itemsize)
        .clone()
        .view(dtype)
        .view(shape)
    )


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except (BrokenPipeError, OSError) as e:
            raise Closed from e


def _read(fd: int, count: int, deadline: float | None) -> bytearray:
    out = bytearray(count)
    view = memoryview(out)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while view:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and (left <= 0 or not poll.poll(1000 * left)):
            raise Late
        n = os.readv(fd, [view])
        if not n:
            raise Closed
        view = view[n:]
    return out
