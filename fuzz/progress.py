"""Progress while a hunt runs: one line that rewrites itself on a terminal, else a line every 30 seconds."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

from ..oracles.finding import is_cause
from .found import Event

EVERY = 30.0
REDRAWN = 0.1
WIDTH = 100


class Progress:
    """An `on_event` for `hunt`. `live` None means: on a terminal, unless the variable CI says that nobody watches."""

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        live: bool | None = None,
        every: float = EVERY,
    ) -> None:
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty() and not os.environ.get("CI") if live is None else live
        self._clock = clock
        self._pause = REDRAWN if self.live else every
        self._next = clock() + (0.0 if self.live else every)
        self._shown = 0
        self._folded = False

    def __call__(self, event: Event) -> None:
        """Say a new failure at once, and how far the hunt is when it is time to."""
        if event.kind == "found" and not self._follows(event):
            self.say(f"found {event.text} after {_clock_text(event.campaign.seconds)}: {_first_words(event)}")
        if event.kind == "done":
            self.clear()
        elif self._clock() >= self._next:
            self._next = self._clock() + self._pause
            self._write(line(event))

    def _follows(self, event: Event) -> bool:
        """Whether a failure was found beside one that may cause it; the first time that is said, then they are only counted."""
        keys = event.verdict.keys if event.verdict else ()
        cause = "" if is_cause(event.text) else next((k for k in keys if is_cause(k)), "")
        if cause and not self._folded:
            self.say(f"what else fails on cases that fail {cause} is probably caused by it, and told at the end")
        self._folded = self._folded or bool(cause)
        return bool(cause)

    def say(self, text: str) -> None:
        """Print a line of its own, above the live one."""
        self.clear()
        self.stream.write(text[: WIDTH - 3] + "...\n" if len(text) > WIDTH else text + "\n")
        self.stream.flush()

    def clear(self) -> None:
        """Take the live line away."""
        if self._shown:
            self.stream.write("\r" + " " * self._shown + "\r")
            self.stream.flush()
            self._shown = 0

    def _write(self, text: str) -> None:
        if self.live:
            text = text[: WIDTH - 1]
            self.stream.write("\r" + text.ljust(self._shown))
            self._shown = len(text)
        else:
            self.stream.write(text[:WIDTH] + "\n")
        self.stream.flush()


def line(event: Event) -> str:
    """How far a hunt is, on one line."""
    c = event.campaign
    rate = c.cases / c.seconds if c.seconds > 0 else 0.0
    parts = [f"{_clock_text(c.seconds)}: {c.cases} cases"]
    if event.kind in ("case", "found"):
        parts.append(f"{rate:.0f}/s")
    parts += [f"{n} {word}" for n, word in ((c.refused, "refused"), (c.inexpressible, "inexpressible")) if n]
    if c.cases_to_first_failure is not None:
        parts.append(f"first failure at case {c.cases_to_first_failure}")
    if event.kind == "shrinking":
        parts.append(f"shrinking {event.text}")
    if event.failure is not None:
        parts.append(f"{len(c.failures)} of the failures shrunk")
    return ", ".join(parts)


def _clock_text(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def _first_words(event: Event) -> str:
    findings = event.verdict.failures if event.verdict else ()
    return next((str(f).partition("\n")[0] for f in findings if f.key == event.text), "")
