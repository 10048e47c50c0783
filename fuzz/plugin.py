"""The pytest plugin: `pytest --flashproof-target TARGET` fuzzes a target without a line of test code.

pytest loads this module in every run, so nothing heavy is imported before an item runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

DEFAULT_SECONDS = 30.0
"""Time for each target when neither examples nor seconds are given."""
TARGET_HELP = "fuzz this callable (repeatable): package.module:attr, file.py:attr or a registered name"
SECONDS_HELP = f"time for each target (default {DEFAULT_SECONDS:g} when no examples are asked for)"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options that begin with --flashproof; without a target they do nothing."""
    group = parser.getgroup("flashproof", "fuzzing attention kernels")
    group.addoption("--flashproof-target", action="append", default=[], metavar="TARGET", help=TARGET_HELP)
    group.addoption("--flashproof-examples", type=_count, default=None, metavar="N", help="cases for each target")
    group.addoption("--flashproof-seconds", type=_seconds, default=None, metavar="S", help=SECONDS_HELP)
    group.addoption("--flashproof-seed", type=int, default=0, metavar="N", help="the same seed draws the same cases")
    group.addoption(
        "--flashproof-dialect",
        default="",
        metavar="NAME",
        help="signature the targets follow; recognised when left out",
    )
    group.addoption("--flashproof-device", default="cpu", metavar="DEVICE", help="cpu, cuda or cuda:N")
    group.addoption(
        "--flashproof-contract", default="", metavar="SPEC", help="arithmetic promised, such as ieee or tf32"
    )
    group.addoption("--flashproof-save", default="failures", metavar="DIR", help="where failing cases are written")


def _count(text: str) -> int:
    """A number of cases; argparse tells what is wrong with another."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text}")
    return int(text)


def _seconds(text: str) -> float:
    """A time above zero."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text}")
    return seconds


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
        from .commands import Exit, Options, Stop
        from .hunting import Budget, hunted
        from .session import header, opened

        examples, seconds = self._option("examples"), self._option("seconds")
        if examples is None and seconds is None:
            seconds = DEFAULT_SECONDS
        options = Options(self._option("dialect"), self._option("device"), self._option("contract"))
        try:
            with opened(self.name, options) as session:
                said = header(session)
                outcome = hunted(session, Budget(examples, seconds, self._option("seed")), Path(self._option("save")))
        except Stop as e:
            return f"{e.detail}\n{e.message}".strip()
        if outcome.interrupted:
            raise KeyboardInterrupt
        if outcome.code == Exit.RIGHT:
            return ""
        return "\n\n".join(text for text in ("\n".join(said), outcome.report, outcome.closing) if text)

    def _option(self, name: str) -> Any:
        return self.config.getoption(f"flashproof_{name}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The report alone: a traceback through flashproof tells a kernel's author nothing."""
        return str(excinfo.value) if isinstance(excinfo.value, Wrong) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """The heading of a failure."""
        return self.path, None, f"flashproof {self.name}"
