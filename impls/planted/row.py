"""What one planted bug is: a row of the table that `flashproof teeth` hunts through."""

from __future__ import annotations

from dataclasses import dataclass

from ...fuzz.case import Case
from .edits import Edit

FORWARD = Case(requires_grad="")
"""The smallest case: every size 1, no features, forward only."""


@dataclass(frozen=True)
class Planted:
    """One bug: what is replaced in which module; what goes wrong and where it was seen; what shows it, who catches it, how small.

    `trigger` says in words which calls go wrong. `oracle` and `tensor` are the finding expected at `minimal`, the case that a
    person would write, worked out from the edit; `before` are calls that must come first. `covers` has ids of reports.toml.
    """

    name: str
    story: str
    source: str
    trigger: str
    part: str
    edits: tuple[Edit, ...]
    oracle: str
    tensor: str
    minimal: Case
    before: tuple[Case, ...] = ()
    covers: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        """The name it is registered under."""
        return f"planted_{self.name}"

    @property
    def key(self) -> str:
        """The key of the failure that is expected."""
        return f"{self.oracle}:{self.tensor}"
