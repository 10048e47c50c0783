"""The child process of a worker: it loads a target and runs the cases it is sent. `python -m flashproof.fuzz.child IN OUT`.

IN and OUT are pipe descriptors that only this module uses; standard output and error are files of the parent's, so that whatever the
target prints can be told apart and cannot garble a message.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from . import wire

LOG_KEPT = 1 << 20
"""Bytes of printed text after which the file is emptied."""
PRINTED_SHOWN = 2000


def main() -> None:
    """Say hello, load the target that the first message names, then answer messages until the parent goes."""
    requests, replies = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(requests, False)
    os.set_inheritable(replies, False)
    threading.Thread(target=_leave_with_parent, args=(requests,), daemon=True).start()
    wire.send(replies, {"hello": os.getpid()})
    try:
        runner = _start(requests, replies)
        while runner is not None:
            _answer(runner, requests, replies)
    except wire.Closed:
        return


def _leave_with_parent(requests: int) -> None:
    """End this process when the parent's end of the pipe closes, even while a target hangs."""
    poll = select.poll()
    poll.register(requests, 0)  # POLLHUP is always reported
    poll.poll()
    os._exit(0)


def _start(requests: int, replies: int) -> Any:
    """The runner that the parent asks for; None after telling why there is none."""
    message, _ = wire.receive(requests)
    from ..impls.loading import TargetError

    try:
        import torch

        from .execute import DeviceAbsent, Runner
    except Exception as e:
        wire.send(replies, {"error": "infrastructure", "sentence": f"{type(e).__name__}: {e}", "traceback": traceback.format_exc()})
        return None
    torch.set_num_threads(1)
    try:
        runner = Runner(**message["runner"], printed=Printed(sys.stdout.fileno()))
    except (TargetError, DeviceAbsent, ValueError) as e:
        kind = {TargetError: "target", DeviceAbsent: "device"}.get(type(e), "usage")
        wire.send(replies, {"error": kind, "sentence": str(e), "traceback": getattr(e, "traceback", "")})
        return None
    wire.send(replies, {"info": runner.info, "rss": resident_bytes()})
    return runner


def _answer(runner: Any, requests: int, replies: int) -> None:
    message, _ = wire.receive(requests)
    operation: Callable[..., None] = {"run": _run, "probe": _probe}[message.pop("op")]
    operation(runner, replies, message)


def _run(runner: Any, replies: int, message: dict[str, Any]) -> None:
    """Run a case. An error of the harness itself is told as such, never as one of the target."""
    from .case import case_from_json
    from .execute import Execution

    try:
        out = runner.run(case_from_json(message["case"]), exact=message["exact"], repeat=message["repeat"])
    except Exception as e:
        out = Execution("infrastructure", message=f"{type(e).__name__}: {e}", traceback=traceback.format_exc())
    tensors = {f"outputs.{n}": x for n, x in out.outputs.items()} | {f"exact.{n}": x for n, x in (out.exact or {}).items()}
    wire.send(replies, out.to_json() | {"exact": out.exact is not None, "rss": resident_bytes()}, tensors)


def _probe(runner: Any, replies: int, message: dict[str, Any]) -> None:
    rows, findings = runner.probe()
    wire.send(replies, {"rows": rows, "findings": [f.to_json() for f in findings]})


class Printed:
    """What was written to a file descriptor since the last call, at most PRINTED_SHOWN characters of it."""

    def __init__(self, fd: int) -> None:
        self.fd, self.read = fd, 0

    def __call__(self) -> str:
        sys.stdout.flush()
        sys.stderr.flush()
        size = os.fstat(self.fd).st_size
        if size == self.read:
            return ""
        text = os.pread(self.fd, min(size - self.read, 4 * PRINTED_SHOWN), self.read).decode(errors="replace")
        self.read = size
        if size > LOG_KEPT:
            os.ftruncate(self.fd, 0)
            self.read = 0
        return text[:PRINTED_SHOWN]


def resident_bytes() -> int:
    """Memory of this process that is resident now."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
