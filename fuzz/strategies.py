"""Hypothesis strategies for cases: simplest first, nothing filtered, every kind of every axis soon.

A case is decoded from a fixed number of bytes, one for each thing that can be chosen; zero is the simplest choice.
Hypothesis draws bytes evenly and shrinks each on its own, so a choice that does not matter becomes the simplest one without
moving the others. (Its integers are drawn from small and special values much more often, which would leave kinds out.)
Sizes are chosen within a budget of work, each from what the ones before have left of it: most cases are small.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hypothesis import strategies as st

from . import ladders
from .case import ALIBI, BIAS, DATA, DTYPES, GRADS, LAYOUTS, MASK_FILLS, SEQUENCES, SINKS, Case
from .ladders import gate, pick, pick_within
from .masks import (
    ALIGNMENTS,
    And,
    BlockSparse,
    Causal,
    Document,
    Full,
    Mask,
    Not,
    Or,
    Padding,
    Prefix,
    Random,
    Strided,
    Window,
)
from .packing import packed
from .region import MASKS, Region
from .tensors import MAX_ORACLE_BYTES, oracle_bytes

Entry = TypeVar("Entry")
Fields = dict[str, Any]

FEATURES = {
    "sequence": 17, "dropout": 11, "softcap": 12, "bias": 25, "mask": 62, "layouts": 36, "lse_grad": 14, "requires_grad": 25,
    "grad": 15, "scale": 22, "dv": 20, "data": 64, "empty": 3, "nonfinite": 100, "gqa": 100, "lq": 100, "backward": 100,
    "alibi": 12, "sinks": 12, "mode": 6,
}  # fmt: skip
"""What can be switched off, and in how many of a hundred cases it is on where nothing forbids it.

