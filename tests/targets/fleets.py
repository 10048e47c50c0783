"""Targets for several workers: wrong or dying in some cases, and telling which process runs them."""

import os
from pathlib import Path

from layers import attend


def plain(q, k, v, is_causal=False, scale=None):
    return attend(q, k, v, keep=None, scale=scale)[0]


def wrong_tail(q, k, v, scale=None):
    if k.shape[2] > 16:
        k, v = k[:, :, :-1], v[:, :, :-1]
    return plain(q, k, v, scale=scale)


def dies_once_wide(q, k, v, scale=None):
    if q.shape[3] > 32:
        os._exit(7)
    return plain(q, k, v, scale=scale)


def telling(q, k, v, scale=None):
    Path(os.environ["FLEET_PIDS"], str(os.getpid())).write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    return plain(q, k, v, scale=scale)
