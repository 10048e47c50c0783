"""`python -m flashproof` and the `flashproof` command: composes the modules that register commands."""

from __future__ import annotations

import signal
import sys
import traceback

import click

from .ci import bisect, gate, teeth, warm
from .fuzz import cli, reshrink
from .fuzz.commands import Exit, Stop, flashproof

MODULES = (cli, reshrink, gate, bisect, warm, teeth)
"""Importing them registered their commands."""


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit with its code; SIGTERM (a CI job cancelled) ends it as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """The exit code of a command; what goes wrong in flashproof itself is 5, never 1."""
    try:
        return int(flashproof.main(arguments, prog_name="flashproof", standalone_mode=False) or 0)
    except click.exceptions.Exit as e:
        return e.exit_code
    except click.ClickException as e:
        e.show()
        return int(e.code) if isinstance(e, Stop) else e.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("Stopped before anything was measured.", err=True)
        return int(Exit.BLIND)
    except BrokenPipeError:
        sys.stdout = None  # the reader went away (`| head`): nothing is left to flush
        return int(Exit.RIGHT)
    except Exception:  # noqa: BLE001 (our own bug: it must look neither like a wrong target nor like a right one)
        traceback.print_exc()
        click.echo("Error: flashproof itself failed; please report the lines above.", err=True)
        return int(Exit.INFRASTRUCTURE)


if __name__ == "__main__":
    main()