backward: gradients at all; gqa: several heads per key head; lq: Lq other than Lk; dv: Dv other than D; empty: B, Lq or Lk
zero; nonfinite: the regimes with NaN and Inf; mode: the region's ways of calling. Those with 100 come up by themselves.
"""
CHOICES = (
    "sequence", "dropout", "softcap", "bias", "bias_axes", "bias_grad", "mask", "form", "mask_axes", "fill",
    "kind", "one", "1a", "1b", "1c", "two", "2a", "2b", "2c",
    "layouts", "layout", "layout_mask", "layout_q", "layout_k", "layout_v", "layout_do",
    "lse_grad", "requires_grad", "grad", "scale", "dv", "data", "B zero", "Lq zero", "Lk zero", "dtype",
    "shape", "B", "Hkv", "G", "D", "Lk", "Lk low", "Lq", "Lq low", "seed", "seed low", "alibi", "sinks", "sinks_grad", "mode",
)  # fmt: skip
"""What each byte chooses; earlier ones are shrunk with priority."""

_STRUCTURES = (
    ("causal_top_left", 2), ("causal_bottom_right", 2), ("window", 2), ("packed", 3), ("bool", 7), ("additive", 6),
)  # fmt: skip
_INNER = ("causal", "window", "padding", "document", "prefix", "strided", "block_sparse", "random")
_DENSE = ("full", *_INNER, "random", "and", "or", "not")


@dataclass(frozen=True)
class Menu:
    """What may be chosen: a region narrowed by what the user asked for, and the tables that follow from it."""

    region: Region
    max_len: int
    features: frozenset[str]
    structures: tuple[str, ...]  # kinds of mask other than none
    data: tuple[str, ...]
    lengths: tuple[int, ...]
    widths: tuple[int, ...]


@dataclass(frozen=True)
class Choices:
    """The bytes of a case, by name, and the menu they choose from."""

    menu: Menu
    bytes: dict[str, int]

    def pick(self, name: str, table: Sequence[Entry]) -> Entry:
        return pick(table, self.bytes[name])

    def within(self, name: str, table: Sequence[int], most: int) -> int:
        return pick_within(table, most, self.bytes[name])

    def whole(self, name: str, most: int) -> int:
        """0..most."""
        return self.bytes[name] * (most + 1) >> 8

    def on(self, feature: str) -> int | None:
        """None where the feature is off, otherwise a byte that chooses its value."""
        return gate(FEATURES[feature], self.bytes[feature]) if feature in self.menu.features else None


def cases(
    region: Region = Region(),  # noqa: B008 (frozen)
    *,
    dtypes: Collection[str] | None = None,
    max_len: int | None = None,
    masks: Collection[str] | None = None,
    features: Collection[str] | None = None,
    without: Collection[str] = (),
) -> st.SearchStrategy[Case]:
    """A strategy for cases inside a region, small ones most often, shrinking towards `Case()`.

    dtypes and masks narrow a declared region's (names as in Region); max_len bounds Lq and Lk (default 300, or the region's).
    `features` are the only ones of FEATURES that may appear, `without` those that may not. No case needs more than
    MAX_ORACLE_BYTES to judge. ValueError names an unknown word, or says what leaves nothing to draw.
    """
    chosen = set(_known("features", features, FEATURES, FEATURES)) - set(_known("without", without, FEATURES, ()))
    dtypes = _known("dtypes", dtypes, DTYPES, region.dtypes)
    if region != Region() and (outside := [d for d in dtypes if d not in region.dtypes]):
        raise ValueError(f"dtypes must lie inside the region ({', '.join(region.dtypes)}), got {outside[0]!r}")
    wanted = _known("masks", masks, MASKS, MASKS)
    narrowed = replace(region, dtypes=dtypes, masks=tuple(m for m in region.masks if m in wanted))
    return _decoded(menu_of(narrowed, min(region.max_len, 300 if max_len is None else max_len), chosen))


@st.composite
def _decoded(draw: Callable[[st.SearchStrategy[bytes]], bytes], menu: Menu) -> Case:
    return decode(menu, draw(st.binary(min_size=len(CHOICES), max_size=len(CHOICES))))


def menu_of(region: Region, max_len: int, features: Collection[str]) -> Menu:
    """The menu of a region and those of the features that it serves; ValueError where it leaves nothing to draw."""
    region = replace(region, empty_sequences=region.empty_sequences and "empty" in features)
    chosen = frozenset(features) & _served(region)
    _check(region, max_len, chosen)
    return Menu(
        region,
        max_len,
        chosen,
        structures=ladders.weighted((n, w) for n, w in _STRUCTURES if n in region.masks),
        data=tuple(n for n in DATA[1:] if "nonfinite" in chosen or not n.startswith("nonfinite")),
        lengths=ladders.lengths(region.min_len, max(region.min_len, min(max_len, ladders.LONGEST))),
        widths=ladders.widths(region.head_dims, region.max_head_dim),
    )


def _known(
    what: str, names: Collection[str] | None, known: Collection[str], default: Collection[str]
) -> tuple[str, ...]:
    """The names in the known order, or the default; ValueError names one that is unknown."""
    if isinstance(names, str):
        raise ValueError(f"{what} must be a list of names, got {what}={names!r}")
    for name in names or ():
        if name not in known:
            raise ValueError(f"{what} must be among {', '.join(known)}, got {name!r}")
    return tuple(default) if names is None else tuple(n for n in known if n in names)


def _served(region: Region) -> set[str]:
    """The features that a region serves."""
    serves = {
        "mask": set(region.masks) != {"none"}, "layouts": region.layouts, "scale": region.scale, "dv": region.dv_differs,
        "lse_grad": region.lse and region.lse_grad, "softcap": region.softcap, "bias": region.bias, "dropout": region.dropout,
        "gqa": region.gqa, "lq": region.lq_differs, "backward": region.backward, "empty": region.min_len == 0,
        "alibi": region.alibi, "sinks": region.sinks, "mode": bool(region.modes),
    }  # fmt: skip
    return {name for name in FEATURES if serves.get(name, True)}


def _check(r: Region, max_len: int, features: frozenset[str]) -> None:
    """ValueError where there is nothing to draw, or the smallest case is too large to judge."""
    if not r.dtypes or not r.masks:
        raise ValueError(
            f"cases must have a dtype and a mask to draw, got dtypes={list(r.dtypes)}, masks={list(r.masks)}"
        )
    if max_len < max(r.min_len, 1):
        raise ValueError(f"max_len must be at least {max(r.min_len, 1)}, got max_len={max_len}")
    widths = ladders.widths(r.head_dims, r.max_head_dim)
    if not widths:
        raise ValueError(f"head_dims must have an entry up to {r.max_head_dim}, got head_dims={list(r.head_dims)}")
    if "mask" not in features and "none" not in r.masks:
        raise ValueError(f"masks must include 'none' where the feature 'mask' is off, got masks={list(r.masks)}")
    least = max(r.min_len, 1)
    if oracle_bytes(Case(Lq=least, Lk=least, D=widths[0], Dv=widths[0])) > MAX_ORACLE_BYTES:
        raise ValueError(
            f"the smallest case must need at most {MAX_ORACLE_BYTES} bytes to judge, got min_len={r.min_len}"
        )


def decode(menu: Menu, data: bytes) -> Case:
    """The case that the bytes choose from the menu."""
    at = Choices(menu, dict(zip(CHOICES, data, strict=True)))
    fields: Fields = {
        "dtype": at.pick("dtype", menu.region.dtypes),
        "seed": at.bytes["seed"] << 8 | at.bytes["seed low"],
    }
    fields |= _layouts(at)
    fields |= _sizes(at, packed=all(fields.get(f"layout_{t}") == "packed" for t in "qkv"))
    fields |= _numbers(at)
    fields |= _mask(at, fields)
    fields |= _bias(at)
    fields |= _backward(at, fields)
    if "layouts" in menu.features and (fields["bias"] or "mask" in fields):
        byte = gate(35, at.bytes["layout_mask"])
        fields["layout_mask"] = LAYOUTS[0] if byte is None else pick(ladders.MASK_LAYOUTS, byte)
    if (byte := at.on("sequence")) is not None:
        fields["sequence"] = pick(_sequences(menu, fields), byte)
    return Case(**fields | _added(at, fields))


def _numbers(at: Choices) -> Fields:
    """Data regime, scale, softcap and dropout."""
    tables: dict[str, Sequence[Any]] = {
        "data": at.menu.data,
        "scale": [s for s in ladders.SCALES if s > 0 or at.menu.region.negative_scale],
        "softcap": ladders.SOFTCAPS,
        "dropout": ladders.DROPOUTS,
    }
    chosen = {name: (table, at.on(name)) for name, table in tables.items()}
    return {name: pick(table, byte) for name, (table, byte) in chosen.items() if byte is not None}


def _layouts(at: Choices) -> Fields:
    """Layouts of q, k, v and do: one of them other than contiguous, all the same, or each for itself."""
    style = at.on("layouts")
    if style is None:
        return {}
    names = ("layout_q", "layout_k", "layout_v", "layout_do")
    if style < 32:
        odd = pick(names, style * 8)
        return {name: at.pick("layout", LAYOUTS[1:]) if name == odd else LAYOUTS[0] for name in names}
    if style < 112:
        return dict.fromkeys(names, at.pick("layout", LAYOUTS[1:]))
    return {name: at.pick(name, LAYOUTS) for name in names}


def _sizes(at: Choices, packed: bool) -> Fields:
    """B, Hq, Hkv, Lq, Lk, D and Dv with B * Hq * Lq * Lk * max(D, Dv) within a budget, as far as the region allows.

    Packed q, k and v get equal lengths and widths, and so one storage. Empty sizes count as one in the budget.
    """
    menu = at.menu
    differ = "lq" in menu.features and not packed
    first, left, longest = at.pick("shape", ladders.SHAPES)
    out: Fields = {}
    for what in (first, *(w for w in ("length", "width", "heads") if w != first)):
        reserved = left // menu.widths[0] if "D" not in out else left
        if what == "length":
            out |= _lengths(at, min(longest, menu.max_len), reserved, differ)
            left //= out["Lq"] * out["Lk"]
        elif what == "width":
            out |= _widths(at, left, packed)
            left //= max(out["D"], out["Dv"])
        else:
            out |= _heads(at, reserved)
            left //= out["B"] * out["Hq"]
    return out | _empty(at, differ)


def _empty(at: Choices, differ: bool) -> Fields:
    """The sizes among B, Lq and Lk that are zero."""
    if "empty" not in at.menu.features:
        return {}
    zero = {n for n in ("B", "Lq", "Lk") if gate(FEATURES["empty"], at.bytes[f"{n} zero"]) is not None}
    if not differ and zero & {"Lq", "Lk"}:
        zero |= {"Lq", "Lk"}
    return dict.fromkeys(zero, 0)


def _lengths(at: Choices, longest: int, area: int, differ: bool) -> Fields:
    """Lk, and Lq with Lq * Lk within the area; in a third of the cases Lq is Lk, beside it or twice as long."""
    table, least = at.menu.lengths, max(at.menu.region.min_len, 1)
    most = min(longest, area if differ else int(area**0.5))
    Lk = pick_within(table, most, at.bytes["Lk"], at.bytes["Lk low"])
    if not differ:
        return {"Lq": Lk, "Lk": Lk}
    most = min(longest, area // Lk)
    near = [n for n in (Lk, Lk, Lk + 1, Lk - 1, 2 * Lk) if least <= n <= most]
    byte = gate(33, at.bytes["Lq"])
    if byte is not None and near:
        return {"Lq": pick(near, byte), "Lk": Lk}
    return {"Lq": pick_within(table, most, min(at.bytes["Lq"] * 3 // 2, 255), at.bytes["Lq low"]), "Lk": Lk}


def _widths(at: Choices, most: int, packed: bool) -> Fields:
    """D, and Dv, which differs where the feature dv is on."""
    D, byte = at.within("D", at.menu.widths, most), at.on("dv")
    return {"D": D, "Dv": D if byte is None or packed else pick_within(at.menu.widths, most, byte)}


def _heads(at: Choices, most: int) -> Fields:
    """B, Hkv and Hq, with B * Hq up to `most`."""
    G = at.within("G", ladders.RATIOS, most) if "gqa" in at.menu.features else 1
    Hkv = at.within("Hkv", ladders.KV_HEADS, most // G)
    B = at.within("B", ladders.BATCHES, most // (G * Hkv))
    return {"B": B, "Hkv": Hkv, "Hq": Hkv * G}


def _mask(at: Choices, sizes: Fields) -> Fields:
    """A mask other than none, as the dialect's keyword or as a dense tensor; NaN in masked-out keys needs one."""
    forced = "none" not in at.menu.region.masks or sizes.get("data") == "nonfinite_masked"
    byte = at.bytes["mask"] if forced else at.on("mask")
    if byte is None or "mask" not in at.menu.features:
        return {}
    structure = pick(at.menu.structures, byte)
    if structure in ("causal_top_left", "causal_bottom_right"):
        return {"mask": Causal("top_left" if structure == "causal_top_left" else "bottom_right")}
    if structure == "window":
        return {"mask": _leaf(at, "window", "1", sizes)}
    if structure == "packed":
        return packed(at.bytes, at.menu.region, "lq" not in at.menu.features, sizes["Lq"], sizes["Lk"])
    mask = _dense(at, at.pick("kind", _DENSE), sizes)
    flags = (
        ("bool",) if isinstance(mask, Full | Causal | Window) else ("flags", "bool", "bool")
    )  # alone these are no tensor
    form = "additive" if structure == "additive" else at.pick("form", flags)
    fill = at.pick("fill", MASK_FILLS) if form == "additive" else MASK_FILLS[0]
    return {"mask": mask, "mask_form": form, "mask_fill": fill, "mask_axes": at.pick("mask_axes", ladders.AXES)}


