"""How the tests of other projects do on the planted bugs: their verdict rules and case grids, written from their description.

Grids are cut to what a CPU runs in minutes; `cut` says what was left out. comparison.py runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..fuzz.masks import Causal, Full, Mask, Window

GRADS = ("dq", "dk", "dv")
ALL = ("o", *GRADS)

Answers = Mapping[str, Tensor]


@dataclass(frozen=True)
class Call:
    """One case of a peer's grid: sizes, element type, mask, numbers, and the distribution that its data come from."""

    Lq: int
    Lk: int
    D: int = 64
    B: int = 1
    Hq: int = 2
    Hkv: int = 2
    dtype: str = "float16"
    mask: Mask = Full()
    scale: float | None = None
    softcap: float = 0.0
    data: str = "normal"
    backward: bool = True
    seed: int = 0


@dataclass(frozen=True)
class Tried:
    """What a rule sees of a case: the answers in question, those in float64, and those of plain code in the same dtype."""

    call: Call
    got: Answers
    want: Answers
    plain: Answers
    again: Answers

    def error(self, name: str, of: str = "got") -> Tensor:
        """|answer - float64|, elementwise; NaN where the answer is NaN."""
        return (getattr(self, of)[name].double() - self.want[name]).abs()


@dataclass(frozen=True)
class Peer:
    """A project's grid, its rule (True: rejected), and what was cut of the grid."""

    name: str
    calls: tuple[Call, ...]
    rejects: Callable[[Tried], bool]
    cut: str


def _close(t: Tried, rtol: Mapping[str, float], atol: Mapping[str, float], equal_nan: bool = False) -> bool:
    """Whether every tensor named in atol is within atol + rtol |reference|, the reference rounded to the dtype of the answer."""
    return all(
        torch.allclose(t.got[n].double(), t.want[n].to(t.got[n].dtype).double(), rtol[n], atol[n], equal_nan)
        for n in atol if n in t.got
    )  # fmt: skip


def _triton(t: Tried) -> bool:
    return not _close(t, dict.fromkeys(ALL, 0.0), dict.fromkeys(ALL, 1e-2))


def _flash_attn(t: Tried) -> bool:
    """At most twice (gradients: three times) the largest error of plain code, and a floor of 1e-5 under a causal mask."""
    for n in t.got:
        if n == "lse":
            continue
        bound = (2.0 if n == "o" else 3.0) * float(t.error(n, "plain").max()) + (0.0 if n == "o" else 1e-5)
        if not float(t.error(n).max()) <= bound:
            return True
    return False


def _torch_old(t: Tried) -> bool:
    """allclose with tolerances that are a multiple of plain code's own largest absolute and relative deviation."""
    floor = {"float16": 1e-3, "bfloat16": 1.6e-2, "float32": 1.3e-6}[t.call.dtype]
    rtol, atol = {}, {}
    for n, factor in {"o": 1.0, "dq": 4.0, "dk": 2.0, "dv": 2.0}.items():
        if n in t.got:
            deviation = t.error(n, "plain")
            relative = (deviation / t.want[n].abs()).nan_to_num(floor, posinf=floor)
            atol[n] = factor * max(float(deviation.max()), 1e-3)
            rtol[n] = factor * max(float(relative.max()), floor)
    return not _close(t, rtol, atol)


def _torch_new(t: Tried) -> bool:
    factors = {"o": 3.0, "dq": 110.0, "dk": 8.0, "dv": 3.0}
    return any(
        not float(t.error(n).max()) <= max(1e-5, f * float(t.error(n, "plain").max()))
        for n, f in factors.items()
        if n in t.got
    )


def _flex(t: Tried) -> bool:
    factor = 10.0 if t.call.dtype == "float32" else 1.1
    return any(not float(t.error(n).mean()) <= factor * float(t.error(n, "plain").mean()) for n in ALL if n in t.got)


def _xformers(t: Tried) -> bool:
    atol, rtol = {"float32": (3e-4, 2e-5), "float16": (4e-3, 4e-4), "bfloat16": (2e-2, 5e-3)}[t.call.dtype]
    back_atol, back_rtol = {"float32": (9e-4, 1e-4), "float16": (0.2, 2e-2), "bfloat16": (0.9, 0.1)}[t.call.dtype]
    atols = {"o": atol, "lse": 2e-4} | dict.fromkeys(GRADS, back_atol)
    return not _close(t, {"o": rtol, "lse": 0.0} | dict.fromkeys(GRADS, back_rtol), atols)


def _cudnn(t: Tried) -> bool:
    atol = dict.fromkeys(("o", "dq", "lse"), 2e-2) | dict.fromkeys(("dk", "dv"), 7e-2)
    repeated = all(torch.equal(t.got[n].nan_to_num(), t.again[n].nan_to_num()) for n in t.got)
    return not (_close(t, dict.fromkeys(atol, 2e-2), atol, equal_nan=True) and repeated)


