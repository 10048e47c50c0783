"""What runs in a process that judges: a worker of its own, and a judge that answers case by case; fleet.py is its other side.

`python -m flashproof.fuzz.juror SOCKET` is the nursery of both kinds of children: those that run a target, and those that judge. The
latter forks a nursery for itself, so that the target's children under it see the GPU that was chosen for them and no other.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from ..impls.loading import TargetError
from . import child, nursery, wire
from .case import case_from_json
from .compiling import Compiled
from .delivery import packed
from .execute import DeviceAbsent, region_from_json
from .judge import Judge
from .nursery import WorkerError
from .rooted import tree_from_json
from .worker import Worker

KINDS: dict[bytes, Callable[..., None]] = {}
VISIBLE = "CUDA_VISIBLE_DEVICES"


def serve(requests: int, replies: int, printed: int) -> None:
    """Judge what the parent sends until it goes."""
    os.setsid()
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.close(printed)
    try:
        setup, _ = wire.receive(requests)
        if setup["visible"]:
            os.environ[VISIBLE] = setup["visible"]  # nothing in this process or above it has touched a device
        _fork_nursery(requests, replies)
        threading.Thread(target=child.leave_with_parent, args=(requests,), daemon=True).start()
        judge = _judge(setup, replies)
        while judge is not None:
            _answer(judge, requests, replies)
    except wire.Closed:
        return


def _fork_nursery(*inherited: int) -> None:
    """Make a fork of this process, which has imported all that is needed and started no thread, the nursery for its worker."""
    control, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        control.close()
        for fd in inherited:
            os.close(fd)
        os.setsid()
        try:
            child.tend(theirs, KINDS)
        finally:
            os._exit(0)
    theirs.close()
    nursery.adopt(nursery.Nursery.of(pid, control))


def _judge(setup: dict[str, Any], replies: int) -> Judge | None:
    """The judge that the parent asks for; None after telling why there is none."""
    arguments = setup["worker"] | {"tree": tree_from_json(setup["worker"]["tree"])}
    arguments["log"] = setup["log"] or None
    try:
        worker = Worker(**arguments)
    except (TargetError, DeviceAbsent, ValueError, WorkerError) as e:
        wire.send(replies, {"error": str(e) or type(e).__name__})
        return None
    worker.deadline = setup["deadline"]
    return Judge(worker, setup["contract"], region_from_json(setup["region"]))


def _answer(judge: Judge, requests: int, replies: int) -> None:
    message, _ = wire.receive(requests)
    worker: Any = judge.runner
    worker.compiled = Compiled()
    began = time.monotonic()
    verdict = judge.check(case_from_json(message["case"]), explain=False)
    wire.send(replies, *packed(verdict, time.monotonic() - began, worker.compiled, worker.unusable))


KINDS.update({b"fork": child.serve, b"jury": serve})

if __name__ == "__main__":
    torch.set_num_threads(1)
    child.main(KINDS)