def _dense(at: Choices, kind: str, sizes: Fields) -> Mask:
    if kind == "not":
        return Not(_leaf(at, at.pick("one", _INNER), "1", sizes))
    if kind in ("and", "or"):
        parts = [_leaf(at, at.pick(n, _INNER), p, sizes) for n, p in (("one", "1"), ("two", "2"))]
        return (And if kind == "and" else Or)(*parts)
    return _leaf(at, kind, "1", sizes)


def _leaf(at: Choices, kind: str, part: str, sizes: Fields) -> Mask:
    """A mask of one kind; the three bytes of the part choose its parameters, absolute numbers all."""
    a, b, c = part + "a", part + "b", part + "c"
    seed = at.bytes["seed low"] % 16
    match kind:
        case "causal":
            return Causal(at.pick(a, ALIGNMENTS))
        case "window":
            return Window(at.pick(a, ladders.SPANS), at.pick(b, ladders.SPANS), at.pick(c, ALIGNMENTS))
        case "padding":
            return Padding(tuple(sizes["Lk"] - at.whole(n, sizes["Lk"]) for n in (a, b)[: max(sizes["B"], 1)]))
        case "document":
            return Document(tuple(at.whole(n, max(sizes["Lq"], sizes["Lk"])) for n in (a, b)))
        case "prefix":
            return Prefix(at.pick(a, ladders.SPANS[1:]), at.pick(b, ALIGNMENTS))
        case "strided":
            return Strided(at.pick(a, (2, 1, 3, 4, 7, 8, 16, 17)))
        case "block_sparse":
            (q, k), axes = at.pick(a, ladders.BLOCKS), at.pick(c, ("qk", "bqk", "hqk", "bhqk"))
            return BlockSparse(q, k, at.pick(b, ladders.PERCENTS), seed, axes)
        case "random":
            axes = at.pick(c, ("qk", *ladders.AXES[1:]))
            dead = at.whole(b, 8) // 3 * 15 if "q" in axes else 0
            return Random(at.pick(a, ladders.PERCENTS), dead, seed, axes)
    return Full()