def _transformer_engine(t: Tried) -> bool:
    tolerance = {"float16": 1e-3, "bfloat16": 1.5e-2, "float32": 1e-5}[t.call.dtype]
    return not _close(t, dict.fromkeys(ALL, tolerance), dict.fromkeys(ALL, tolerance))


def _kernelbench(t: Tried) -> bool:
    return not _close(t, {"o": 1e-2}, {"o": 1e-2})


def _grid(calls: Iterable[Call]) -> tuple[Call, ...]:
    """The calls, each with a seed of its own."""
    return tuple(replace(c, seed=n) for n, c in enumerate(calls))


LOCAL = Window(30, 15, "bottom_right")
BOTTOM = Causal("bottom_right")
PEERS = (
    Peer(
        "Triton tutorial",
        _grid([Call(n, n, scale=0.5, data="half", mask=m) for n in (128, 256) for m in (Full(), Causal())]),
        _triton,
        "batch 4, 48 heads, lengths above 256, D = 128",
    ),
    Peer(
        "flash-attn 2",
        _grid(
            Call(*L, D=D, Hq=6, Hkv=hkv, mask=mask, softcap=cap)
            for n, L in enumerate(((113, 203), (128, 217), (113, 211), (108, 256)))
            for D, hkv, mask, cap in (
                ((32, 59, 64, 111)[n], 6, Full(), 0.0), (64, 2, BOTTOM, 0.0), (40, 6, LOCAL, 0.0), (64, 1, BOTTOM, 50.0),
            )
        ),
        _flash_attn,
        "batch 4, lengths above 256, head dims above 111, ALiBi, dropout (another generator)",
    ),
    *(
        Peer(
            name,
            _grid(
                Call(q, k, D=D, Hq=4, Hkv=4, data="uniform", dtype=dtype, mask=Causal() if q == k else Full(), scale=scale)
                for q, k, D, scale in (
                    (4, 4, 8, None), (4, 128, 21, None), (64, 8, 16, 1 / 16), (143, 128, 64, None), (64, 64, 72, None),
                    (256, 256, 32, None),
                )
                for dtype in ("float16", "float32")
            ),
            rule,
            "lengths above 256, head dims above 72, bfloat16",
        )
        for name, rule in (("torch SDPA, before 2024", _torch_old), ("torch SDPA, since", _torch_new))
    ),
    Peer(
        "FlexAttention",
        _grid([Call(256, 256, mask=m, dtype=d) for m in (Full(), Causal(), Window(64, 0)) for d in ("float16", "float32")]),
        _flex,
        "batch 4, 8 heads, length 2048",
    ),
    Peer(
        "xformers",
        _grid(
            Call(q, k, D=D, data="three", dtype=dtype, mask=mask)
            for q, k, D in ((32, 32, 16), (31, 64, 34), (68, 256, 64), (3, 15, 2), (132, 90, 31), (2, 2, 1))
            for dtype, mask in (("float16", Full()), ("float32", BOTTOM))
        ),
        _xformers,
        "of 200 random shapes twelve; NaN beyond the lengths of padded sequences",
    ),
    Peer(
        "cuDNN frontend",
        _grid(
            Call(q, k, D=8 * d, B=b, Hq=4, Hkv=hkv, data="sparse", scale=0.125, mask=mask, dtype="bfloat16" if d % 2 else "float16")
            for q, k, d, b, hkv, mask in (
                (17, 61, 4, 1, 4, BOTTOM), (128, 128, 8, 1, 2, Causal()), (1, 100, 3, 2, 1, Full()), (55, 200, 5, 1, 4, LOCAL),
                (99, 99, 2, 2, 2, Causal()), (200, 256, 8, 1, 1, BOTTOM), (33, 34, 7, 1, 4, Window(5, 10)), (64, 96, 6, 1, 4, Full()),
            )
        ),
        _cudnn,
        "of 2,336 random cases a file eight, lengths above 256, guard bytes (they would find stray writes)",
    ),
    Peer(
        "TransformerEngine",
        _grid([Call(128, k, data="tenth", Hq=4, Hkv=4, mask=m) for k, m in ((128, Full()), (256, Full()), (128, Causal()), (256, BOTTOM))]),
        _transformer_engine,
        "batch 8, 16 heads, lengths of 2048",
    ),
    Peer(
        "KernelBench 97",
        tuple(Call(128, 128, data="uniform", backward=False, seed=seed) for seed in range(5)),
        _kernelbench,
        "batch 32, 32 heads, length 512, D = 1024",
    ),
)  # fmt: skip
