"""Run one target on one case in this process, under guards, and say what came of it."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..impls import Implementation
from ..impls.loading import TargetError, attribute, load, own_frames
from ..oracles import interpreter
from ..oracles.allocations import GuardedAllocations
from ..oracles.configurations import CHOICE, HOW, install
from ..oracles.contract import contract_for
from ..oracles.finding import Finding
from ..oracles.invariants import OF_CALL, OF_PROCESS, Watched, purity, same_bits
from .adapted import bound
from .case import Case
from .compiling import Compiled, Watch
from .dialects import REFUSALS, Answer, Inexpressible, answer, expressible, keywords
from .environment import architecture, environment
from .modes import Captured, capture, checked_as_operator, entered, served_modes, unserved
from .probe import probe_keywords, seed_generators
from .region import Region
from .rooted import source
from .stored import inputs as stored_inputs
from .tensors import Inputs, build, holding


class DeviceAbsent(Exception):
    """The device asked for is not there."""


@dataclass
class Execution:
    """What came of running a target on a case.

    `outputs` are CPU tensors by name (o, lse, dq, dk, dv, dbias), logical (B, H, L, D); `exact` the same in float64 from a
    second run in the exact shadow mode, where there is one. `message` says why there are none: of a refusal, an error, a death.
    """

    status: str
    outputs: dict[str, Tensor] = field(default_factory=dict)
    exact: dict[str, Tensor] | None = None
    findings: list[Finding] = field(default_factory=list)
    message: str = ""
    traceback: str = ""
    printed: str = ""
    seconds: float = 0.0
    traffic: dict[str, Any] = field(default_factory=dict)
    configurations: int = 1  # the most that an autotuned kernel could choose from
    compiled: dict[str, Any] = field(default_factory=dict)  # what compiling.Watch saw; `seconds` are without it

    def to_json(self) -> dict[str, Any]:
        """Everything but the tensors."""
        names = ("status", "message", "traceback", "printed", "seconds", "traffic", "compiled", "configurations")
        return {n: getattr(self, n) for n in names} | {"findings": [f.to_json() for f in self.findings]}

    @classmethod
    def from_json(cls, data: dict[str, Any], outputs: dict[str, Tensor], exact: dict[str, Tensor] | None) -> Execution:
        """The execution that `to_json` wrote, with its tensors."""
        names = ("status", "message", "traceback", "printed", "seconds", "traffic", "compiled", "configurations")
        findings = [Finding.from_json(f) for f in data["findings"]]
        return cls(**{n: data[n] for n in names}, findings=findings, outputs=outputs, exact=exact)


def region_to_json(region: Region | None) -> dict[str, Any] | None:
    """A JSON object with every field of a region."""
    return None if region is None else asdict(region)


def region_from_json(data: dict[str, Any] | None) -> Region | None:
    """The region that `region_to_json` wrote."""
    if data is None:
        return None
    values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in data.items()}
    return Region(**values)


def as_implementation(target: str | Callable[..., Any] | Implementation) -> Implementation:
    """The implementation that a target names or is."""
    if isinstance(target, Implementation):
        return target
    return (
        load(target)
        if isinstance(target, str)
        else Implementation(getattr(target, "__name__", type(target).__name__), target)
    )


SHOWN = 240
"""Characters of an error message that a finding shows."""


class Runner:
    """Runs a target in this process. `info` says what was understood; raises TargetError, ValueError or DeviceAbsent."""

    def __init__(
        self,
        target: str | Callable[..., Any] | Implementation,
        *,
        dialect: str = "",
        device: str = "cpu",
        contract: str = "",
        printed: Callable[[], str] = lambda: "",
        configs: str = "",
        interruptible: bool = True,  # by Ctrl-C; in a child process only the target itself raises KeyboardInterrupt
    ) -> None:
        self.device = present(device)
        if device == "cpu":
            interpreter.enable()
        self.implementation = as_implementation(target)
        self.named = target if isinstance(target, str) else ""
        kind = device.partition(":")[0]
        if kind not in self.implementation.devices:
            allowed = ", ".join(self.implementation.devices)
            raise TargetError(f"target {self.implementation.name} must run on one of {allowed}, got device={device}")
        if self.implementation.triton and device == "cpu":
            importlib.import_module("triton")
        self.binding = bound(self.implementation, dialect)
        self.contract = contract or self.implementation.contract
        self.forward_only = contract_for(self.contract, "float32", device).forward_only
        self.printed = printed
        self.interruptible = interruptible
        self.watch, self.compiled = Watch(), Compiled()
        self.configs = configs or ("first" if device == "cpu" else "tuned")
        if self.configs not in HOW or (device == "cpu" and self.configs == "tuned"):
            allowed = "first or each on a CPU, where nothing can be timed, else first, each or tuned"
            raise ValueError(f"configs must be {allowed}, got configs={configs!r} on {device}")
        self.info = self._info()

    @property
    def interpreted(self) -> bool:
        """Whether Triton kernels, if there are any, run in the interpreter."""
        return self.device == "cpu" and "triton" in sys.modules

    def _info(self) -> dict[str, Any]:
        known, binding = self.implementation, self.binding
        return {
            "target": known.name,
            "attr": attribute(self.named),
            "summary": known.summary,
            "source": source(known.call),
            "dialect": binding.dialect,
            "bound": list(binding.bound),
            "unbound": list(binding.unbound),
            "required": list(binding.required),
            "returns_lse": binding.returns_lse,
            "adapter": known.adapter and known.adapter.to_json(),
            "supports": region_to_json(known.supports),
            "expressible": region_to_json(served_modes(known.call, expressible(binding, known.supports))),
            "contract": self.contract,
            "forward_only": self.forward_only,
            "device": self.device,
            "arch": architecture(self.device),
            "interpreted": self.interpreted,
            "environment": environment(self.device),
        }

    def run(
        self, case: Case, *, exact: bool = False, repeat: bool = False, config: int = 0, stored: str = ""
    ) -> Execution:
        """The outputs of the last call of the case's sequence. `config`: of autotuned kernels; `stored`: a file of real inputs."""
        self._install(config)
        started = time.perf_counter() - self.watch.seconds
        out = Execution("ok")
        inputs = stored_inputs(case, Path(stored), self.device) if stored else build(case, self.device)
        try:
            self._sequence(inputs, out, exact=exact, repeat=repeat)
        except _Stopped as stopped:
            self._stop(out, stopped.error)
        except Exception as e:
            if self.device == "cpu" or not _device_is_lost(e):
                raise
            self._stop(out, e)  # the target's error, met again where the guards were read
        if out.status != "crashed":  # a lost device cannot be read
            out.findings += purity(inputs)
        out.findings = _distinct(out.findings)
        out.printed = self.printed()
        out.seconds = time.perf_counter() - started - self.watch.seconds
        out.compiled = self.watch.taken()
        out.configurations = CHOICE.count
        self.compiled.add(out.compiled)
        return out

    def probe(self) -> tuple[dict[str, str], list[Finding]]:
        """Per bound keyword, whether it changes the answer; findings of the keywords that are accepted and ignored."""
        self._install(0)
        return probe_keywords(self.binding, self.implementation.call, self.device)

    def _install(self, config: int) -> None:
        """Watch the compilers and tuners that are imported by now."""
        self.watch.install()
        CHOICE.begin(config)
        CHOICE.chose = self.watch.chose
        if not self.interpreted and "triton.runtime.autotuner" in sys.modules:
            install(self.configs)

    def _sequence(self, inputs: Inputs, out: Execution, *, exact: bool, repeat: bool) -> None:
        first = self._once(inputs, out) if inputs.case.sequence not in ("", "refill") else None
        if inputs.case.sequence == "refill":
            self._refill(inputs, out)
        elif first is not None:
            self._disturb(inputs.case.varied(), out)
        out.outputs = self._once(inputs, out)
        if first is not None:
            out.findings += same_bits(
                "sequence", "after another call the same call answers differently", first, out.outputs
            )
        if repeat:
            out.findings += same_bits("repeat", "the same call twice", out.outputs, self._once(inputs, out))
        if exact and self.interpreted and not inputs.case.mode:
            out.exact = self._exact(inputs, out)

    def _refill(self, inputs: Inputs, out: Execution) -> None:
        """A call with other values in the memory of the inputs, which then hold their own again: a cache by address is stale."""
        with holding(inputs, build(inputs.case.varied().but(sequence=""), self.device, guards=inputs.guards)):
            self._between(inputs, out)

    def _disturb(self, case: Case, out: Execution) -> None:
        """The middle call of a sequence."""
        inputs = build(case, self.device)
        self._between(inputs, out)
        out.findings += purity(inputs)

    def _between(self, inputs: Inputs, out: Execution) -> None:
        """A call that is not judged; one that the target cannot be asked or refuses disturbs nothing."""
        try:
            self._once(inputs, out)
        except _Stopped as stopped:
            if not isinstance(stopped.error, (*REFUSALS, *self.implementation.refuses, Inexpressible)):
                raise

    def _once(self, inputs: Inputs, out: Execution) -> dict[str, Tensor]:
        """One guarded call; its outputs as CPU copies, its findings added."""
        try:
            keywords(self.binding, inputs)  # makes the dense mask, which is an input, outside the guards
        except Inexpressible as e:
            raise _Stopped(e) from e
        if inputs.case.mode:
            self._prepare(inputs, out)
        monitored = self.interpreted
        with self._guards(out, inputs.case.mode) as live:
            result = self._answer(inputs, out)
            live.update(result.outputs)
        if self.interpreted and not monitored:  # the target imported Triton in its first call, which nothing monitored
            return self._once(inputs, out)
        return {name: x.detach().to("cpu", copy=True) for name, x in result.outputs.items()}

    def _prepare(self, inputs: Inputs, out: Execution) -> None:
        """What the case's mode asks for before the judged call."""
        call = self.implementation.call
        if why := unserved(call, inputs.case):
            raise _Stopped(Inexpressible(why))
        if inputs.case.mode != "opcheck":
            return
        try:
            answer(self.binding, capture, inputs, backward=not self.forward_only)
        except Captured as given:
            try:
                out.findings += checked_as_operator(call, given.arguments, given.keywords)
            except Exception as e:  # what the operator raises there it raises in the judged call too
                raise _Stopped(e) from e

    def _answer(self, inputs: Inputs, out: Execution) -> Answer:
        """The target's answer; what it raises is raised as _Stopped, so that no error of the harness passes for one of the target."""
        random = inputs.case.dropout > 0
        seed_generators(inputs.case.seed, self.device)
        call = entered(self.implementation.call, inputs.case, self.device)
        inner = Watched(call, random=random, settings=OF_CALL)
        outer = Watched(
            lambda: answer(self.binding, inner, inputs, backward=not self.forward_only),
            random=random,
            settings=OF_PROCESS,
        )
        try:
            result: Answer = outer()
            if self.device != "cpu":
                # An error of the target's kernels is raised here, not in a later case.
                torch.cuda.synchronize(self.device)
        except BaseException as e:  # the target may raise anything, SystemExit included
            if isinstance(e, KeyboardInterrupt) and self.interruptible:
                raise
            raise _Stopped(e) from e
        finally:
            out.findings += [*inner.findings, *outer.findings]
        out.findings += result.findings
        return result

    @contextmanager
    def _guards(self, out: Execution, mode: str = "") -> Iterator[dict[str, Tensor]]:
        """Memory guards around a call: the interpreter's monitor if Triton kernels are interpreted, else guarded allocations."""
        live: dict[str, Tensor] = {}
        if mode == "compile":  # under a dispatch mode torch.compile runs a function plainly
            yield live
            return
        if self.interpreted:
            interpreter.install()
            with interpreter.monitored() as monitor:
                try:
                    yield live
                finally:
                    out.findings += interpreter.findings(monitor, live)
            return
        guarded = GuardedAllocations()
        try:
            with guarded:
                yield live
        finally:
            out.findings += guarded.findings()
            out.traffic["guarded_allocations"] = len(guarded.made)

    def _exact(self, inputs: Inputs, out: Execution) -> dict[str, Tensor] | None:
        """The outputs of one more run in exact arithmetic, those whose exact values survived; None if none did."""
        with interpreter.exact() as monitor:
            result = self._answer(inputs, Execution("ok"))
            values = {name: monitor.value(x) for name, x in result.outputs.items()}
        out.traffic["exact"] = sorted(name for name, (_, known) in values.items() if known)
        return {name: x.to("cpu", copy=True) for name, (x, known) in values.items() if known} or None

    def _stop(self, out: Execution, error: BaseException) -> None:
        out.outputs, out.exact = {}, None
        out.message = one_line(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        if isinstance(error, Inexpressible):
            out.status, out.message = "inexpressible", str(error)
        elif isinstance(error, (*REFUSALS, *self.implementation.refuses)) and not _is_no_refusal(error):
            out.status = "refused"
        else:
            out.status = "crashed" if _device_is_lost(error) else "raised"
            out.traceback = own_frames(error)


class _Stopped(Exception):
    """The target raised `error`."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def one_line(text: str) -> str:
    """The first line of a message, at most SHOWN characters of it; the traceback has the rest."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}..."


def _device_is_lost(error: BaseException) -> bool:
    """A CUDA error (not: out of memory) leaves a context in which nothing can be trusted."""
    return "CUDA error" in str(error) and not isinstance(error, torch.OutOfMemoryError)


def _is_no_refusal(error: BaseException) -> bool:
    """Errors that are none, whatever type of exception a target declares for its refusals."""
    return _device_is_lost(error) or isinstance(error, torch.OutOfMemoryError)


def known_good(device: str) -> str:
    """What a small computation with a known result gets wrong on the device; empty if nothing.

    Products of integers that float32 holds exactly, in any order of summation, and a pattern that is written and read back.
    """
    i = torch.arange(64 * 64).reshape(64, 64)
    a, b = i * 7 % 5 - 2, i * 11 % 7 - 3
    want = (a[:, :, None] * b[None]).sum(1)
    got = (a.to(device, torch.float32) @ b.to(device, torch.float32)).cpu().long()
    if not torch.equal(got, want):
        return "a product of small integers comes out wrong"
    pattern = torch.arange(1 << 20, dtype=torch.int32)
    if not torch.equal(pattern.to(device).flip(0).cpu(), pattern.flip(0)):
        return "what is written to memory is read back otherwise"
    return ""


def _distinct(findings: list[Finding]) -> list[Finding]:
    """The first finding of each key and severity."""
    return list({(f.key, f.severity): f for f in reversed(findings)}.values())[::-1]


def present(device: str) -> str:
    """The device's name; DeviceAbsent if it is not there, ValueError if there is no such kind."""
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()) or (kind == "cpu" and index):
        raise ValueError(f"device must be cpu, cuda or cuda:N, got device={device!r}")
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if int(index or 0) >= count:
        raise DeviceAbsent(f"device {device} is not there: torch {torch.__version__} sees {count} CUDA devices")
    return device
