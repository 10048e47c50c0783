"""What the strategies choose from: tables sorted simplest first, an entry repeated as often as it is likely.

One byte picks an entry (two where a table has more than 256), and a smaller byte picks a simpler one, so that shrinking the
byte shrinks the entry.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations, product
from typing import TypeVar

from .case import LAYOUTS

Entry = TypeVar("Entry")

TILES = (8, 16, 32, 64, 128)
EDGES = {t: (t - 1, t, t + 1, 2 * t - 1, 2 * t, 2 * t + 1) for t in TILES}
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 24, 32, 33, 40, 64, 72, 80, 96, 128, 192, 256)
AXES = tuple("".join(a for a in "bhqk" if a in chosen) for n in range(5) for chosen in combinations("khqb", n))
"""Every subset of the axes b, h, q, k."""
BIAS_AXES = ("qk", *(axes for axes in AXES if axes != "qk"))


def pick(table: Sequence[Entry], byte: int, low: int = 0) -> Entry:
    """The entry of a table that a byte chooses, with a second byte for tables that need one."""
    return table[(byte << 8 | low) * len(table) >> 16]


def pick_within(table: Sequence[int], most: int, byte: int, low: int = 0) -> int:
    """The size in an ascending table that the bytes choose; where it exceeds `most`, one of those that do not.

    Bytes that fit mean the same size whatever the bound, so that shrinking one size leaves the others.
    """
    size = pick(table, byte, low)
    return size if size <= most else pick(table[: max(bisect_right(table, most), 1)], byte, low)


def gate(percent: int, byte: int) -> int | None:
    """None for the lower bytes, and a byte again for the upper `percent` of a hundred."""
    first = 256 - round(2.56 * percent)
    return None if byte < first else (byte - first) * 256 // (256 - first)


def weighted(weights: Iterable[tuple[Entry, int]]) -> tuple[Entry, ...]:
    """Each entry as often as its weight says, in the given order."""
    return tuple(entry for entry, n in weights for _ in range(n))


@lru_cache(maxsize=16)
def lengths(least: int, most: int) -> tuple[int, ...]:
    """Every length from 1 (or `least`) on; half of the table are small ones and those beside tile edges."""
    often = {1: 18, 2: 6, 3: 6} | dict.fromkeys(range(4, 18), 3)
    for tile, weight in zip(TILES, (3, 6, 9, 12, 15), strict=True):
        often |= {n: often.get(n, 0) + weight for n in EDGES[tile]}
    more = max(most // 300, 1)
    return weighted((n, 1 + more * often.get(n, 0)) for n in range(max(least, 1), most + 1))


@lru_cache(maxsize=64)
def widths(allowed: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Head widths, ascending; the large ones as likely as the small ones together."""
    chosen = sorted(d for d in (allowed or WIDTHS) if d <= most)
    return weighted((d, 3 if d >= 40 or d in (8, 16, 24) else 2) for d in chosen)


SHAPES = weighted(
    (
        (("length", 1 << 12, 1 << 30), 4),
        (("length", 1 << 10, 17), 5),
        (("width", 1 << 13, 33), 8),
        (("heads", 1 << 13, 33), 4),
        (("length", 1 << 15, 130), 6),
        (("width", 1 << 16, 130), 3),
        (("length", 1 << 18, 1 << 30), 2),
    )
)
"""(what is drawn first, the most that B*Hq*Lq*Lk*max(D, Dv) may be, the longest length): most cases are small.

The first one does not bound the length, so that a shrunk case can have any.
"""
LONGEST = max(budget for _, budget, _ in SHAPES)
"""No length above this fits a budget."""

BATCHES = weighted(((1, 11), (2, 5), (3, 2)))
KV_HEADS = weighted(((1, 5), (2, 4), (3, 2)))
RATIOS = weighted(((1, 6), (2, 2), (3, 2), (5, 2), (7, 2), (12, 2)))
SCALES = (1.0, 0.37, 0.0, -0.25, -1.0, 1e-4, 8.0)
SOFTCAPS = (30.0, 50.0, 5.0, 1.0)
DROPOUTS = (0.5, 0.1, 0.9)
SUBSETS = ("qk", "qv", "kv", "q", "k", "v", "")
"""requires_grad other than all of q, k, v; the gradient of the bias comes with the bias."""
MASK_LAYOUTS = tuple(name for name in LAYOUTS[1:] if name != "packed")
SPANS = (-1, 0, 1, 2, 3, *sorted(n for t in TILES for n in EDGES[t][:3]), 300)
"""Window sides and prefix lengths: open, narrow, beside tile edges, wider than anything."""
BLOCKS = tuple(product((1, 4, 8, 16, 64), repeat=2))
PERCENTS = (50, 90, 10)
