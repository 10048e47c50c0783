"""Per-element limits of every output under a precision contract: |computed - float64| <= limit for conforming code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from .contract import Contract
from .exact import Array, Bools, Reference
from .limits_backward import backward_limits
from .limits_forward import forward_limits


@dataclass(frozen=True)
class Limits:
    """The limit of every element, in the outputs' shapes, never NaN, and the elements without one.

    `loose`: where the limit is infinite, or an intermediate that is allowed to be narrow may overflow, so that nothing is
    promised; tensors without such elements are absent.
    """

    b: dict[str, Array]
    loose: dict[str, Bools]


@np.errstate(all="ignore")
def limits(reference: Reference, contract: Contract, *, backward: bool = True, centred: bool = True) -> Limits:
    """Limits of o and lse and, when the problem has `do` and `backward` is wanted, of dq, dk, dv (and dbias).

    Exactly 0 for rows that have no allowed key, keys that no row sees and bias entries that no pair uses.
    """
    r = reference
    f = forward_limits(r, contract, centred=centred)
    b = cast("dict[str, Array]", {"o": r.heads(f.o), "lse": r.heads(f.lse)[..., 0]})
    loose: dict[str, Bools] = {}
    if f.loose is not None:
        rows = cast(Bools, r.heads(np.broadcast_to(f.loose, f.lse.shape)))
        loose = {"o": np.broadcast_to(rows, b["o"].shape), "lse": rows[..., 0]}
    if backward and r.problem.do is not None:
        gradients, unconstrained = backward_limits(r, contract, f)
        b |= gradients
        loose |= unconstrained
    # Where the limit itself overflows (scores near finfo(float64).min: inf * 0) nothing is promised.
    b = {n: np.where(np.isnan(x), np.inf, x) for n, x in b.items()}
    for name, limit in b.items():
        if limit.max(initial=0.0) == np.inf:
            loose[name] = np.isinf(limit) | loose.get(name, False)
    return Limits(b, loose)
