"""One run of a target as a fit sees it: what is beyond a limit under a contract, and how large the errors are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from .contract import Contract
from .elements import FEWEST, excess, judge_problem
from .exact import Array, Problem, Reference, doubles
from .limits import limits
from .spread import sigmas
from .taint import separate


@dataclass(frozen=True)
class Sample:
    """One run: the problem, what was returned, and what a conforming implementation returns for it (None: not measured)."""

    problem: Problem
    outputs: Mapping[str, Tensor]
    dtype: str
    conforming: Mapping[str, Tensor] | None = None
    words: str = ""

    @cached_property
    def reference(self) -> Reference:
        """The float64 answer."""
        return Reference(separate(self.problem, Contract())[0])

    @cached_property
    def errors(self) -> dict[str, Array]:
        """Per tensor of enough elements, what was returned minus the answer."""
        return self._minus(self.outputs)

    @cached_property
    def conforming_errors(self) -> dict[str, Array]:
        """The same of the conforming implementation."""
        return self._minus(self.conforming or {})

    @cached_property
    def given(self) -> dict[str, Array]:
        """What was returned, as float64."""
        return {n: doubles(x) for n, x in self.outputs.items() if x is not None and n in self.reference.arrays}

    @property
    def backward(self) -> bool:
        """Whether a gradient was returned."""
        return any(n not in ("o", "lse") for n in self.given)

    @cached_property
    def plain(self) -> bool:
        """Whether elements against limits is all there is to say: finite numbers, the right shapes, no row without a key."""
        r = self.reference
        tensors = (
            self.problem.q,
            self.problem.k,
            self.problem.v,
            self.problem.do,
            self.problem.dlse,
            self.problem.bias,
        )
        finite = all(bool(t.isfinite().all()) for t in tensors if t is not None)
        alike = all(x.shape == r.arrays[n].shape and np.isfinite(x).all() for n, x in self.given.items())
        return finite and alike and not r.dead.any()

    def _minus(self, outputs: Mapping[str, Tensor]) -> dict[str, Array]:
        want = self.reference.arrays
        with np.errstate(all="ignore"):
            return {
                n: doubles(x) - want[n]
                for n, x in outputs.items()
                if n in want and x is not None and x.numel() >= FEWEST and tuple(x.shape) == want[n].shape
            }


def outside(sample: Sample, contract: Contract) -> list[str]:
    """Tensors of a run that are beyond a limit, or of the wrong shape."""
    if sample.plain:
        allowed = limits(sample.reference, contract, backward=sample.backward)
        ratios = {n: excess(x, sample.reference.arrays[n], allowed.b[n]) for n, x in sample.given.items()}
        return [n for n, x in ratios.items() if (np.where(allowed.loose.get(n, False), 0.0, x) > 1.0).any()]
    try:
        report = judge_problem(sample.problem, sample.outputs, contract)
    except ArithmeticError:  # ours, and nothing can be said of the target
        return []
    return [n for n, used in report.budget.items() if used > 1.0] + [
        f.tensor for f in report.findings if f.oracle == "shape"
    ]


def special(sample: Sample, contract: Contract) -> int:
    """Findings about rows without a key and about non-finite numbers."""
    try:
        findings = judge_problem(sample.problem, sample.outputs, contract).findings
    except ArithmeticError:  # as above
        return 0
    return sum(f.oracle in ("dead-row", "nonfinite") for f in findings)


def log_sizes(sample: Sample, errors: dict[str, Array], contract: Contract) -> dict[str, float]:
    """Per tensor with enough elements whose size can be expected, the log of the root mean square of error over that size."""
    expected = sigmas(sample.reference, contract, backward=any(n not in ("o", "lse") for n in errors)) if errors else {}
    sizes = {n: _log_size(e, expected[n]) for n, e in errors.items()}
    return {n: x for n, x in sizes.items() if x is not None}


def _log_size(error: Array, expected: Array) -> float | None:
    ok = np.isfinite(expected) & (expected > 0) & np.isfinite(error)
    if int(ok.sum()) < FEWEST // 2:
        return None
    z = error[ok] / expected[ok]
    return float(np.log(np.clip(np.sqrt((z * z).mean()), 1e-6, 1e9)))
