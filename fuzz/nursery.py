"""Nursery: one process that has imported torch and this package, and forks the children of workers.

A child so starts in milliseconds, where a new Python takes seconds: a failure is confirmed in fresh processes, and a crash is
shrunk through many of them. The nursery itself never loads a target, starts no thread and touches no device, so forking it is safe.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from typing import IO, Self

START_SECONDS = 120.0
"""For importing torch, and in a child the target and what that compiles at import: apart from every case's deadline."""
ORDER, REPLY = struct.Struct("<4sq"), struct.Struct("<q")
OUT_OF_MEMORY = "flashproof itself is out of memory"
"""How a child begins to tell of memory that was missing outside the target's call."""
STILL_ALIVE = 1 << 20
"""Answer to `wait` about a child that has not ended; no exit code is that large."""


class WorkerError(Exception):
    """No child can be started, through no fault of the target."""


class Forked:
    """A forked child of this process, with what is used of a subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid, self._ended = pid, False

    def poll(self) -> int | None:
        """0 if it has ended."""
        with contextlib.suppress(ChildProcessError):
            self._ended = self._ended or os.waitpid(self.pid, os.WNOHANG)[0] != 0
        return 0 if self._ended else None

    def wait(self) -> None:
        """Wait for its end."""
        if not self._ended:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            self._ended = True


class Nursery:
    """The process, and the socket on which it is told to fork and asked how a child ended."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.printed: IO[bytes] = tempfile.TemporaryFile(mode="a+b")  # noqa: SIM115 (lives as long as the process)
        self.control, theirs = socket.socketpair()
        self.control.settimeout(START_SECONDS)
        command = [sys.executable, "-m", f"{__package__}.juror", str(theirs.fileno())]
        try:
            self.process: subprocess.Popen[bytes] | Forked = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self.printed,
                stderr=self.printed,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=environment,
            )
        except OSError as e:
            self._release()
            raise WorkerError(f"the worker's process did not start: {e}") from e
        finally:
            theirs.close()
        try:
            self._reply()
        except WorkerError:
            self.close()
            raise

    @classmethod
    def of(cls, pid: int, control: socket.socket) -> Self:
        """The nursery that a forked child of this process is, told through this socket."""
        one = cls.__new__(cls)
        one.printed = tempfile.TemporaryFile(mode="a+b")  # noqa: SIM115 (as above)
        one.control = control
        one.control.settimeout(START_SECONDS)
        one.process = Forked(pid)
        return one

    def fork(self, *fds: int, order: bytes = b"fork") -> int:
        """The process id of a new child that was given these descriptors: requests, replies, standard output."""
        try:
            socket.send_fds(self.control, [ORDER.pack(order, 0)], fds)
        except OSError as e:
            raise self._lost() from e
        return self._reply()

    def wait(self, pid: int) -> int:
        """The exit code of a child that has ended, negative for a signal; STILL_ALIVE if it has not."""
        try:
            self.control.sendall(ORDER.pack(b"wait", pid))
        except OSError as e:
            raise self._lost() from e
        return self._reply()

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._release()

    def _release(self) -> None:
        self.control.close()
        self.printed.close()

    @property
    def alive(self) -> bool:
        """Whether it can still fork."""
        return self.process.poll() is None

    def _reply(self) -> int:
        try:
            data = self.control.recv(REPLY.size, socket.MSG_WAITALL)
        except OSError as e:
            raise self._lost() from e
        if len(data) < REPLY.size:
            raise self._lost()
        return int(REPLY.unpack(data)[0])

    def _lost(self) -> WorkerError:
        lines = "" if self.printed.closed else last_lines(self.printed.fileno()).strip()
        return WorkerError(f"the worker's process did not start or is gone: {lines or 'it printed nothing'}")


LAST_LINES = 40


def last_lines(fd: int) -> str:
    """The end of a file that a process printed to."""
    size = os.fstat(fd).st_size
    text = os.pread(fd, 8192, max(0, size - 8192)).decode(errors="replace")
    return "".join(text.splitlines(keepends=True)[-LAST_LINES:])


_nurseries: dict[tuple[object, ...], Nursery] = {}


def _key(environment: dict[str, str]) -> tuple[object, ...]:
    return (sys.executable, os.getcwd(), *sorted(environment.items()))


def adopt(one: Nursery) -> None:
    """Make this the nursery for the present environment, in the place of any that this process inherited."""
    _nurseries.clear()
    _nurseries[_key(_environment())] = one


def nursery() -> Nursery:
    """The nursery for the present environment, working folder and module path; started when there is none."""
    environment = _environment()
    key = _key(environment)
    if key in _nurseries and not _nurseries[key].alive:
        _nurseries.pop(key).close()
    if key not in _nurseries:
        _nurseries[key] = Nursery(environment)
    return _nurseries[key]


@atexit.register
def _close_all() -> None:
    while _nurseries:
        _nurseries.popitem()[1].close()


def _environment() -> dict[str, str]:
    """The parent's environment and module path, and one thread. Each child decides itself whether Triton is interpreted."""
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    out = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    return {n: v for n, v in out.items() if n not in ("TRITON_INTERPRET", "PYTEST_CURRENT_TEST")}
