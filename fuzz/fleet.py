"""Several workers at once: cases are judged ahead in processes of their own, and their verdicts taken in the order they were drawn.

So a hunt is the same whatever the number of workers: which cases are drawn, which fail, what is found first. Judging a case costs
more time than most targets take, so each worker has a process that judges for it (juror.py). What is found is shrunk and studied with
the one worker that every session has.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from . import wire
from .case import Case
from .delivery import Judged, unpacked
from .execute import DeviceAbsent, Execution, present, region_to_json
from .judge import Judge, Verdict
from .nursery import WorkerError, last_lines, nursery
from .worker import Worker

AHEAD = 2
"""Cases that a process holds: the one it judges, and the next, so that it need not wait for this process."""
LOST = 3
"""Processes that may be lost before the run is stopped."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


def devices(text: str) -> tuple[str, ...]:
    """The devices that --device names: one, several with commas, or all CUDA devices. ValueError or DeviceAbsent if it is none."""
    if text == "cuda:all":
        count = torch.cuda.device_count()
        if not count:
            raise DeviceAbsent(f"device cuda:all is not there: torch {torch.__version__} sees no CUDA device")
        return tuple(f"cuda:{n}" for n in range(count))
    names = tuple(name.strip() for name in text.split(","))
    if len(names) == 1:
        return (present(text),)
    if len(set(names)) < len(names) or not all(n.startswith("cuda:") for n in names):
        raise ValueError(
            f"device must be cpu, cuda, cuda:N, cuda:all, or different cuda:N with commas, got device={text!r}"
        )
    return tuple(map(present, names))


def visible(device: str) -> str:
    """What CUDA_VISIBLE_DEVICES has to be for a process that is to see this device alone; empty for a CPU."""
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return ""
    seen = [n.strip() for n in os.environ.get(VISIBLE, "").split(",") if n.strip()]
    return seen[int(index or 0)] if int(index or 0) < len(seen) else index or "0"


@contextmanager
def crew(judge: Judge, names: Sequence[str], jobs: int, log: Path | None = None) -> Iterator[None]:
    """Within it the judge has cases judged ahead by `jobs` workers for each device; one worker is no crew."""
    worker = judge.runner
    if len(names) * jobs == 1 or not isinstance(worker, Worker):
        yield
        return
    places = [name for _ in range(jobs) for name in names]
    fleet = Fleet(worker, [_setup(judge, worker, name, n, log) for n, name in enumerate(places, 1)])
    judge.ahead = fleet
    try:
        yield
    finally:
        judge.ahead = None
        fleet.close()


def _setup(judge: Judge, worker: Worker, device: str, number: int, log: Path | None) -> dict[str, Any]:
    """What a process has to know to judge as `judge` does."""
    kind = device.partition(":")[0]
    return {
        "worker": worker.arguments | {"device": kind},
        "visible": visible(device),
        "contract": judge.spec,
        "region": region_to_json(judge.region),
        "deadline": worker.deadline,
        "log": f"{log.absolute()}.{number}" if log else "",
    }


class Juror:
    """A process that judges, seen from here: its pipes, and the cases that it has yet to answer, in order."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.setup = setup
        self.cases: deque[Case] = deque()
        self.printed: IO[bytes] = tempfile.TemporaryFile(mode="a+b")  # noqa: SIM115 (lives as long as the process)
        their_in, self.requests = os.pipe()
        self.replies, their_out = os.pipe()
        try:
            self.nursery = nursery()
            self.pid = self.nursery.fork(their_in, their_out, self.printed.fileno(), order=b"jury")
        finally:
            os.close(their_in)
            os.close(their_out)
        with contextlib.suppress(wire.Closed):  # told when its answer is read
            wire.send(self.requests, setup)

    def give(self, case: Case) -> None:
        """Send a case."""
        self.cases.append(case)
        with contextlib.suppress(wire.Closed):
            wire.send(self.requests, {"case": case.to_json()})

    def answer(self) -> Judged:
        """What it says about the oldest of its cases. WorkerError with a sentence when it cannot judge; wire.Closed when it is gone."""
        message, tensors = wire.receive(self.replies)
        if "error" in message:
            raise WorkerError(f"a further worker did not start: {message['error']}")
        return unpacked(self.cases.popleft(), message, tensors)

    def end(self) -> None:
        """Kill it; its worker's processes see their pipes close."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(WorkerError):
            self.nursery.wait(self.pid)
        for fd in (self.requests, self.replies):
            os.close(fd)
        self.printed.close()


