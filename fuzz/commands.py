"""What every command shares: the group they register in, their options, exit codes, and errors told in one sentence.

A module adds commands with `@flashproof.command()`; `__main__` imports the modules, so that none of them needs another.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import click

from .case import DTYPES, MODES
from .corpus import FAILURES


class Exit(IntEnum):
    """What the exit code of a command means."""

    RIGHT = 0
    WRONG = 1
    USAGE = 2
    SLOWER = 3
    BLIND = 4
    INFRASTRUCTURE = 5


PRECEDENCE = (Exit.USAGE, Exit.WRONG, Exit.SLOWER, Exit.INFRASTRUCTURE, Exit.BLIND, Exit.RIGHT)
VERDICTS = {
    Exit.RIGHT: "pass",
    Exit.WRONG: "fail",
    Exit.USAGE: "error",
    Exit.SLOWER: "slower",
    Exit.BLIND: "blind",
    Exit.INFRASTRUCTURE: "error",
}
"""The word that stands for an exit code in JSON."""


def worst(codes: Iterable[int]) -> Exit:
    """The code that decides when several hold; RIGHT for none."""
    return min((Exit(c) for c in codes), key=PRECEDENCE.index, default=Exit.RIGHT)


class Stop(click.ClickException):
    """Ends a command with one sentence on stderr and an exit code."""

    def __init__(self, message: str, code: Exit = Exit.USAGE, detail: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.detail = detail

    def show(self, file: Any = None) -> None:
        """Print the detail (a target's own traceback), then the sentence."""
        if self.detail:
            click.echo(self.detail.rstrip(), err=True)
        super().show(file)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="flashproof")
def flashproof() -> None:
    """Correctness fuzzing of attention kernels.

    A TARGET is package.module:attr, path/to/file.py:attr, or a name that `flashproof list` shows.
    """


@dataclass(frozen=True)
class Options:
    """How a target is run and which cases it is given. An empty device is the CPU, or what a case file says."""

    dialect: str = ""
    device: str = ""
    contract: str = ""
    dtypes: tuple[str, ...] = ()
    max_len: int | None = None
    modes: tuple[str, ...] = ()
    in_process: bool = False
    log: Path | None = None
    configs: str = ""
    jobs: int = 1
    beyond_warm: bool = False
    shrink_seconds: float | None = None

    def over(self, dialect: str, device: str, contract: str) -> Options:
        """These options, with the given ones where nothing was asked for."""
        return replace(
            self, dialect=self.dialect or dialect, device=self.device or device, contract=self.contract or contract
        )


SHARED = (
    click.option(
        "--dialect", default="", metavar="NAME", help="Signature the target follows; recognised when left out."
    ),
    click.option(
        "--device",
        default="",
        metavar="DEVICE",
        help="cpu (the default), cuda, cuda:N; several for fuzz and gate: cuda:0,cuda:1 or cuda:all.",
    ),
    click.option(
        "--contract",
        default="",
        metavar="SPEC",
        help="Arithmetic promised: ieee, tf32, hopper, ... with changes, as in ieee,kv_tile=64.",
    ),
    click.option(
        "--dtype", "dtypes", multiple=True, type=click.Choice(DTYPES), help="Only these element types (repeatable)."
    ),
    click.option(
        "--mode",
        "modes",
        multiple=True,
        type=click.Choice(MODES[1:]),
        help="Also call it this way in some cases: under autocast, compiled, checked as an operator (repeatable).",
    ),
    click.option("--max-len", type=click.IntRange(min=0), default=None, metavar="N", help="No Lq or Lk above N."),
    click.option(
        "--in-process",
        is_flag=True,
        help="Run the target in this process, to debug it; a crash or hang then ends the run.",
    ),
    click.option(
        "--log",
        type=click.Path(dir_okay=False, path_type=Path),
        default=None,
        metavar="FILE",
        help="Write each case before it runs: names the case that took the machine down.",
    ),
    click.option(
        "--configs",
        type=click.Choice(["first", "each", "tuned"]),
        callback=lambda _context, _option, value: value or "",
        help="Which configurations of autotuned Triton kernels run: the first (interpreted), each, or what Triton chooses.",
    ),
)


def takes_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with the shared options, handed to it as one `options: Options`, with those of its own that are in it."""
    names = [f.name for f in fields(Options)]

    @functools.wraps(command)
    def with_options(**given: Any) -> Any:
        options = Options(**{name: given.pop(name) for name in names if name in given})
        return command(options=options, **given)

    for option in reversed(SHARED):
        with_options = option(with_options)
    return with_options


class Seconds(click.ParamType):  # type: ignore[type-arg] # generic in new versions of click only
    """A number of seconds above zero."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; a usage error for anything that is not finite and above zero."""
        try:
            seconds = float(value)
        except ValueError:
            seconds = float("nan")
        if not 0 < seconds < float("inf"):
            self.fail(f"must be a number of seconds above 0, got {value}", param, ctx)
        return seconds


class Writable(click.Path):
    """A file or folder that can be made or written; told before anything is run, so that no result is lost for it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; a usage error when nothing can be written there."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        place = path if self.file_okay is False else path.parent
        while not place.exists() and place != place.parent:
            place = place.parent
        try:
            with tempfile.TemporaryFile(dir=place):
                return path
        except OSError as e:
            self.fail(f"{path} must be writable, got {place}: {e.strerror}", param, ctx)


COUNT = click.IntRange(min=1)
FOLDER = Writable(file_okay=False, path_type=Path)
FILE = Writable(dir_okay=False, path_type=Path)

JSON = click.option("--json", "json_file", type=FILE, default=None, metavar="FILE", help="Write the result as JSON.")
JOBS = click.option(
    "--jobs",
    type=COUNT,
    default=1,
    show_default=True,
    metavar="N",
    help="Workers at once on each device; the result is the same, sooner.",
)
SHRINK_SECONDS = click.option(
    "--shrink-seconds",
    type=Seconds(),
    default=None,
    metavar="S",
    help="Time to shrink and study all that was found (default half of --seconds, 10 to 60; 20 without; 60 on a GPU).",
)
BEYOND_WARM = click.option(
    "--beyond-warm",
    is_flag=True,
    help="Hunt on a GPU as if `warm` had left no list beside Triton's cache: compile more.",
)
SEED = click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="The same seed draws the same cases.",
)
SAVE = click.option(
    "--save", type=FOLDER, default=FAILURES, show_default=True, metavar="DIR", help="Where failing cases are written."
)