def _bias(at: Choices) -> Fields:
    """An additive bias and whether its gradient is asked for."""
    byte = at.on("bias")
    if byte is None:
        return {"bias": "", "requires_grad": "qkv"}
    wanted = at.menu.region.bias_grad and at.bytes["bias_grad"] >= 96
    axes = at.pick("bias_axes", ladders.BIAS_AXES)
    return {"bias": pick(BIAS[1:], byte), "bias_axes": axes, "requires_grad": "qkvb" if wanted else "qkv"}


def _backward(at: Choices, fields: Fields) -> Fields:
    """requires_grad, grad and lse_grad; lse depends on q, k and the bias only."""
    if "backward" not in at.menu.features:
        return {"requires_grad": ""}
    wanted = fields["requires_grad"]
    if (byte := at.on("requires_grad")) is not None:
        wanted = pick(ladders.SUBSETS, byte) + wanted.lstrip("qkv")
    grad = at.on("grad") if wanted else None
    through = at.on("lse_grad") is not None and wanted not in ("", "v")
    return {"requires_grad": wanted, "grad": GRADS[0] if grad is None else pick(GRADS[1:], grad), "lse_grad": through}


def _added(at: Choices, fields: Fields) -> Fields:
    """ALiBi, sinks and whether their gradient is asked for; or a way of calling, on cases with nothing added to scores."""
    out = {n: pick(kinds[1:], b) for n, kinds in (("alibi", ALIBI), ("sinks", SINKS)) if (b := at.on(n)) is not None}
    wanted = fields["requires_grad"]
    if "sinks" in out and wanted and at.menu.region.sinks_grad and at.bytes["sinks_grad"] >= 96:
        out["requires_grad"] = wanted + "s"
    if not out and not fields["bias"] and not fields.get("sequence") and (byte := at.on("mode")) is not None:
        out["mode"] = pick(at.menu.region.modes, byte)
    return out


def _sequences(menu: Menu, fields: dict[str, Any]) -> tuple[str, ...]:
    """The call sequences whose middle call stays inside the region."""
    dense = fields.get("mask_form", "flags") != "flags"
    inside = {
        "scale": "scale" in menu.features,
        "layout": "layouts" in menu.features,
        "mask": "mask" in menu.features and (dense or {"none", "causal_top_left"} <= set(menu.region.masks)),
    }
    return tuple(name for name in SEQUENCES[1:] if inside.get(name, True))
