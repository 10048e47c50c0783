"""Compile buckets: on a device where a target compiles, few structures are drawn first, then many run-time shapes inside each.

A bucket is a case's structure: every field but those that a kernel takes at run time (RUN_TIME), and the kinds of its mask. A hunt
opens one bucket after the other, each chosen for the structural kinds that no earlier one has, until the variants that were
compiled come near the limit. Sizes are drawn freely as long as they compile nothing; where they do, or at the limit, only those are
drawn that a compiler tells no better apart than those that ran.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from math import gcd
from typing import Any

from .case import Case
from .learn import kinds
from .masks import Packed
from .region import Region
from .strategies import CHOICES, FEATURES, Menu, decode, menu_of
from .tensors import MAX_ORACLE_BYTES, oracle_bytes

VARIANTS = 48
"""Counted variants of one run: at a few seconds each they cost about two minutes."""
PER_BUCKET = 8
"""Cases between two openings: what a bucket compiles is used before the next one compiles."""
CANDIDATES = 96
"""Structures of which the next bucket is chosen."""
TRIES = 8
"""Draws of a shape that needs no further variant, before the sizes of an earlier case are taken."""
USELESS = 4
"""Refusals, and no acceptance, after which a bucket is closed."""
RESERVE = 8
"""Variants that are left for sizes which compile anew after all, when no further bucket is opened."""
SEEN = 16
"""New sizes in a bucket that must have compiled nothing, one in so many excepted, for sizes to be run-time arguments."""
WORK = 1 << 18
"""The most that B * Hq * Lq * Lk * max(D, Dv) may be, as in the shapes of `ladders`."""
LONGEST = 300

RUN_TIME = frozenset({"B", "Hq", "Hkv", "Lq", "Lk", "data", "grad", "scale", "seed", "mask"})
"""Fields that kernels take as arguments; the mask's kinds are structure, its numbers are not."""
DRAWN_ANEW = frozenset({
    "1a", "1b", "1c", "2a", "2b", "2c", "grad", "scale", "data", "B zero", "Lq zero", "Lk zero", "shape", "B", "Hkv",
    "Lk", "Lk low", "Lq", "Lq low", "seed", "seed low",
})  # fmt: skip
"""Choices of a case that do not change its bucket."""
STRUCTURE = tuple(f.name for f in fields(Case) if f.name not in RUN_TIME)
SHAPE = ("B", "Hq", "Hkv", "Lq", "Lk")


def bucket(case: Case) -> tuple[Any, ...]:
    """What makes a kernel compile anew, for any target: equal for cases that differ in run-time arguments alone."""
    heads = (case.G - 1).bit_length()  # tiles are shared among as many heads as the next power of two
    return (*(getattr(case, n) for n in STRUCTURE), heads, tuple(type(m).__name__ for m in case.mask.walk()))


def shape_class(case: Case) -> tuple[Any, ...]:
    """The bucket, and what may be known of a size when a kernel is compiled: its power of two, and which one up to 16 divides it."""
    return (bucket(case), *((n.bit_length(), gcd(n, 16)) for n in (getattr(case, name) for name in SHAPE)))


@dataclass
class Bucket:
    """One structure: the case and the bytes that it was decoded from, and how its cases went."""

    case: Case
    bytes: bytes
    accepted: int = 0
    refused: int = 0

    @property
    def useful(self) -> bool:
        """Not all of its cases were refused."""
        return self.accepted > 0 or self.refused < USELESS


