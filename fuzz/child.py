"""What runs in the process of a worker: the nursery that forks children, and a child that loads a target and runs cases.

The nursery (nursery.py is its other side) is started through juror.py, whose children it forks too. A child has two pipes that only
this module uses; its standard output and error are a file of the parent's, so that whatever the target prints can be told apart and
cannot garble a message.
"""

from __future__ import annotations

import gc
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Self

import torch

from ..oracles.finding import Finding
from . import wire
from .case import case_from_json
from .execute import Execution, Runner, known_good, one_line
from .nursery import ORDER, OUT_OF_MEMORY, REPLY, STILL_ALIVE
from .offline import OfflineRunner
from .rooted import check, enter, tree_from_json

LOG_KEPT = 1 << 20
"""Bytes of printed text after which the file is emptied."""
PRINTED_SHOWN = 2000
LOUD = 16 << 20
"""Bytes printed in one case that are worth a warning, and after which the file is emptied while the case runs."""
TRIM_SECONDS = 0.2
ENDING_SECONDS = 5.0
"""How long a child may take to end after it closed its pipe."""

Kinds = dict[bytes, Callable[..., None]]
"""What a new child does with its descriptors, by the order that asks for one."""


def main(kinds: Kinds) -> None:
    """Be a nursery for these kinds of children until the parent goes."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    torch.set_num_threads(1)
    gc.freeze()  # what is imported now is shared with every child
    control.sendall(REPLY.pack(os.getpid()))
    tend(control, kinds)


def tend(control: socket.socket, kinds: Kinds) -> None:
    """Fork a child or tell how one ended, whenever the parent asks, until it goes."""
    while True:
        data, fds, _, _ = socket.recv_fds(control, ORDER.size, 3)
        if len(data) < ORDER.size:
            return
        order, pid = ORDER.unpack(data)
        control.sendall(REPLY.pack(_fork(control, fds, kinds[order]) if order in kinds else _wait(pid)))


def _fork(control: socket.socket, fds: list[int], serve: Callable[..., None]) -> int:
    """The new child's process id; never returns in the child."""
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        return pid
    try:
        control.close()
        serve(*fds)
    except BaseException:  # noqa: BLE001 (a forked process must not return into its parent's frames)
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _wait(pid: int) -> int:
    """The exit code of a child, negative for a signal; STILL_ALIVE when it does not end."""
    until = time.monotonic() + ENDING_SECONDS
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return STILL_ALIVE


def serve(requests: int, replies: int, printed: int) -> None:
    """Say hello, load the target that the first message names, then answer messages until the parent goes."""
    os.setsid()
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.close(printed)
    threading.Thread(target=leave_with_parent, args=(requests,), daemon=True).start()
    try:
        wire.send(replies, {"hello": os.getpid()})
        runner = _start(requests, replies)
        while runner is not None:
            _answer(runner, requests, replies)
    except wire.Closed:
        return


def leave_with_parent(requests: int) -> None:
    """End this process when the parent's end of the pipe closes, even while a target hangs."""
    poll = select.poll()
    poll.register(requests, 0)  # POLLHUP is always reported
    poll.poll()
    os._exit(0)


def _start(requests: int, replies: int) -> Runner | None:
    """The runner that the parent asks for; None after telling why there is none."""
    message, _ = wire.receive(requests)
    try:
        runner = _runner(message["runner"])
    except Exception as e:  # noqa: BLE001 (whatever it is, the parent must hear of it)
        shown = getattr(e, "traceback", "") if _kind(e) == "target" else traceback.format_exc()
        wire.send(replies, {"error": _kind(e), "sentence": str(e) or type(e).__name__, "traceback": shown})
        return None
    runner.watch.told = lambda variant: wire.send(replies, {"compiling": variant})
    gc.freeze()  # the target and what it imported too
    wire.send(replies, {"info": runner.info, "rss": resident_bytes()})
    return runner


def _runner(arguments: dict[str, Any]) -> Runner:
    """The runner of a target, loaded from a tree of its own where one is named; on a pretended device where an architecture is."""
    tree = tree_from_json(arguments.pop("tree"))
    if tree is not None:
        arguments["target"] = enter(tree, arguments["target"])
    kind = OfflineRunner if "arch" in arguments else Runner
    runner = kind(**arguments, printed=Printed(1).kept_short(), interruptible=False)
    if tree is not None:
        check(tree, arguments["target"])
    return runner


