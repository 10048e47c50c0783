"""What an oracle says about one run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["fail", "warning"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: which oracle says so, about which tensor (or kernel argument), where, and by how much.

    `error`, `limit`, `got` and `want` are in units of the tensor; a non-finite value is kept as it is.
    """

    oracle: str
    tensor: str
    message: str
    index: tuple[int, ...] | None = None
    error: float | None = None
    limit: float | None = None
    got: float | None = None
    want: float | None = None
    severity: Severity = "fail"
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Failures with the same key are the same failure."""
        return f"{self.oracle}:{self.tensor}"

    def __str__(self) -> str:
        return f"{self.tensor}: {self.message}"

    def to_json(self) -> dict[str, Any]:
        """JSON object; non-finite numbers become the strings nan, inf, -inf."""
        names = ("oracle", "tensor", "message", "error", "limit", "got", "want", "severity", "details")
        out = {n: _number(getattr(self, n)) for n in names}
        return out | {"index": None if self.index is None else list(self.index)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Finding:
        """The finding that `to_json` wrote."""
        values: dict[str, Any] = {
            n: (float(v) if v in ("nan", "inf", "-inf") else v) for n, v in data.items() if n != "details"
        }
        values["index"] = None if data["index"] is None else tuple(data["index"])
        return cls(**values, details=data["details"])


def _number(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value


CAUSES = frozenset({"purity"})
"""Oracles whose findings make other answers wrong: who changes an input gets the next call wrong."""


def is_cause(key: str) -> bool:
    """Whether a failure of this key may be the cause of whatever else fails on the same cases."""
    return key.partition(":")[0] in CAUSES
