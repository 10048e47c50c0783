"""The pytest plugin: `pytest --flashproof-target TARGET` fuzzes a target without a line of test code.

pytest loads this module in every run, so nothing heavy is imported before an item runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

DEFAULT_SECONDS = 30.0
"""Time for each target when neither examples nor seconds are given."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options that begin with --flashproof; without a target they do nothing."""
    group = parser.getgroup("flashproof", "fuzzing attention kernels")
    group.addoption("--flashproof-target", action="append", default=[], metavar="TARGET", help="fuzz this callable (repeatable): package.module:attr, file.py:attr or a registered name")
    group.addoption("--flashproof-examples", type=int, default=None, metavar="N", help="cases for each target")
    group.addoption("--flashproof-seconds", type=float, default=None, metavar="S", help=f"time for each target (default {DEFAULT_SECONDS:g} when no examples are asked for)")
    group.addoption("--flashproof-seed", type=int, default=0, metavar="N", help="the same seed draws the same cases")
    group.addoption("--flashproof-dialect", default="", metavar="NAME", help="signature the targets follow; recognised when left out")
    group.addoption("--flashproof-device", default="cpu", metavar="DEVICE", help="cpu, cuda or cuda:N")
    group.addoption("--flashproof-contract", default="", metavar="SPEC", help="arithmetic promised, such as ieee or tf32")
    group.addoption("--flashproof-save", default="failures", metavar="DIR", help="where failing cases are written")


@pytest.hookimpl(tryfirst=True)  # before -k and -m choose among the items
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put one item for each target before the tests that were collected."""
    targets = config.getoption("flashproof_target")
    items[:0] = [FuzzItem.from_parent(session, name=t, nodeid=f"flashproof::{t}") for t in dict.fromkeys(targets)]


class Wrong(Exception):
    """The target failed, or too little was measured; the message is the whole report."""


class FuzzItem(pytest.Item):
    """Fuzzes the target that it is named after, in a process of its own."""

    def runtest(self) -> None:
        """Raise Wrong with the report unless the target passed."""
        report = self.fuzz()
        if report:
            raise Wrong(report)

    def fuzz(self) -> str:
        """What is wrong with the target; empty when nothing is."""
        from .commands import Options
        from .session import Budget, fuzz_target

        def get(name: str) -> Any:
            return self.config.getoption(f"flashproof_{name}")

        examples, seconds = get("examples"), get("seconds")
        if examples is None and seconds is None:
            seconds = DEFAULT_SECONDS
        options = Options(get("dialect"), get("device"), get("contract"))
        return fuzz_target(self.name, options, Budget(examples, seconds, get("seed")), Path(get("save")))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The report alone: a traceback through flashproof tells a kernel's author nothing."""
        return str(excinfo.value) if isinstance(excinfo.value, Wrong) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """The heading of a failure."""
        return self.path, None, f"flashproof {self.name}"


__all__: Iterable[str] = ("FuzzItem", "pytest_addoption", "pytest_collection_modifyitems")
