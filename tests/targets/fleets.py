"""Targets for several workers: wrong or dying in some cases, and telling which process runs them."""

import os
from pathlib import Path

from layers import attend, causal_mask


def plain(q, k, v, is_causal=False, scale=None):
    keep = causal_mask(q.shape[2], k.shape[2], False) if is_causal else None
    return attend(q, k, v, keep=keep, scale=scale)[0]


def wrong_tail(q, k, v, is_causal=False, scale=None):
    if k.shape[2] > 16 and not is_causal:
        k, v = k[:, :, :-1], v[:, :, :-1]
    return plain(q, k, v, is_causal, scale)


def dies_when_wide(q, k, v, is_causal=False, scale=None):
    if q.shape[3] > 32:
        os._exit(7)
    return plain(q, k, v, is_causal, scale)


def telling(q, k, v, is_causal=False, scale=None):
    Path(os.environ["FLEET_PIDS"], str(os.getpid())).write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    return plain(q, k, v, is_causal, scale)
