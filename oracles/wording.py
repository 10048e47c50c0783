"""Findings about elements of tensors, in the words that every report uses."""

from __future__ import annotations

import numpy as np

from .exact import Array, Bools
from .finding import Finding


def element_finding(
    oracle: str, name: str, x: Array, want: Array, limit: Array, ratio: Array, must: Bools | None
) -> Finding:
    """The worst element, with the next worst in the details."""
    order = np.argsort(-ratio, axis=None, kind="stable")[: min(5, int((ratio > 0).sum()))]
    worst = [tuple(int(i) for i in np.unravel_index(flat, ratio.shape)) for flat in order]
    at = worst[0]
    got, exact, bound = float(x[at]), float(want[at]), float(limit[at])
    error = abs(got - exact)
    if must is not None and oracle == "nonfinite" and bool(must[at]):
        exact = float("nan")
    elements = [
        {"index": list(i), "got": _plain(x[i]), "want": _plain(want[i]), "limit": _plain(limit[i])} for i in worst
    ]
    details = {"count": int((ratio > 0).sum()), "of": int(ratio.size), "worst": elements}
    return Finding(
        oracle, name, _message(oracle, at, error, bound, got, exact), at, error, bound, got, exact, details=details
    )


def _plain(value: float) -> float | str:
    """A number that JSON has, or its name."""
    return float(value) if np.isfinite(value) else str(float(value))


def _message(oracle: str, at: tuple[int, ...], error: float, limit: float, got: float, want: float) -> str:
    got_text, want_text = pair(got, want)
    where = f"at {list(at)}: got {got_text}, want {want_text}"
    if oracle == "value":
        return f"error {short(error)} exceeds limit {short(limit)} {where}"
    if oracle == "dead-row":
        return f"row with no allowed key is wrong {where}"
    return f"{'finite where a NaN or Inf input must show' if np.isfinite(got) else 'not finite'} {where}"


def short(x: float) -> str:
    """Two digits, exponent without padding: 3.1e-2."""
    if not np.isfinite(x):
        return str(x)
    mantissa, _, exponent = f"{x:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def pair(got: float, want: float) -> tuple[str, str]:
    """Both numbers with as few digits (three or more) as show that they differ."""
    for digits in range(3, 17):
        texts = f"{got:.{digits}g}", f"{want:.{digits}g}"
        if texts[0] != texts[1] or got == want:
            return texts
    return repr(got), repr(want)


def shape_finding(name: str, got: tuple[int, ...], want: tuple[int, ...]) -> Finding:
    """A tensor of the wrong shape."""
    return Finding(
        "shape", name, f"shape must be {list(want)}, got {list(got)}", details={"got": list(got), "want": list(want)}
    )


def statistical_finding(name: str, rms: float, largest: float, count: int, zrms: float, zmax: float) -> Finding:
    """A warning of the statistical tier."""
    message = (
        f"errors are larger than independent roundings explain: {rms:.2f} times the expected scale on average (limit {zrms:g}), "
        f"{largest:.1f} times at worst (limit {zmax:g}) over {count} elements"
    )
    return Finding(
        "statistical", name, message, severity="warning", details={"zrms": rms, "zmax": largest, "count": count}
    )
