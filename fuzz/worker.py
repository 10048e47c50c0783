"""Worker: a target runs in a child process, so that a crash, a hang or a poisoned device ends a case and not the campaign."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Self

import torch

from ..impls.loading import TargetError
from ..oracles.finding import Finding
from . import wire
from .case import Case, case_from_json
from .compiling import Compiled
from .execute import DeviceAbsent, Execution
from .nursery import OUT_OF_MEMORY, START_SECONDS, STILL_ALIVE, WorkerError, last_lines, nursery
from .probe import STALE
from .rooted import Tree

DEADLINE = 60.0
COMPILE_SECONDS = 300.0
"""For all that one case compiles, apart from its deadline."""
GROWTH = 1 << 30
"""A child whose resident memory grew by this much is replaced between two cases."""
HISTORY = 32
OUTSIDE_SIGNALS = (signal.SIGKILL, signal.SIGTERM)
"""Nothing that a target computes raises these in itself: the case is run again before the target is blamed."""


class Worker:
    """Runs cases of one target in a child that is replaced when it dies. Raises what Runner raises, and WorkerError.

    `log` is written ahead: a line that names the case, synced to disk, before it runs, another when it is done.
    `tree` is the source that the target is loaded from, where it is not just what the module path finds.
    `history` holds the last cases of the present child: what may have led to a failure that a fresh child does not show.
    """

    def __init__(
        self,
        target: str,
        *,
        dialect: str = "",
        device: str = "cpu",
        contract: str = "",
        log: Path | None = None,
        deadline: float = DEADLINE,
        arch: str = "",  # pretended, see offline
        configs: str = "",
        tree: Tree | None = None,
    ) -> None:
        self.arguments: dict[str, Any] = {"target": target, "dialect": dialect, "device": device, "contract": contract}
        self.arguments |= {"arch": arch} if arch else {}
        self.arguments |= {"configs": configs} if configs else {}
        self.arguments["tree"] = tree.to_json() if tree else None
        self.configs = configs
        self.deadline = deadline
        self.deaths = 0
        self.lost = 0  # children lost through no fault of the target
        self.compiled = Compiled()
        self.proves_device = device != "cpu"  # by a known computation after each death
        self.unusable = ""  # why no further case can be run, once that is so
        self.history: deque[Case] = deque(maxlen=HISTORY)
        self._count = 0
        self._log = open(log, "a", encoding="utf-8") if log else None  # noqa: SIM115 (closed by close)
        self._child: _Child | None = None
        self.info = self._start().info

    def run(
        self,
        case: Case,
        *,
        exact: bool = False,
        repeat: bool = False,
        config: int = 0,
        deadline: float | None = None,
        stored: str = "",
    ) -> Execution:
        """The execution of one case: status crashed when the child died, hung when it passed the deadline."""
        self._count += 1
        request = {
            "op": "run", "case": case.to_json(), "exact": exact, "repeat": repeat, "config": config, "stored": stored,
        }  # fmt: skip
        self._write({"start": self._count, "case": request["case"]}, sync=True)
        out = self._attempt(case, request, deadline or self.deadline)
        if isinstance(out, _Killed):
            again = self._attempt(case, request, deadline or self.deadline)
            self.lost += not isinstance(again, _Killed)
            out = again
        if out.message.startswith(OUT_OF_MEMORY) and out.status == "infrastructure":
            self._drop()  # the target's leak may be what fills the memory: a fresh child has none
            out = self._attempt(case, request, deadline or self.deadline)
            self.unusable = out.message if out.message.startswith(OUT_OF_MEMORY) else ""
        if out.status in ("crashed", "hung") and self.proves_device and (wrong := self._known_good()):
            self.unusable = (
                f"device {self.arguments['device']} fails a known computation ({wrong}) after a case {out.status}"
            )
            out = Execution("infrastructure", message=f"{self.unusable}: {out.message}; the case: {case.key}")
        self.compiled.add(out.compiled)
        self._write({"done": self._count, "status": out.status})
        return out

    def probe(self) -> tuple[dict[str, str], list[Finding]]:
        """What each bound keyword does, and findings of those that are accepted and ignored."""
        child = self._start()
        try:
            message, _ = child.ask({"op": "probe"}, time.monotonic() + self.deadline)
        except (wire.Closed, wire.Late, wire.Garbled) as e:
            self._drop()
            reason = "took too long" if isinstance(e, wire.Late) else "the process died"
            return dict.fromkeys(self.info["bound"], f"not probed: {reason}"), []
        rows, findings = message["rows"], [Finding.from_json(f) for f in message["findings"]]
        stale = {f.tensor: replace(f, message=STALE) for f in findings if self._heeded(f)}
        return rows | dict.fromkeys(stale, STALE), [stale.get(f.tensor, f) for f in findings]

    def _heeded(self, finding: Finding) -> bool:
        """Whether new processes answer the case otherwise than the one it was compared with, so that calls before it matter."""
        with_keyword = self._alone(finding.details["case"])
        without = self._alone(finding.details.get("against") or finding.details["base"])
        return with_keyword is not None and without is not None and not torch.equal(with_keyword, without)

    def _alone(self, case: object) -> torch.Tensor | None:
        """o of a case, given as JSON, that is the first of a new process; None where it has no answer."""
        self.restart()
        o = self.run(case_from_json(case)).outputs.get("o")
        self.restart()
        return o

    def _known_good(self) -> str:
        """What a fresh child gets wrong of a computation with a known result; empty when it is right."""
        try:
            return str(self._start().ask({"op": "known_good"}, time.monotonic() + DEADLINE)[0]["wrong"])
        except (wire.Closed, wire.Late, wire.Garbled):
            self._drop()
            return "the process died or gave no answer"
        except (WorkerError, TargetError, DeviceAbsent, ValueError) as e:
            return str(e)

    def restart(self) -> None:
        """End the child; the next case runs in a fresh one."""
        self._drop()

    def close(self) -> None:
        """End the child and close the log."""
        self._drop()
        if self._log:
            self._log.close()
            self._log = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        try:  # noqa: SIM105 (contextlib may be gone too)
            self._drop()
        except Exception:  # noqa: BLE001, S110 (at the interpreter's end the modules may be gone; the child sees its pipe close)
            pass

    def _start(self) -> _Child:
        if self._child is None:
            self._child = _Child(self.arguments)
            self.history.clear()
        return self._child

    def _drop(self) -> None:
        if self.__dict__.get("_child"):
            self._child.end()  # type: ignore[union-attr]
            self._child = None

    def _attempt(self, case: Case, request: dict[str, Any], seconds: float) -> Execution:
        started = time.monotonic()
        try:
            child = self._start()
        except (
            WorkerError,
            TargetError,
            DeviceAbsent,
            ValueError,
        ) as e:  # it started before: the target's import is not to blame
            return Execution("infrastructure", message=f"no new child could be started: {e}")
        started = time.monotonic()
        self.history.append(case)
        try:
            message, tensors = child.ask(request, started + seconds)
        except wire.Late as late:
            return self._death(Execution("hung", message=str(late) or f"no answer within {seconds:g} s"), child)
        except (wire.Closed, wire.Garbled):
            return self._death(child.obituary(), child)
        out = _execution(message, tensors)
        if out.status == "crashed" or message["rss"] > child.rss + GROWTH:
            self._drop()
        return out

    def _death(self, out: Execution, child: _Child) -> Execution:
        self.deaths += 1
        out.printed = last_lines(child.printed.fileno())
        self._drop()
        return out

    def _write(self, line: dict[str, Any], sync: bool = False) -> None:
        if self._log:
            self._log.write(json.dumps(line) + "\n")
            self._log.flush()
            if sync:
                os.fsync(self._log.fileno())


class _Killed(Execution):
    """A death by a signal from outside."""


def _execution(message: dict[str, Any], tensors: dict[str, Any]) -> Execution:
    groups: dict[str, dict[str, Any]] = {"outputs": {}, "exact": {}}
    for name, x in tensors.items():
        group, _, tensor = name.partition(".")
        groups[group][tensor] = x
    return Execution.from_json(message, groups["outputs"], groups["exact"] if message["exact"] else None)


class _Child:
    """One child process: its pipes, what it printed, its end."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.printed: IO[bytes] = tempfile.TemporaryFile(mode="a+b")  # noqa: SIM115 (lives as long as the child)
        try:
            self.nursery = nursery()
            self.pid, self.requests, self.replies = self._fork()
        except WorkerError:
            self.printed.close()
            raise
        self.ended = False
        deadline = time.monotonic() + START_SECONDS
        self.greeted = False
        try:
            self._hello(deadline)
            wire.send(self.requests, {"runner": arguments})
            message, _ = wire.receive(self.replies, deadline)
        except (wire.Closed, wire.Late, wire.Garbled) as e:
            reason = self._no_start(e, arguments["target"])
            self.end()
            raise reason from None
        if "error" in message:
            self.end()
            raise _error(message)
        self.info, self.rss = message["info"], message["rss"]

    def _fork(self) -> tuple[int, int, int]:
        child_in, requests = os.pipe()
        replies, child_out = os.pipe()
        try:
            return self.nursery.fork(child_in, child_out, self.printed.fileno()), requests, replies
        except WorkerError:
            os.close(requests)
            os.close(replies)
            raise
        finally:
            os.close(child_in)
            os.close(child_out)

    def _hello(self, deadline: float) -> None:
        message, _ = wire.receive(self.replies, deadline)
        if "hello" not in message:
            raise wire.Garbled
        self.greeted = True

    def _no_start(self, error: Exception, target: str) -> Exception:
        """Before the hello nothing of the target has run; after it the target's import is what died."""
        ending = "took too long" if isinstance(error, wire.Late) else self.obituary().message
        lines = last_lines(self.printed.fileno())
        if not self.greeted:
            return WorkerError(f"the worker's child did not start ({ending}): {lines.strip() or 'it printed nothing'}")
        return TargetError(f"target {target} could not be imported: {ending}", lines)

    def ask(self, message: dict[str, Any], deadline: float) -> tuple[dict[str, Any], dict[str, Any]]:
        """Send a message and wait for the answer. While the child says that it compiles, its deadline stands still."""
        wire.send(self.requests, message)
        left = COMPILE_SECONDS
        while True:
            answer, tensors = wire.receive(self.replies, deadline)
            if "compiling" not in answer:
                return answer, tensors
            began = time.monotonic()
            self._compiled(answer["compiling"], began + left)
            took = time.monotonic() - began
            left, deadline = left - took, deadline + took

    def _compiled(self, variant: str, deadline: float) -> None:
        """Wait for the end of a compilation; raises wire.Late with a sentence."""
        try:
            while variant and wire.receive(self.replies, deadline)[0]["compiling"]:
                pass
        except wire.Late:
            name = variant.partition(" ")[0]
            raise wire.Late(f"{name} was not compiled within {COMPILE_SECONDS:g} s for one case") from None

    def obituary(self) -> Execution:
        """How the child died, as an execution."""
        code = self.nursery.wait(self.pid)
        self.ended = code != STILL_ALIVE
        if not self.ended:
            return Execution("crashed", message="closed its pipe")
        if code >= 0:
            return Execution("crashed", message=f"exited with code {code}")
        kind = _Killed if -code in OUTSIDE_SIGNALS else Execution
        return kind("crashed", message=signal.Signals(-code).name)

    def end(self) -> None:
        """Kill its process group and release its pipes."""
        for kill in (os.killpg, os.kill):  # the process itself too: it may not have had the time to make its group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)
        if not self.ended:
            with contextlib.suppress(WorkerError):
                self.nursery.wait(self.pid)
        for fd in (self.requests, self.replies):
            os.close(fd)
        self.printed.close()


def _error(message: dict[str, Any]) -> Exception:
    match message["error"]:
        case "target":
            return TargetError(message["sentence"], message["traceback"])
        case "device":
            return DeviceAbsent(message["sentence"])
        case "usage":
            return ValueError(message["sentence"])
    return WorkerError(f"the worker's child did not start: {message['sentence']}")