class Fleet:
    """Judges cases ahead. `worker` is the session's own: what was compiled, and whether a device is lost, is entered there."""

    def __init__(self, worker: Worker, setups: Sequence[dict[str, Any]]) -> None:
        self.worker = worker
        self.lost = 0
        self.jurors: list[Juror] = []
        self._waiting: deque[Case] = deque()
        self._open: set[str] = set()  # keys of cases that were begun and not taken
        self._judged: dict[str, Judged] = {}
        try:
            for setup in setups:
                self.jurors.append(Juror(setup))
        except WorkerError:
            self.close()
            raise

    def begin(self, cases: Iterable[Case]) -> None:
        """Have these cases judged, each once; what is left of earlier ones is forgotten."""
        self._judged.clear()
        self._waiting = deque(cases)
        self._open = {c.key for c in self._waiting}
        self._deal()

    def take(self, case: Case) -> Judged | None:
        """What was judged of a case, waiting for it; None for one that was not begun, or that was taken."""
        if case.key not in self._open:
            return None
        while case.key not in self._judged:
            if self.worker.unusable:
                return Judged(Verdict(case, "infrastructure", execution=_lost(self.worker.unusable)))
            self._listen()
        self._open.discard(case.key)
        judged = self._judged.pop(case.key)
        self.worker.compiled.add(judged.compiled or {})
        self.worker.unusable = self.worker.unusable or judged.unusable
        return judged

    def close(self) -> None:
        """End all processes."""
        while self.jurors:
            self.jurors.pop().end()

    def _deal(self) -> None:
        """Give every process its next cases: first one each, so that few cases are spread too."""
        for depth in range(1, AHEAD + 1):
            for juror in self.jurors:
                if self._waiting and len(juror.cases) < depth:
                    juror.give(self._waiting.popleft())

    def _listen(self) -> None:
        """Wait until a process answers, and enter what it says."""
        busy = {j.replies: j for j in self.jurors if j.cases}
        poll = select.poll()
        for fd in busy:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll():
            juror, case = busy[fd], busy[fd].cases[0]
            try:
                judged = juror.answer()
            except WorkerError as e:
                self.worker.unusable = str(e)
                return
            except (wire.Closed, wire.Garbled):
                judged = self._replaced(juror)
            if case.key in self._open:
                self._judged[case.key] = judged
        self._deal()

    def _replaced(self, juror: Juror) -> Judged:
        """What is said of the case that a process was judging when it was lost; another takes its place and its other cases."""
        case, *others = juror.cases
        printed = last_lines(juror.printed.fileno()).strip().rpartition("\n")[2]
        said = f"a process that judges was lost{': ' if printed else ''}{printed}"
        self.lost += 1
        at = self.jurors.index(juror)
        juror.end()
        try:
            self.jurors[at] = Juror(juror.setup)
        except WorkerError as e:
            del self.jurors[at]
            said = str(e)
        for other in others:
            self.jurors[at].give(other) if at < len(self.jurors) else self._waiting.appendleft(other)
        if self.lost >= LOST or not self.jurors:
            self.worker.unusable = f"{said} ({self.lost} times)"
        return Judged(Verdict(case, "infrastructure", execution=_lost(said)))


def _lost(message: str) -> Execution:
    return Execution("infrastructure", message=message)
