"""What `warm` left beside Triton's cache: the cases whose kernels lie there, and the draw of a hunt that compiles nothing else.

A list holds for one target, its source, one architecture, one Triton and the way tuned kernels are run. Inside it structures, masks,
scales and gradients are those that were compiled; seeds and the regimes of data are free, sizes inside the class of one that ran.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from pathlib import Path
from typing import Any

from .buckets import LONGEST, SHAPE, WORK, bucket, drawn_bytes, within, work
from .case import Case, case_from_json
from .masks import Packed
from .region import Region
from .tensors import MAX_ORACLE_BYTES, oracle_bytes

SCHEMA = 1
PREFIX = "flashproof-warm-"
FILES = 1000
"""Python files beside a target that are read for its identity."""
IDENTITY = {
    "target": "target", "dialect": "dialect", "arch": "architecture", "triton": "version of Triton", "python": "version of Python",
    "configs": "choice of --configs", "source": "source of the target",
}  # fmt: skip
"""What a list holds for, in words."""


def size_class(n: int) -> tuple[int, ...]:
    """What a compiler or a choice of tiles may know of a size: the powers of two around it, its divisor up to 16."""
    return n.bit_length(), max(n - 1, 0).bit_length(), gcd(n, 16), min(n, 2)


def cases_class(case: Case) -> tuple[Any, ...]:
    """Equal for cases that a list tells no further apart: structure, numbers of the mask, scale, gradient, classes of sizes."""
    lengths = (case.Lq > case.Lk) - (case.Lq < case.Lk)
    sizes = (size_class(getattr(case, name)) for name in SHAPE)
    return (bucket(case), case.mask, case.scale, case.grad, size_class(abs(case.Lk - case.Lq)), lengths, *sizes)


def identity(info: Mapping[str, Any], configs: str) -> dict[str, str]:
    """What the kernels of a target depend on, as a runner's `info` tells it."""
    versions = info["environment"]
    python = versions["python"].rpartition(".")[0]  # Triton's wheels differ by it, and its cache by the wheel
    told = {"target": info["target"], "dialect": info["dialect"], "arch": info.get("arch", "")}
    return told | {"triton": versions["triton"], "python": python, "configs": configs, "source": source_hash(info)}


def source_hash(info: Mapping[str, Any]) -> str:
    """A hash of the Python files in the folder of the target's file; empty where a target has no file."""
    place = Path(info["source"][0]) if info.get("source") else None
    if place is None or not place.is_file():
        return ""
    digest = hashlib.sha256()
    for path in sorted({place, *sorted(place.parent.glob("*.py"))[:FILES]}):
        digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


@dataclass
class Warmed:
    """A list: what it holds for, the cases, how many variants they made, and whether other sizes of a class compile nothing."""

    holds_for: dict[str, str]
    cases: list[Case]
    variants: int
    sizes_free: bool = True

    def save(self, folder: Path) -> Path:
        """Write the list beside the cache, in one step."""
        name = hashlib.sha256(json.dumps(self.holds_for, sort_keys=True).encode()).hexdigest()[:16]
        path = folder / f"{PREFIX}{name}.json"
        data = {"schema": SCHEMA, "holds_for": self.holds_for, "variants": self.variants, "sizes_free": self.sizes_free}
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({**data, "cases": [c.to_json() for c in self.cases]}))
        part.replace(path)
        return path

    @classmethod
    def load(cls, path: Path) -> Warmed:
        """The list of a file; ValueError says what is wrong with it."""
        try:
            data = json.loads(path.read_bytes())
            if data["schema"] != SCHEMA:
                raise ValueError(f"schema must be {SCHEMA}, got {data['schema']!r}")  # noqa: TRY301 (told below)
            holds_for = {str(k): str(v) for k, v in data["holds_for"].items()}
            cases = [case_from_json(c) for c in data["cases"]]
            return cls(holds_for, cases, int(data["variants"]), data["sizes_free"] is True)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            why = f"{e} is missing" if isinstance(e, KeyError) else str(e)
            raise ValueError(f"the list {path.name} of warm cannot be read: {why}") from None


def lists(folder: Path) -> list[Path]:
    """The lists in a cache."""
    return sorted(folder.glob(f"{PREFIX}*.json"))


