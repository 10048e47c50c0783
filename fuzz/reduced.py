"""A smaller case in the image of a large one: heads of the same width and grouping, lengths with the same remainders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from .case import Case
from .masks import Mask
from .tensors import MAX_ORACLE_BYTES, oracle_bytes

MOST_BYTES = MAX_ORACLE_BYTES // 2
"""Of the memory that judging a reduced case takes: below what a case file may ask for, so that a folder replays fast."""
TILE = 128
OF_LENGTH = {"lengths", "lengths_q", "lengths_k", "length", "left", "right"}
"""Fields of masks that count queries or keys."""


def reduced(case: Case, most: int = MOST_BYTES) -> Case:
    """The case itself if it can be judged within `most` bytes, else one with fewer batches, groups of heads and tiles of rows."""
    parts = 1
    while oracle_bytes(case) > most and (smaller := _smaller(case, parts)) is not None:
        if oracle_bytes(smaller) <= most:
            return smaller
        parts *= 2
    return case


def _smaller(case: Case, parts: int) -> Case | None:
    """At most two batches and groups, and one in `parts` of the tiles; None once no length holds a tile to take away."""
    if parts > 2 * max(case.Lq, case.Lk, 1):
        return None
    batches, groups = (2, 2) if parts < 8 else (2, 1) if parts < 32 else (1, 1)  # two show what a wrong stride does
    Hkv = min(case.Hkv, groups)
    sizes: dict[str, Any] = {"B": min(case.B, batches), "Hkv": Hkv, "Hq": Hkv * case.G}

    def shorter(n: int) -> int:
        return shortened(n, parts)

    mask = _scaled(case.mask, shorter, min(case.B, batches))
    if mask.kind == "packed":
        lengths = {n: getattr(mask, n)[: max(2, len(getattr(mask, n)) // parts)] for n in ("lengths_q", "lengths_k")}
        mask = replace(mask, **lengths)  # type: ignore[type-var]
        return case.but(**sizes, mask=mask, Lq=sum(lengths["lengths_q"]), Lk=sum(lengths["lengths_k"]))
    return case.but(**sizes, mask=mask, Lq=shorter(case.Lq), Lk=shorter(case.Lk))


def shortened(n: int, parts: int) -> int:
    """A length with the same remainder by TILE and one in `parts` of its whole tiles, at least one where there was one."""
    tiles = n // TILE
    return max(tiles // parts, min(tiles, 1)) * TILE + n % TILE


def _scaled(mask: Mask, shorter: Callable[[int], int], batches: int) -> Mask:
    """The mask with every length in it shortened like the case's own."""
    changed: dict[str, Any] = {}
    for f in fields(mask):  # type: ignore[arg-type]
        value = getattr(mask, f.name)
        if isinstance(value, Mask):
            changed[f.name] = _scaled(value, shorter, batches)
        elif f.name in OF_LENGTH and isinstance(value, tuple):
            changed[f.name] = tuple(map(shorter, value[: batches if mask.kind == "padding" else len(value)]))
        elif f.name in OF_LENGTH and value > 0:
            changed[f.name] = shorter(value)
    return replace(mask, **changed)  # type: ignore[type-var]