@dataclass
class Buckets:
    """The buckets of one hunt. `variants` says how many variants were compiled until now, `spent` whether that took too long."""

    seed: int
    limit: int = VARIANTS
    variants: Callable[[], int] = lambda: 0
    spent: Callable[[], bool] = lambda: False
    all: list[Bucket] = field(default_factory=list)
    cases: int = 0
    costliest: int = 3  # variants that one case added
    _covered: set[str] = field(default_factory=set)
    _classes: dict[tuple[Any, ...], Case] = field(default_factory=dict)
    _known: int = 0
    _sizes: int = 0  # cases of a known bucket with sizes that were new
    _sizes_built: int = 0  # those that compiled something

    @property
    def room(self) -> int:
        """How many more cases may compile something, each as much as the costliest did."""
        return 0 if self.spent() else max(0, (self.limit - RESERVE - self.variants()) // self.costliest)

    @property
    def sizes_are_arguments(self) -> bool:
        """A new size in a known bucket compiles nothing, as far as was seen, and the limit is not reached."""
        return self._sizes >= SEEN > 0 and self._sizes_built * SEEN <= self._sizes and self.variants() < self.limit

    def round(self, region: Region, count: int, number: int) -> list[Case]:
        """The next cases; a function of the seed, the region, and what was added until now."""
        menu = menu_of(region, max(region.min_len, 1, min(region.max_len, LONGEST)), FEATURES)
        seed, room = self.seed * 1_000_003 + number, self.room
        wanted = 1 + (self.cases + count - 1) // PER_BUCKET - len(self.all)
        opened = self._open(menu, min(max(1, wanted), room, count), seed)
        live = opened + [b for b in self.all if b.useful and b not in opened and not region.refuses(b.case)]
        out = [b.case for b in opened]
        ran, free = set(self._classes) | set(map(shape_class, out)), self.sizes_are_arguments
        room -= len(opened)
        for data in drawn_bytes(1 + len(CHOICES), TRIES * count if live else 0, seed):
            case = redrawn(menu, live[data[0] % len(live)], data[1:])
            new = not free and shape_class(case) not in ran
            if len(out) < count and (room > 0 or not new):
                room -= new
                ran.add(shape_class(case))
                out.append(case)
        return self._again(out, count, seed) if self._classes else out

    def _again(self, out: list[Case], count: int, seed: int) -> list[Case]:
        """Filled up with the sizes of earlier cases and other data."""
        known = list(self._classes.values())
        missing = range(count - len(out))
        return [*out, *(known[(seed + n) % len(known)].but(seed=(seed + n) % (1 << 16)) for n in missing)]

    def _open(self, menu: Menu, count: int, seed: int) -> list[Bucket]:
        """So many new buckets, each with the most structural kinds that no earlier one has; the first is the simplest."""
        known = {bucket(b.case) for b in self.all}
        data = [bytes(len(CHOICES))] if not self.all else []
        data += drawn_bytes(len(CHOICES), CANDIDATES + count, seed + (1 << 40))
        made = [Bucket(decode(menu, d), d) for d in data]
        candidates = {bucket(b.case): b for b in reversed(made) if bucket(b.case) not in known}
        opened: list[Bucket] = []
        while candidates and len(opened) < count:
            first = not self.all
            chosen = bucket(made[0].case) if first else max(candidates, key=lambda k: self._new(candidates[k].case))
            opened.append(candidates.pop(chosen))
            self.all.append(opened[-1])
            self._covered |= names(opened[-1].case)
        return opened

    def _new(self, case: Case) -> int:
        """Kinds that a region declares count more than widths and numbers of heads."""
        new = names(case) - self._covered
        return sum(1 if name.startswith(_OF_SIZE) else 4 for name in new)

    def add(self, case: Case, status: str) -> None:
        """Remember that a case ran, and what it added to the variants."""
        self.cases += 1
        known = self.variants()
        added, self._known = known - self._known, known
        self.costliest = max(self.costliest, added)
        mine = next((b for b in self.all if bucket(b.case) == bucket(case)), None)
        if mine is None:
            return
        if status == "refused":
            mine.refused += 1
        elif status == "accepted":
            if mine.accepted and shape_class(case) not in self._classes:
                self._sizes += 1
                self._sizes_built += added > 0
            mine.accepted += 1
            self._classes.setdefault(shape_class(case), case)


def names(case: Case) -> set[str]:
    """The structural kinds of a case."""
    return {k.name for k in kinds() if k.has(case)} | {f"D {case.D}", f"tile of heads {(case.G - 1).bit_length()}"}


_OF_SIZE = ("D ", "tile of ", "head dim ", "length above ")


def drawn_bytes(size: int, count: int, seed: int) -> Iterator[bytes]:
    """`count` strings of so many bytes, a function of the seed."""
    return (hashlib.shake_128(f"{seed} {n}".encode()).digest(size) for n in range(count))


def redrawn(menu: Menu, b: Bucket, data: bytes) -> Case:
    """A case of the bucket whose run-time fields are decoded from other bytes."""
    mixed = bytes(new if name in DRAWN_ANEW else old for name, old, new in zip(CHOICES, b.bytes, data, strict=True))
    other, template = decode(menu, mixed), b.case
    changes = {n: getattr(other, n) for n in ("grad", "scale", "seed", "Hkv")}
    changes["Hq"] = other.Hkv * template.G
    same = [type(m) for m in other.mask.walk()] == [type(m) for m in template.mask.walk()]
    changes |= {"mask": other.mask, "data": other.data} if same else {}
    if same or Packed not in map(type, template.mask.walk()):  # the lengths of packed sequences add up to Lq and Lk
        changes |= {n: getattr(other, n) for n in ("B", "Lq", "Lk")}
    case = within(template.but(**changes))
    return case if work(case) <= WORK else template.but(seed=other.seed)  # packed sequences cannot be made shorter here


def within(case: Case) -> Case:
    """The case with shorter lengths, fewer batches and heads where it is more work than a drawn case may be."""
    while work(case) > WORK or oracle_bytes(case) > MAX_ORACLE_BYTES:
        if max(case.Lq, case.Lk) > 1 and Packed not in map(type, case.mask.walk()):
            halved = {n: max(getattr(case, n) // 2, min(getattr(case, n), 1)) for n in _longer(case)}
        elif case.Hkv > 1:
            halved = {"Hkv": 1, "Hq": case.G}
        elif case.B > 1:
            halved = {"B": 1}
        else:
            break
        case = case.but(**halved)
    return case


def _longer(case: Case) -> tuple[str, ...]:
    return ("Lq", "Lk") if case.Lq == case.Lk else ("Lq",) if case.Lq > case.Lk else ("Lk",)


def work(case: Case) -> int:
    """Products of a case's scores, which WORK bounds."""
    return case.B * case.Hq * case.Lq * case.Lk * max(case.D, case.Dv)
