"""Targets that break the device, run out of memory, or leave none to the harness."""

import os

import torch
from layers import attend

CALLS = []


def _plain(q, k, v, is_causal=False, scale=None):
    return attend(q, k, v, keep=None, scale=scale)[0]


def out_of_memory(q, k, v, is_causal=False, scale=None):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def host_out_of_memory(q, k, v, is_causal=False, scale=None):
    raise MemoryError


def dies(q, k, v, is_causal=False, scale=None):
    os._exit(7)


def breaks_the_device(q, k, v, is_causal=False, scale=None):
    os._exit(7)


def device_is_broken():
    """Every process that loads a target from here with BROKEN_DEVICE set multiplies wrongly."""
    product = torch.Tensor.__matmul__
    torch.Tensor.__matmul__ = lambda a, b: product(a, b) + 1


def no_memory_is_left():
    """As above, with HOG set: the harness's own copies of what the target answers find no memory."""

    def to(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    torch.Tensor.to = to


if os.environ.get("BROKEN_DEVICE"):
    device_is_broken()
if os.environ.get("HOG"):
    no_memory_is_left()


def plain(q, k, v, is_causal=False, scale=None):
    return _plain(q, k, v, is_causal, scale)
