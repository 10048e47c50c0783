"""What `flashproof list` shows: implementations, dialects, masks, oracles and data regimes, from where each is defined."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from tabulate import tabulate

from ..impls import load_registry
from ..oracles.contract import PRESETS
from .dialects import DIALECTS
from .masks import KINDS
from .region import Region
from .session import lacking
from .values import REGIMES

ORACLES = {
    "value": "an element differs from float64 by more than its derived limit",
    "nonfinite": "NaN or Inf where the answer is finite, or the other way round",
    "dead-row": "a row with no allowed key breaks the declared policy",
    "statistical": "errors larger than independent roundings explain (a warning until fresh seeds confirm it)",
    "exact": "wrong even in exact arithmetic (Triton kernels, interpreted)",
    "identity": "an identity between outputs and gradients does not hold (dropout)",
    "memory": "a Triton kernel reads or writes where it must not (interpreted)",
    "guard": "memory around an input was written",
    "purity": "an input came back changed",
    "allocation": "memory around a tensor of the target's own was written",
    "alias": "an output shares the storage of an input",
    "type": "what came back is no tensor, or not as many as asked for",
    "shape": "an output has another shape",
    "dtype": "an output has another dtype",
    "device": "an output is on another device",
    "grad": "a gradient is missing",
    "repeat": "the same call twice gives other bits",
    "sequence": "a call gives other bits after another call",
    "ignored-keyword": "a keyword is accepted and changes nothing",
    "buffer": "what an output buffer held before the call shows in the answer",
    "printed": "the target printed more in one case than anybody reads (a warning)",
    "global-state": "torch's global state came back changed",
    "refusal": "a case inside the declared region was refused",
    "exception": "the target raised something that is no refusal",
    "sanitizer": "compute-sanitizer reports an error of a kernel (--sanitizer)",
    "opcheck": "torch.library.opcheck finds the operator's registration wrong",
    "crash": "the target's process died",
    "hang": "the target gave no answer before the deadline",
    "coverage": "a case that the base revision answers rightly is refused, or a promise of its region is withdrawn (gate)",
    "ledger": "an entry of the ledger has expired, or what it excuses is right now (gate)",
}
"""The kinds of finding, each with what it means."""


def _first(thing: Callable[..., object] | type) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]


PLANTED = "planted bug: "
"""How the summary of a bug planted on purpose begins."""


def _implementations() -> list[tuple[str, ...]]:
    rows = [i for i in load_registry().values() if not i.summary.startswith(PLANTED)]
    return [(i.name, i.dialect or "recognised", _region(i.supports), i.summary) for i in rows]


def _region(region: Region | None) -> str:
    """What a region lacks, in a few words."""
    return "not declared" if region is None else lacking(region) or "all"


def _planted() -> list[tuple[str, ...]]:
    rows = [i for i in load_registry().values() if i.summary.startswith(PLANTED)]
    return [(i.name, i.summary.removeprefix(PLANTED)) for i in rows]


def _dialects() -> list[tuple[str, ...]]:
    return [
        (
            name,
            "declared"
            if name == "adapter"
            else "(total, H, D)"
            if d.rows
            else "(B, L, H, D)"
            if d.heads_inside
            else "(B, H, L, D)",
            "declared" if name == "adapter" else d.align.replace("_", " "),
            ", ".join(n[0] for n in d.keywords.values()),
        )
        for name, d in DIALECTS.items()
    ]


TABLES: dict[str, tuple[tuple[str, ...], Callable[[], list[tuple[str, ...]]]]] = {
    "implementations": (("name", "dialect", "region", "what it is"), _implementations),
    "planted": (("name", "the bug"), _planted),
    "dialects": (("name", "layout", "causal aligned", "keywords"), _dialects),
    "masks": (("kind", "meaning"), lambda: [(k, _first(m)) for k, m in KINDS.items()]),
    "oracles": (("finding", "meaning"), lambda: list(ORACLES.items())),
    "contracts": (("preset", "arithmetic"), lambda: [(n, p.summary) for n, p in PRESETS.items()]),
    "data": (("regime", "values"), lambda: [(n, _first(f)) for n, f in REGIMES.items()]),
}
"""Name of a list -> its columns and its rows."""
WIDTH = 100
MIDDLE = 28
"""Widest a column between the first and the last may be."""


def table(name: str) -> str:
    """One list as text of at most WIDTH columns: the last column takes what the others leave."""
    columns, make = TABLES[name]
    rows = make()
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    widths[1:-1] = [min(w, MIDDLE) for w in widths[1:-1]]
    widths[-1] = WIDTH - sum(w + 2 for w in widths[:-1])
    text: str = tabulate(rows, headers=columns, maxcolwidths=widths, disable_numparse=True)
    return text
