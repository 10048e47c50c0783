"""Progress rewrites one line on a terminal and writes a line now and then elsewhere."""

from __future__ import annotations

import io

import pytest

from flashproof.fuzz.case import Case
from flashproof.fuzz.found import Campaign, Event
from flashproof.fuzz.judge import Verdict
from flashproof.fuzz.progress import WIDTH, Progress
from flashproof.oracles.finding import Finding


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def event(kind: str = "case", **campaign: object) -> Event:
    verdict = Verdict(Case(), "fail", (Finding("value", "o", "error 1 exceeds limit 0 " + "x" * 200),))
    return Event(kind, Campaign(**{"cases": 7, "seconds": 2.0, **campaign}), text="value:o", verdict=verdict)  # type: ignore[arg-type]


def test_elsewhere_a_line_is_written_every_thirty_seconds() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, clock)
    for clock.now in (0, 10, 29.9, 30, 45, 59, 61):
        progress(event(cases=int(clock.now)))
    assert [text.split(", ")[0].split(": ")[1] for text in stream.getvalue().splitlines()] == ["30 cases", "61 cases"]


def test_on_a_terminal_one_line_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    stream, clock = Terminal(), Clock()
    progress = Progress(stream, clock)
    for clock.now in (0.0, 0.05, 0.2):
        progress(event())
    assert stream.getvalue().count("\r2.0 s: 7 cases") == 2
    assert "\n" not in stream.getvalue()


def test_a_terminal_that_nobody_watches_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    stream, clock = Terminal(), Clock()
    progress = Progress(stream, clock)
    clock.now = 31.0
    progress(event())
    assert "\r" not in stream.getvalue()
    assert stream.getvalue().endswith("\n")


def test_a_new_failure_is_told_at_once_on_one_line() -> None:
    stream = io.StringIO()
    Progress(stream, Clock())(event("found"))
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("found value:o after 2.0 s: o: error 1")
    assert len(line) <= WIDTH


def test_the_live_line_is_gone_at_the_end() -> None:
    stream = io.StringIO()
    progress = Progress(stream, Clock(), live=True)
    progress(event())
    progress(event("done"))
    assert stream.getvalue().endswith(" \r")


def test_shrinking_is_told() -> None:
    stream = io.StringIO()
    Progress(stream, Clock(), live=True)(event("shrinking", cases_to_first_failure=3))
    assert stream.getvalue() == "\r2.0 s: 7 cases, first failure at case 3, shrinking value:o"
