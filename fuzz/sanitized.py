"""What runs under compute-sanitizer: `python -m flashproof.fuzz.sanitized FILE` calls one target on each case of a list, once.

FILE is JSON: the arguments of the Runner, and the cases. A line that begins with MARK goes around each case on standard output, where
the sanitizer writes its report too: errors between two lines belong to that case. The guards of an ordinary run are off: they
read and poison memory beside a target's own, which is no error to the sanitizer, and would hide from it what is not written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from .case import Case, case_from_json
from .execute import Execution, Runner, one_line
from .rooted import enter, tree_from_json

MARK = "@flashproof-case"


class Plain(Runner):
    """A runner without memory guards."""

    @contextmanager
    def _guards(self, out: Execution, mode: str = "") -> Iterator[dict[str, Tensor]]:  # noqa: ARG002 (as its parent has it)
        yield {}


def main() -> None:
    """Run the cases, with a line before and after each."""
    given = json.loads(Path(sys.argv[1]).read_text())
    runner = _runner(given["runner"])
    for number, data in enumerate(given["cases"]):
        say(number, "begin")
        say(number, "end", _told(runner, case_from_json(data)))


def _runner(arguments: dict[str, Any]) -> Runner:
    tree = tree_from_json(arguments.pop("tree", None))
    if tree is not None:
        arguments["target"] = enter(tree, arguments["target"])
    return Plain(**arguments)


def _told(runner: Runner, case: Case) -> str:
    """The status of a case, and a sentence about what went wrong."""
    try:
        out = runner.run(case)
    except Exception as e:  # noqa: BLE001 (after an error that the sanitizer reports anything may be raised)
        return f"raised {type(e).__name__}: {one_line(str(e))}"
    return f"{out.status} {out.message}".strip()


def say(number: int, *words: str) -> None:
    """One line, written at once."""
    print("\n" + " ".join([MARK, str(number), *words]), flush=True)


if __name__ == "__main__":
    main()