def found(folder: Path, wanted: Mapping[str, str]) -> tuple[Warmed | None, str]:
    """The list in a cache that holds for this identity, and why another of the target is ignored; (None, "") if there is none."""
    why = ""
    for path in lists(folder):
        try:
            warmed = Warmed.load(path)
        except ValueError as e:
            why = f"{e}: ignored"
            continue
        if warmed.holds_for == dict(wanted):
            return warmed, ""
        if warmed.holds_for.get("target") == wanted["target"]:
            why = f"the list {path.name} of warm is ignored: {differs(warmed.holds_for, wanted)}"
    return None, why


def differs(there: Mapping[str, str], here: Mapping[str, str]) -> str:
    """The first thing in which two identities differ, in words."""
    name = next(n for n in IDENTITY if there.get(n) != here.get(n))
    if name == "source":
        return "the source of the target, or of a Python file beside it, has changed since"
    return f"it is for another {IDENTITY[name]} ({there.get(name) or 'none'}, not {here.get(name) or 'none'})"


@dataclass
class WarmedDraw:
    """In the place of Buckets: cases of a list alone. A function of the seed, the list and the region."""

    seed: int
    warmed: Warmed

    @cached_property
    def groups(self) -> list[list[Case]]:
        """The cases of the list by structure."""
        out: dict[tuple[Any, ...], list[Case]] = {}
        for case in self.warmed.cases:
            out.setdefault(bucket(case), []).append(case)
        return list(out.values())

    def round(self, region: Region, count: int, number: int) -> list[Case]:
        """The next cases: every structure is as likely, then every case of it."""
        served = [[c for c in group if not region.refuses(c)] for group in self.groups]
        groups = [group for group in served if group]
        if not groups:
            return []
        first = number * count
        return [
            drawn(groups[(first + n + data[0]) % len(groups)] if first + n else groups[0], data, self.warmed, region)
            for n, data in enumerate(drawn_bytes(32, count, self.seed * 1_000_003 + number))
        ]

    def add(self, case: Case, status: str) -> None:
        """Nothing: what is drawn does not depend on how cases went."""


def resized(case: Case, other: Case, data: bytes) -> Case | None:
    """The case with sizes that follow from `data`, and the scale of another; None where it cannot have them."""
    if Packed in map(type, case.mask.walk()):
        return None
    B, Hkv, Lq, Lk = 1 + data[0] % 3, 1 + data[1] % 3, _length(data[2:4]), _length(data[4:6])
    scale = other.scale if data[6] % 2 else case.scale
    try:
        same = {"Lk": Lq if data[7] % 2 else Lk}
        return within(case.but(B=B, Hkv=Hkv, Hq=Hkv * case.G, Lq=Lq, **same, scale=scale, seed=data[8]))
    except ValueError:
        return None


def _length(data: bytes) -> int:
    """Every power of two is as likely."""
    low = 1 << data[0] % LONGEST.bit_length()
    return min(low + data[1] % low, LONGEST)


def drawn(group: Sequence[Case], data: bytes, warmed: Warmed, region: Region) -> Case:
    """A case of the group with another seed, data of another, and, where they are free, other sizes of its class."""
    case = group[int.from_bytes(data[1:3]) % len(group)]
    out = case.but(seed=int.from_bytes(data[3:5]))
    other = group[int.from_bytes(data[5:7]) % len(group)]
    tries = [{"data": other.data}] + ([_sizes(case, data[7:])] if warmed.sizes_free else [])
    for changes in tries:
        try:
            tried = out.but(**changes)
        except ValueError:
            continue
        if tried is not out and _fits(tried, case, region):
            out = tried
    return out


def _fits(tried: Case, case: Case, region: Region) -> bool:
    small = work(tried) <= WORK and max(tried.Lq, tried.Lk) <= LONGEST and oracle_bytes(tried) <= MAX_ORACLE_BYTES
    return small and not region.refuses(tried) and cases_class(tried) == cases_class(case)


def _sizes(case: Case, data: bytes) -> dict[str, int]:
    """Other numbers for the sizes, each of the class of its own; equal lengths stay equal."""
    if Packed in map(type, case.mask.walk()):
        return {}
    B, Hkv, Lq, Lk = (_other(n, d) for n, d in zip((case.B, case.Hkv, case.Lq, case.Lk), data, strict=False))
    return {"B": B, "Hkv": Hkv, "Hq": Hkv * case.G, "Lq": Lq, "Lk": Lq if case.Lq == case.Lk else Lk}


def _other(n: int, choice: int) -> int:
    step = gcd(n, 16)
    low = 1 << max(n.bit_length() - 1, 0)
    same = [m for m in range(low - low % step, 2 * low, step) if m and size_class(m) == size_class(n)]
    return same[choice % len(same)] if same else n
