"""The order of failures: the most telling first, each before those that it may explain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..oracles.finding import is_cause
from .found import Failure
from .simpler import size

SECOND_LOOK = frozenset(
    {"exact", "statistical", "identity", "repeat", "sequence", "guard", "allocation", "alias", "global-state"}
)
"""Oracles that compare runs or look around the outputs: what they find is shown after wrong values."""
FORWARD_FIRST = ("o", "lse", "dq", "dk", "dv", "dbias", "dsinks")


def arranged(failures: Sequence[Failure]) -> list[Failure]:
    """The failures as they are shown: the most telling first, each followed by those that its own cause may explain.

    One stands behind another if its smallest case shows the other as well.
    """
    heads: list[Failure] = []
    behind: dict[str, list[Failure]] = {}
    for failure in sorted(failures, key=_telling):
        leaked = failure.behind if failure.fresh is False else ""
        cause = leaked or next((h.key for h in heads if h.key in failure.verdict.keys), "")
        if cause:
            behind.setdefault(cause, []).append(replace(failure, behind=cause))
        else:
            heads.append(replace(failure, behind=""))
    return [f for head in heads for f in (head, *behind.get(head.key, ()))]


def _telling(failure: Failure) -> tuple[object, ...]:
    """Order of failures: plain mistakes, then those that are seen from a second call or run; outputs before gradients."""
    return (*promising(failure.key), failure.key.startswith("dead-row:"), size(failure.case))


def promising(key: str) -> tuple[bool, bool, int]:
    """Order of keys by how much their failures tell: memory written to, plain mistakes, what a second look shows."""
    return (
        not is_cause(key) and not key.startswith("guard:"),
        key.partition(":")[0] in SECOND_LOOK,
        _forward_first(key),
    )


def _forward_first(key: str) -> int:
    tensor = key.partition(":")[2]
    return FORWARD_FIRST.index(tensor) if tensor in FORWARD_FIRST else -1
