"""What a target serves, learnt from its refusals: acceptance per structural kind, and the region that explains them.

A refusal has one reason but a case has many features, so refusals are explained greedily: the kind that was never
accepted and explains most of the refusals that nothing explains yet comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

from .case import DTYPES, Case
from .region import MASKS, Region, has_empty_sequences, lengths, mask_kind

ENOUGH = 12
"""Refusals, and no acceptance, that show a kind is not served: one served half of the time does this once in 4096."""
_WIDTHS = (16, 32, 64, 80, 96, 128, 160, 192, 224)
_LENGTHS = (16, 64, 128, 256, 512)


@dataclass(frozen=True)
class Kind:
    """A structural kind of case: its name, which cases have it, whether a region serves it, and the region without it."""

    name: str
    has: Callable[[Case], bool]
    served: Callable[[Region], bool]
    without: Callable[[Region], Region]
    counted: bool = True  # has a row in the table of what was accepted
    needs: tuple[str, ...] = ()  # attributes of a region without which this kind goes without saying


def _flag(name: str, attribute: str, has: Callable[[Case], bool], needs: tuple[str, ...] = ()) -> Kind:
    def served(region: Region) -> bool:
        return all(getattr(region, n) for n in (attribute, *needs))

    return Kind(name, has, served, lambda r: replace(r, **{attribute: False}), needs=needs)  # type: ignore[arg-type]


def _without_dtype(dtype: str) -> Kind:
    rest: Callable[[Region], Region] = lambda r: replace(r, dtypes=tuple(d for d in r.dtypes if d != dtype))  # noqa: E731
    return Kind(dtype, lambda c: c.dtype == dtype, lambda r: dtype in r.dtypes, rest)


def _without_mask(kind: str) -> Kind:
    rest: Callable[[Region], Region] = lambda r: replace(r, masks=tuple(m for m in r.masks if m != kind))  # noqa: E731
    return Kind(f"mask {kind}", lambda c: mask_kind(c) == kind, lambda r: kind in r.masks, rest)


def _wide(n: int) -> Kind:
    return Kind(
        f"head dim above {n}", lambda c: max(c.D, c.Dv) > n, lambda r: r.max_head_dim > n,
        lambda r: replace(r, max_head_dim=n, head_dims=tuple(d for d in r.head_dims if d <= n)), counted=False,
    )  # fmt: skip


def _long(n: int) -> Kind:
    return Kind(
        f"length above {n}",
        lambda c: max(c.Lq, c.Lk) > n,
        lambda r: r.max_len > n,
        lambda r: replace(r, max_len=n),
        counted=False,
    )


def _dims(name: str, allowed: tuple[int, ...]) -> Kind:
    """Head dims outside a list that kernels are often written for."""
    return Kind(
        name, lambda c: not {c.D, c.Dv} <= set(allowed), lambda r: not r.head_dims,
        lambda r: replace(r, head_dims=tuple(d for d in allowed if d <= r.max_head_dim)), counted=False,
    )  # fmt: skip


def _layouts(case: Case) -> bool:
    return {case.layout_q, case.layout_k, case.layout_v, case.layout_do, case.layout_mask} != {"contiguous"}


@cache
def kinds() -> tuple[Kind, ...]:
    """Every structural kind, the more general ones first where two explain the same refusals."""
    flags = (
        _flag("several query heads per key head", "gqa", lambda c: c.Hq != c.Hkv),
        _flag("Lq other than Lk", "lq_differs", lambda c: any(q != k for q, k in lengths(c))),
        _flag("packed sequences of length 0", "empty_sequences", has_empty_sequences, needs=("packed",)),
        _flag("Dv other than D", "dv_differs", lambda c: c.Dv != c.D),
        _flag("backward", "backward", lambda c: bool(c.requires_grad)),
        _flag("bias", "bias", lambda c: bool(c.bias)),
        _flag("gradient of the bias", "bias_grad", lambda c: "b" in c.requires_grad, needs=("bias", "backward")),
        _flag("scale", "scale", lambda c: c.scale is not None),
        _flag(
            "scale of 0 or below", "negative_scale", lambda c: c.scale is not None and c.scale <= 0, needs=("scale",)
        ),
        _flag("softcap", "softcap", lambda c: c.softcap > 0),
        _flag("dropout", "dropout", lambda c: c.dropout > 0),
        _flag("gradient through lse", "lse_grad", lambda c: c.lse_grad, needs=("lse", "backward")),
        _flag("layouts", "layouts", _layouts),
        _flag("ALiBi", "alibi", lambda c: bool(c.alibi)),
        _flag("sinks", "sinks", lambda c: bool(c.sinks)),
        _flag(
            "gradient of the sinks",
            "sinks_grad",
            lambda c: bool(c.sinks) and "s" in c.requires_grad,
            needs=("sinks", "backward"),
        ),
    )
    empty = Kind(
        "length 0", lambda c: min(c.B, c.Lq, c.Lk) == 0, lambda r: r.min_len < 1, lambda r: replace(r, min_len=1)
    )
    return (
        *map(_without_dtype, DTYPES), *map(_without_mask, MASKS), *flags, empty,
        *map(_wide, _WIDTHS),
        _dims("head dim no multiple of 8", tuple(range(8, 257, 8))),
        _dims("head dim no multiple of 16", tuple(range(16, 257, 16))),
        _dims("head dim no power of two above 8", (16, 32, 64, 128, 256)),
        *map(_long, _LENGTHS),
    )  # fmt: skip


@dataclass
class Count:
    """How the cases of one kind went."""

    accepted: int = 0
    refused: int = 0
    inexpressible: int = 0

    @property
    def drawn(self) -> int:
        """All of them."""
        return self.accepted + self.refused + self.inexpressible


@dataclass
class Learner:
    """Counts per kind, and the refused and accepted cases that the region is learnt from."""

    base: Region = field(default_factory=Region)
    by_kind: dict[str, Count] = field(default_factory=dict)
    _refused: list[frozenset[str]] = field(default_factory=list)
    _accepted: set[str] = field(default_factory=set)

    def add(self, case: Case, status: str) -> None:
        """Count one case: status accepted, refused or inexpressible."""
        names = frozenset(k.name for k in kinds() if k.has(case))
        for name in names:
            count = self.by_kind.setdefault(name, Count())
            setattr(count, status, getattr(count, status) + 1)
        if status == "accepted":
            self._accepted |= names
        elif status == "refused":
            self._refused.append(names)

    def unserved(self) -> list[Kind]:
        """Kinds that were never accepted and explain at least ENOUGH refusals that no kind before them explains."""
        out: list[Kind] = []
        left = list(self._refused)
        while left:
            guesses = [(sum(k.name in names for names in left), k) for k in kinds() if k.name not in self._accepted]
            count, kind = max(guesses, key=lambda g: g[0], default=(0, None))
            if kind is None or count < ENOUGH:
                break
            out.append(kind)
            left = [names for names in left if kind.name not in names]
        return out

    @property
    def region(self) -> Region:
        """The region that the answers so far leave."""
        region = self.base
        for kind in self.unserved():
            smaller = kind.without(region)
            region = smaller if smaller.dtypes and smaller.masks else region
        return region

    def table(self, region: Region | None = None) -> list[tuple[str, int, int, int]]:
        """(kind, accepted, refused, inexpressible) rows of the counted kinds, or of those that a region serves."""
        zero = Count()
        rows = [
            (k, self.by_kind.get(k.name, zero)) for k in kinds() if k.counted and (region is None or k.served(region))
        ]
        return [(k.name, n.accepted, n.refused, n.inexpressible) for k, n in rows if n.drawn or region is not None]


def unmeasured(by_kind: Mapping[str, Count], declared: Region) -> list[str]:
    """Kinds inside a declared region of which not one case was accepted, though the dialect can express them."""
    out = []
    for kind in kinds():
        count = by_kind.get(kind.name, Count())
        only_unsaid = count.inexpressible > 0 and count.refused == 0
        if kind.counted and kind.served(declared) and count.accepted == 0 and not only_unsaid:
            out.append(kind.name)
    return out


def differences(region: Region, base: Region = Region()) -> list[str]:  # noqa: B008 (frozen)
    """What a region lacks of a wider one, in words."""
    lost = [k for k in kinds() if k.counted and k.served(base) and not k.served(region)]
    out = [f"no {k.name}" for k in lost if all(getattr(region, n) for n in k.needs)]
    if region.head_dims and region.head_dims != base.head_dims:
        out.append(f"head dims {_few(region.head_dims)}")
    if region.max_head_dim != base.max_head_dim:
        out.append(f"head dim up to {region.max_head_dim}")
    if region.max_len != base.max_len:
        out.append(f"lengths up to {region.max_len}")
    return out


def declaration(region: Region) -> str:
    """Python that makes the region: what differs from the default."""
    changed = [(f.name, getattr(region, f.name)) for f in fields(Region) if getattr(region, f.name) != f.default]
    return f"Region({', '.join(f'{name}={value!r}' for name, value in changed)})"


def _few(values: Iterable[Any]) -> str:
    texts = list(map(str, values))
    return ", ".join(texts if len(texts) < 9 else [*texts[:3], "...", texts[-1]])
