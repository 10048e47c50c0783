"""What the numbers of a real tensor are like, measured on its device without waiting for it, and the data regime nearest to them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SAMPLE = 1 << 18
"""Elements of a tensor that are looked at, spread over it; that all are finite is told of every one."""
NAMES = (
    "mean",
    "std",
    "largest",
    "least",
    "most",
    "zeros",
    "nan",
    "inf",
    "finite",
    "channels",
    "rows",
    "same_rows",
    "norm",
)
Statistics = dict[str, float]


def measure(x: Tensor) -> Tensor | None:
    """The numbers called NAMES of a (B, H, L, D) tensor, as a float32 vector on its device; None of an empty tensor.

    channels: the root mean square of the largest channel over that of the mean one; rows: of the largest row over the
    smallest that is not zero; same_rows: the largest difference of a row from the first (-1 of a single row); norm: the largest row's.
    """
    if not x.numel():
        return None
    s = sample(x).float()
    bad = ~torch.isfinite(s)
    clean = s.masked_fill(bad, 0.0)
    square = clean * clean
    channel, row = square.mean((0, 1, 2)).sqrt(), square.mean(3).sqrt()
    smallest = row.masked_fill(row == 0, torch.inf).amin()
    largest = clean.abs().amax()
    one = torch.ones_like(largest)
    numbers = (
        clean.mean(), clean.std(correction=0), largest, clean.amin(), clean.amax(), (s == 0).float().mean(),
        torch.isnan(s).float().sum(), torch.isinf(s).float().sum(), torch.isfinite(x.sum(dtype=torch.float32)).float(),
        torch.where(largest > 0, channel.amax() / channel.mean(), one), torch.where(largest > 0, row.amax() / smallest, one),
        (clean - clean[:, :, :1]).abs().amax() if x.shape[2] > 1 else -one, row.amax() * x.shape[3] ** 0.5,
    )  # fmt: skip
    return torch.stack(numbers)


def sample(x: Tensor) -> Tensor:
    """At most SAMPLE elements of a (B, H, L, D) tensor as a view: whole rows, evenly spread."""
    for axis in (0, 1, 2):
        over = -(-x.numel() // SAMPLE)
        if over > 1:
            x = x[(slice(None),) * axis + (slice(None, None, min(over, x.shape[axis])),)]
    return x


def read(vector: Tensor | None) -> Statistics:
    """The numbers by name; this waits for the device."""
    return {} if vector is None else dict(zip(NAMES, (float(f"{n:.4g}") for n in vector.tolist()), strict=True))


def regime(of: Mapping[str, Statistics], scale: float, dtype: torch.dtype, masked: bool) -> str:
    """The data regime nearest to the statistics of q, k and v; `masked`: non-finite numbers do not reach the output."""
    known = [s for s in (of.get(n, {}) for n in "qkv") if s]
    if not known:
        return "normal"
    if any(not s["finite"] for s in known):
        return "nonfinite_masked" if masked else "nonfinite"
    if len(known) == 3 and known[1]["same_rows"] == 0 and known[0]["same_rows"] <= 0:
        return "constant"
    return _of_scores(of, scale) or _of_spread(known, dtype) or "normal"


def _of_scores(of: Mapping[str, Statistics], scale: float) -> str:
    """What the sizes of q, k and v to one another say."""
    q, k, v = (of.get(n, {}) for n in "qkv")
    if v and abs(v["mean"]) > 3 * v["std"]:
        return "offset"
    if not (q and k):
        return ""
    channels = max(s["channels"] for s in (q, k, v) if s)
    if channels >= 8:
        return "outlier"
    largest = abs(scale) * q["norm"] * k["norm"]
    return "huge" if largest > 200 else ""


def _of_spread(known: list[Statistics], dtype: torch.dtype) -> str:
    """What the distribution of single numbers says."""
    largest = max(s["largest"] for s in known)
    if (
        largest < 16 * torch.finfo(dtype).smallest_normal
        or known[-1]["largest"] < 16 * torch.finfo(dtype).smallest_normal
    ):
        return "subnormal"
    if largest < 2.0**-6:
        return "tiny"
    if max(s["zeros"] for s in known) >= 0.5:
        return "sparse_int"
    if max(s["rows"] for s in known) > 32:
        return "mixedscale"
    if max(s["largest"] / s["std"] if s["std"] else 0.0 for s in known) > 30:
        return "heavy"
    return "uniform" if all(s["std"] and s["largest"] / s["std"] < 1.8 for s in known) else ""


def gradient(s: Statistics) -> str:
    """The kind of grad_output nearest to its statistics."""
    if not s:
        return "normal"
    if s["least"] == s["most"] and s["most"] in (0.0, 1.0):
        return "ones" if s["most"] else "zero"
    return "scaled" if s["largest"] > 128 else "normal"
