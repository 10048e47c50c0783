"""Targets that are wrong, each in one way."""

import ctypes
import os
import signal
import time

import torch
from layers import attend, causal_mask


def _plain(q, k, v, is_causal=False, scale=None):
    keep = causal_mask(q.shape[2], k.shape[2], bottom_right=False) if is_causal else None
    return attend(q, k, v, keep=keep, scale=scale)[0]


def wrong_value(q, k, v, is_causal=False, scale=None):
    return _plain(q, k, v, is_causal, scale) * 1.01


def ignores_causal(q, k, v, is_causal=False, scale=None):
    return _plain(q, k, v, False, scale)


def writes_input(q, k, v, is_causal=False, scale=None):
    o = _plain(q, k, v, is_causal, scale)
    k.data.mul_(2.0)
    return o


def writes_past_input(q, k, v, is_causal=False, scale=None):
    o = _plain(q, k, v, is_causal, scale)
    span = sum((n - 1) * s for n, s in zip(q.shape, q.stride(), strict=True)) + 1
    q.data.as_strided((span + 1,), (1,), q.storage_offset())[-1] = 7.0
    return o


def writes_past_workspace(q, k, v, is_causal=False, scale=None):
    work = torch.empty(8)
    ctypes.memset(work.data_ptr() + work.nbytes, 0, 4)
    return _plain(q, k, v, is_causal, scale)


def uninitialised(q, k, v, is_causal=False, scale=None):
    return _plain(q, k, v, is_causal, scale) + 0.0 * torch.empty(1)


def returns_input(q, k, v, is_causal=False, scale=None):
    return (
        v.expand(q.shape[0], q.shape[1], -1, -1)[:, :, : q.shape[2]]
        if k.shape[2] == 1
        else _plain(q, k, v, is_causal, scale)
    )


def returns_none(q, k, v, is_causal=False, scale=None):
    return None


def returns_pair(q, k, v, is_causal=False, scale=None):
    return _plain(q, k, v, is_causal, scale), None


def returns_wrong_shape(q, k, v, is_causal=False, scale=None):
    return _plain(q, k, v, is_causal, scale).transpose(1, 2).flatten(2)


def returns_double(q, k, v, is_causal=False, scale=None):
    return _plain(q, k, v, is_causal, scale).double()


def detached(q, k, v, is_causal=False, scale=None):
    return _plain(q, k, v, is_causal, scale).detach()


def drops_key_gradient(q, k, v, is_causal=False, scale=None):
    return _plain(q, k.detach(), v, is_causal, scale)


def prints(q, k, v, is_causal=False, scale=None):
    print("hello from python")
    os.write(2, b"hello from C\n")
    return _plain(q, k, v, is_causal, scale)


def changes_state(q, k, v, is_causal=False, scale=None):
    o = _plain(q, k, v, is_causal, scale)
    torch.set_float32_matmul_precision("high")
    torch.rand(1)
    return o


def raises(q, k, v, is_causal=False, scale=None):
    raise RuntimeError("no kernel image")


def exits(q, k, v, is_causal=False, scale=None):
    os._exit(0)


def leaves(q, k, v, is_causal=False, scale=None):
    raise SystemExit(3)


def interrupts(q, k, v, is_causal=False, scale=None):
    raise KeyboardInterrupt


def refuses_long(q, k, v, is_causal=False, scale=None):
    if k.shape[2] > 4:
        raise NotImplementedError("more than 4 keys")
    return _plain(q, k, v, is_causal, scale)


def crashes_long(q, k, v, is_causal=False, scale=None):
    if k.shape[2] > 4:
        ctypes.string_at(0)
    return _plain(q, k, v, is_causal, scale)


def hangs_long(q, k, v, is_causal=False, scale=None):
    while k.shape[2] > 4:
        time.sleep(0.1)
    return _plain(q, k, v, is_causal, scale)


def killed_always(q, k, v, is_causal=False, scale=None):
    os.kill(os.getpid(), signal.SIGKILL)


_CALLS = []


def alternates(q, k, v, is_causal=False, scale=None):
    """Each call differs from the one before by a rounding."""
    _CALLS.append(1)
    return _plain(q, k, v, is_causal, scale) * (1.0 + 2.0**-23 * (len(_CALLS) % 2))


_KNOWN_SHAPES = {}


def caches_scale(q, k, v, is_causal=False, scale=None):
    """Keeps one scale per shape: right until the same shape comes with another scale, and then wrong for the first."""
    key = q.shape
    before = _KNOWN_SHAPES.get(key, scale)
    _KNOWN_SHAPES[key] = scale
    return _plain(q, k, v, is_causal, before)
