"""Packed sequences: how a case of them is drawn, and which cases of them are simpler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .case import Case
from .hashing import number
from .masks import Causal, Full, Mask, Packed
from .region import Region
from .simpler import below

EDGES = (1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
"""Lengths of sequences: one, small, beside tile edges."""
COUNTS = (2, 2, 3, 3, 4, 1, 5, 8, 13, 24)
EMPTY = ("", "", "", "q", "k", "qk", "q k")
"""Which sequences have length 0: none, some in q, some in k, some in both, some in q and others in k."""
INSIDE: tuple[Mapping[str, Any], ...] = (
    {}, {"causal": "bottom_right"}, {"causal": "top_left"}, {}, {"causal": "bottom_right"}, {"left": 1, "right": 1},
    {"causal": "bottom_right", "left": 2}, {"left": 16, "right": 0}, {"right": 0}, {"causal": "top_left", "left": 8},
)  # fmt: skip
"""Masks inside each sequence."""


def packed(bytes_: Mapping[str, int], region: Region, same: bool, Lq: int, Lk: int) -> dict[str, Any]:
    """Sequences packed into lengths that the sizes have room for, in one batch; lengths of q and k alike if asked."""
    inside, count, empty, equal = (bytes_[n] for n in ("kind", "1a", "1b", "1c"))
    draw = Draw(inside, count, empty, equal, bytes_["2a"] << 8 | bytes_["2b"])
    return replace(draw, least=max(region.min_len, 1), zero=region.empty_sequences, same=same).fields(Lq, Lk)


@dataclass(frozen=True)
class Draw:
    """What packed sequences are drawn from: bytes, the least length that is not 0, whether 0 is served, whether q and k agree."""

    inside: int
    count: int
    empty: int
    equal: int
    seed: int
    least: int = 1
    zero: bool = True
    same: bool = False

    def fields(self, Lq: int, Lk: int) -> dict[str, Any]:
        """B, Lq, Lk and the mask of a packed case whose lengths add up to at most these."""
        same = self.same or self.equal >= 160
        if same:
            Lq = Lk = min(Lq, Lk)
        count = _pick(COUNTS, self.count)
        if not self.zero:
            Lq, Lk = max(Lq, self.least), max(Lk, self.least)
            count = max(1, min(count, Lq // self.least, Lk // self.least))
        none_q, none_k = self._empty(count)
        lengths_q = split(Lq, count, none_q, self.seed, self.least)
        lengths_k = lengths_q if same else split(Lk, count, none_k, self.seed + 1, self.least)
        mask = Packed(lengths_q, lengths_k, **_pick(INSIDE, self.inside))
        return {"B": 1, "Lq": Lq, "Lk": Lk, "mask": mask}

    def _empty(self, count: int) -> tuple[set[int], set[int]]:
        """The sequences without queries, and those without keys."""
        kind = _pick(EMPTY, self.empty) if self.zero else ""
        chosen = {s for s in range(count) if number(self.seed, 100 + s) % 3 == 0} or {number(self.seed, 99) % count}
        others = {s for s in range(count) if number(self.seed, 200 + s) % 3 == 0} - chosen
        return chosen if "q" in kind else set(), others if kind == "q k" else chosen if "k" in kind else set()


def _pick(table: Sequence[Any], byte: int) -> Any:
    return table[byte * len(table) >> 8]


def split(total: int, count: int, empty: set[int], seed: int, least: int) -> tuple[int, ...]:
    """`count` lengths that add up to `total`: 0 for the empty ones, the others at least `least`, beside tile edges, the last the rest.

    Where the total does not reach for every sequence, the later ones are empty too.
    """
    out = [0] * count
    live = [s for s in range(count) if s not in empty][: total // least] or [0][: min(total, 1)]
    left = total
    for n, s in enumerate(live[:-1]):
        room = left - (len(live) - 1 - n) * least
        fit = [e for e in EDGES if least <= e <= room] or [least]
        out[s] = fit[number(seed, s) % len(fit)]
        left -= out[s]
    if live:
        out[live[-1]] = left
    return tuple(out)


def simpler(case: Case) -> Iterator[Mapping[str, Any]]:
    """Changes of a packed case to one with fewer or shorter sequences, or to an ordinary batch."""
    mask = case.mask
    if not isinstance(mask, Packed):
        return
    yield from _ordinary(mask)
    for made in _packed(mask):
        yield {"mask": made, "Lq": sum(made.lengths_q), "Lk": sum(made.lengths_k)}


def _ordinary(mask: Packed) -> Iterator[Mapping[str, Any]]:
    """Sequences of equal length as a batch, and one sequence alone."""
    inside = mask.inside
    plain: Mask = Full() if not inside else inside[0] if len(inside) == 1 else inside[0] & inside[1]
    pairs = [p for p in zip(mask.lengths_q, mask.lengths_k, strict=True) if min(p)]
    for B, (Lq, Lk) in ((n, p) for p in sorted(set(pairs)) for n in (1, 2) if n <= len(mask.lengths_q)):
        for m in dict.fromkeys((Full(), Causal(), plain)):
            yield {"mask": m, "B": B, "Lq": Lq, "Lk": Lk}


def _packed(mask: Packed) -> Iterator[Packed]:
    pairs = list(zip(mask.lengths_q, mask.lengths_k, strict=True))
    ones = [(min(q, 1), min(k, 1)) for q, k in pairs]
    yield from _of(mask, ones)
    for fewer in _fewer(pairs):
        yield from _of(mask, [(min(q, 1), min(k, 1)) for q, k in fewer])
        yield from _of(mask, fewer)
    yield from _plainer(mask)
    for s, (q, k) in enumerate(pairs):
        both = [(n, n) for n in below(q)] if q == k else []
        for changed in (
            *both,
            *((n, k) for n in below(q)),
            *((q, n) for n in below(k)),
            *[(1, k)] * (not q),
            *[(q, 1)] * (not k),
        ):
            yield from _of(mask, [*pairs[:s], changed, *pairs[s + 1 :]])
    for s in range(len(pairs) - 1):
        (q, k), (q2, k2) = pairs[s : s + 2]
        yield from _of(mask, [*pairs[:s], (q2, k2), (q, k), *pairs[s + 2 :]])
        yield from _of(mask, [*pairs[:s], (q + q2, k + k2), *pairs[s + 2 :]])


def _fewer(pairs: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """The sequences without a half of them, a quarter, ..., one."""
    size = len(pairs) // 2
    while size:
        yield from (pairs[:at] + pairs[at + size :] for at in range(0, len(pairs), size))
        size //= 2


def _of(mask: Packed, pairs: list[tuple[int, int]]) -> Iterator[Packed]:
    if pairs:
        q, k = zip(*pairs, strict=True)
        yield replace(mask, lengths_q=q, lengths_k=k)


def _plainer(mask: Packed) -> Iterator[Packed]:
    """The same sequences with less inside each."""
    yield replace(mask, causal="", left=-1, right=-1)
    yield from (replace(mask, causal=causal) for causal in ("", "top_left"))
    yield from (replace(mask, left=-1), replace(mask, right=-1))
    yield from (replace(mask, left=n) for n in below(mask.left))
    yield from (replace(mask, right=n) for n in below(mask.right))