def _kind(error: Exception) -> str:
    """Whose fault it is that there is no runner: the target's, the command line's, or this installation's."""
    names = {"TargetError": "target", "DeviceAbsent": "device", "ValueError": "usage"}
    return names.get(type(error).__name__, "infrastructure")


def _answer(runner: Runner, requests: int, replies: int) -> None:
    message, _ = wire.receive(requests)
    operation: Callable[..., None] = {"run": _run, "probe": _probe, "known_good": _known_good}[message.pop("op")]
    operation(runner, replies, message)


def _run(runner: Runner, replies: int, message: dict[str, Any]) -> None:
    """Run a case. An error of the harness itself is told as such, never as one of the target."""
    try:
        case, names = case_from_json(message["case"]), ("exact", "repeat", "config", "stored")
        out = runner.run(case, **{n: message[n] for n in names if n in message})
    except Exception as e:  # noqa: BLE001 (as above)
        short = isinstance(e, MemoryError | torch.OutOfMemoryError)
        text = OUT_OF_MEMORY if short else type(e).__name__
        out = Execution("infrastructure", message=f"{text}: {one_line(str(e))}", traceback=traceback.format_exc())
    if isinstance(runner.printed, Printed) and runner.printed.bytes > LOUD:
        out.findings.append(_loud(runner.printed.bytes))
    tensors = {f"outputs.{n}": x for n, x in out.outputs.items()} | {
        f"exact.{n}": x for n, x in (out.exact or {}).items()
    }
    wire.send(replies, out.to_json() | {"exact": out.exact is not None, "rss": resident_bytes()}, tensors)


def _loud(count: int) -> Finding:
    message = f"the target printed {count / 1e6:,.0f} MB in one case; the first {PRINTED_SHOWN} characters are kept"
    return Finding("printed", "output", message, severity="warning")


def _probe(runner: Runner, replies: int, _: dict[str, Any]) -> None:
    rows, findings = runner.probe()
    wire.send(replies, {"rows": rows, "findings": [f.to_json() for f in findings]})


def _known_good(runner: Runner, replies: int, _: dict[str, Any]) -> None:
    try:
        wrong = known_good(runner.device)
    except Exception as e:  # noqa: BLE001 (a broken device raises whatever it raises)
        wrong = f"{type(e).__name__}: {one_line(str(e))}"
    wire.send(replies, {"wrong": wrong})


class Printed:
    """What was written to a file descriptor since the last call, at most PRINTED_SHOWN characters of it."""

    def __init__(self, fd: int) -> None:
        self.fd, self.read = fd, 0
        self.bytes = 0  # written between the last two calls
        self._head, self._dropped = b"", 0
        self._lock = threading.Lock()

    def __call__(self) -> str:
        sys.stdout.flush()
        sys.stderr.flush()
        with self._lock:
            size = os.fstat(self.fd).st_size
            self.bytes = self._dropped + size - self.read
            text = self._head or self._first(size)
            self.read, self._head, self._dropped = size, b"", 0
            if size > LOG_KEPT:
                self._empty()
        return text.decode(errors="replace")[:PRINTED_SHOWN]

    def kept_short(self) -> Self:
        """This, with a thread that empties the file whenever a case has printed LOUD bytes: a disk is smaller than a loop."""
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def _watch(self) -> None:
        while True:
            time.sleep(TRIM_SECONDS)
            self.trim()

    def trim(self) -> None:
        """Empty the file if it holds LOUD bytes of this case; its beginning is kept."""
        with self._lock:
            size = os.fstat(self.fd).st_size
            if size - self.read > LOUD:
                self._head = self._head or self._first(size)
                self._dropped += size - self.read
                self._empty()

    def _first(self, size: int) -> bytes:
        return os.pread(self.fd, min(size - self.read, 4 * PRINTED_SHOWN), self.read) if size > self.read else b""

    def _empty(self) -> None:
        os.ftruncate(self.fd, 0)
        self.read = 0


def resident_bytes() -> int:
    """Memory of this process that is resident now."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
