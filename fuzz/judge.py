"""The verdict on one case: every oracle on what a run gave, what counts as a refusal, and whether a failure comes again."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ..oracles.contract import Contract, contract_for
from ..oracles.finding import Finding
from ..oracles.value import Deviation, ValueReport, diagnose, judge_values
from .case import DTYPES, GENERIC_DATA, Case
from .execute import Execution, region_from_json
from .modes import seen
from .region import Region
from .stored import inputs as stored_inputs
from .tensors import Inputs, build

FRESH_SEEDS = 3
"""A statistical finding fails only if this many fresh seeds of the same structure show it too."""
REPEAT_ONE_IN, EXACT_ONE_IN = 8, 4
REMEMBERED = 4096
GENERIC_GRADS = ("normal", "scaled")
SMALLEST_SPREAD = 2.0**-6
"""Of the scores of normal data: below it weights differ in so few bits that they are rounded alike."""
VALUE_ORACLES = frozenset({"value", "nonfinite", "dead-row"})


class Runs(Protocol):
    """What a Judge needs of a Runner or a Worker."""

    info: dict[str, Any]

    def run(self, case: Case, *, exact: bool = False, repeat: bool = False, stored: str = "") -> Execution:
        """The execution of a case, on the inputs of a file where `stored` names one."""


@dataclass(frozen=True)
class Verdict:
    """What the oracles say about one case. `status` is pass, fail, refused, inexpressible or infrastructure.

    Where failures are known: `known` if all of the case's are, `skipped` if it was not run because of them.
    `deviations` are single departures from the contract that explain wrong values, where one was looked for.
    """

    case: Case
    status: str
    findings: tuple[Finding, ...] = ()
    report: ValueReport | None = None
    execution: Execution | None = None
    deviations: tuple[Deviation, ...] = ()

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The findings that fail; the others are warnings."""
        return tuple(f for f in self.findings if f.severity == "fail")

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of what fails."""
        return tuple(dict.fromkeys(f.key for f in self.failures))


class Taken(Protocol):
    """A verdict that was made ahead, and how long that took."""

    @property
    def verdict(self) -> Verdict:
        """The verdict, not yet sifted."""

    @property
    def seconds(self) -> float:
        """From the case to the verdict."""


class Ahead(Protocol):
    """Judges cases before they are asked for, several at once."""

    def begin(self, cases: Iterable[Case]) -> None:
        """Begin with these cases."""

    def take(self, case: Case) -> Taken | None:
        """What was judged of a case, waiting for it; None for one that was not begun."""


class Sieve(Protocol):
    """Takes out of verdicts what is known already."""

    def skips(self, case: Case) -> bool:
        """Whether a case must not be run."""

    def sift(self, verdict: Verdict) -> Verdict:
        """The verdict without what is known."""


def judge(
    case: Case,
    execution: Execution,
    contract: Contract,
    region: Region | None = None,
    *,
    dropout_known: bool = False,
    inputs: Inputs | None = None,
) -> Verdict:
    """The verdict on an execution. `region` is what the target declares it serves; None: nothing was declared.

    The inputs are built again here: nothing that the target could have touched takes part.
    """
    if execution.status in ("inexpressible", "infrastructure"):
        return Verdict(case, execution.status, execution=execution)
    found = [f for f in execution.findings if _counts(f, contract)]
    report = None
    if execution.status == "ok":
        try:
            report = _judge_outputs(inputs or build(case), execution, contract, dropout_known, found)
        except ArithmeticError as e:  # ours: no code of the target runs here
            return Verdict(case, "infrastructure", execution=replace(execution, message=f"{e}: {case.key}"))
    else:
        found = [*_endings(case, execution, region), *found]
    failed = any(f.severity == "fail" for f in found)
    if failed and region is not None and (why := region.refuses(case)):
        rule = "a target must refuse such a case or answer it rightly"
        found.append(
            Finding("refusal", "case", f"lies outside the declared region ({why}): {rule}", severity="warning")
        )
    status = "fail" if failed else "refused" if execution.status == "refused" else "pass"
    return Verdict(case, status, tuple(found), report, execution)


def _judge_outputs(
    inputs: Inputs, execution: Execution, contract: Contract, dropout_known: bool, found: list[Finding]
) -> ValueReport:
    """The value report; its findings, and those of the exact run, are added to `found`."""
    generic = is_generic(inputs.case) and not inputs.stored
    inputs = seen(inputs, execution.outputs)
    report = judge_values(inputs, execution.outputs, contract, generic=generic, dropout_known=dropout_known)
    found += report.findings
    if execution.exact:
        strict = exact_contract(contract)
        exact = judge_values(inputs, execution.exact, strict, generic=False, dropout_known=dropout_known)
        wrong = {f.tensor for f in report.findings}
        found += [
            replace(f, oracle="exact", message=f"in exact arithmetic {f.message}")
            for f in exact.findings
            if f.tensor not in wrong
        ]
    return report


def computed_dtype(case: Case, execution: Execution) -> str:
    """The dtype that the answer was computed in: the case's, or that of autocast where the output has it."""
    o = execution.outputs.get("o")
    return case.dtype if not case.mode or o is None else str(o.dtype).removeprefix("torch.")


def is_generic(case: Case) -> bool:
    """Whether roundings are as good as independent, so that the statistical tier may judge: no ties, no structure.

    A scale near 0 makes all weights of a row equal, and equal numbers are rounded alike; so are the columns of a constant dO.
    """
    spread = abs(case.resolved_scale) * case.D**0.5
    return case.data in GENERIC_DATA and case.grad in GENERIC_GRADS and spread >= SMALLEST_SPREAD


def exact_contract(contract: Contract) -> Contract:
    """The contract of a run in exact arithmetic, with the policies of the declared one."""
    kept = ("delta", "dead_rows", "dead_lse", "sink_lse", "nonfinite", "masked_nonfinite")
    return Contract.exact(contract.constant_u or 2.0**-30).but(**{n: getattr(contract, n) for n in kept})


def _counts(finding: Finding, contract: Contract) -> bool:
    """Whether the contract lets a finding stand: not where it declares non-determinism, or that there is no backward pass."""
    if finding.oracle in ("repeat", "sequence"):
        return finding.tensor in contract.deterministic
    return not (finding.oracle == "grad" and contract.forward_only)


def _endings(case: Case, execution: Execution, region: Region | None) -> list[Finding]:
    """Findings of a run that gave no outputs."""
    message = execution.message
    name, _, rest = (part.strip() for part in message.partition(":"))
    match execution.status:
        case "refused":
            inside = region is not None and not region.refuses(case)
            return (
                [Finding("refusal", reason_of(message), f"refused a case inside the declared region: {message}")]
                if inside
                else []
            )
        case "raised":
            return [
                Finding(
                    "exception", name, rest or "raised without a message", details={"traceback": execution.traceback}
                )
            ]
        case "crashed":
            return [
                Finding(
                    "crash",
                    name,
                    f"the process died: {rest}" if rest else "the process died",
                    details={"printed": execution.printed},
                )
            ]
    return [Finding("hang", "call", message, details={"printed": execution.printed})]


def reason_of(message: str) -> str:
    """What a refusal is about, in the words of the target without its numbers: refusals for other reasons are other failures."""
    first = message.partition("\n")[0].partition(": ")[2] or message
    return re.sub(r"(?<![\w.])-?\d[\d.]*", "N", first).strip()[:48] or "call"


def one_in(n: int, case: Case, purpose: str) -> bool:
    """True for one case in n, a function of the case."""
    return zlib.crc32(f"{purpose} {case.key}".encode()) % n == 0


class Judge:
    """Runs cases and judges them, each once: verdicts are kept by the case's key.

    `contract` and `region` default to what the target declares.
    """

    def __init__(self, runner: Runs, contract: str = "", region: Region | None = None) -> None:
        self.runner = runner
        self.spec = contract or runner.info["contract"]
        self.region = region or region_from_json(runner.info["supports"])
        self.device: str = runner.info["device"]
        self.dropout_known = runner.info["dialect"] == "native"
        self.sieves: list[Sieve] = []
        self.config = 0  # the configuration of autotuned kernels that is tried first, where each is
        self.ahead: Ahead | None = None
        self.seconds: dict[str, float] = {}  # of cases judged ahead, by key
        self._verdicts: dict[tuple[str, bool], Verdict] = {}
        self._contracts = {dtype: contract_for(self.spec, dtype, self.device) for dtype in DTYPES}

    def contract(self, dtype: str) -> Contract:
        """The contract that cases of a dtype are held to."""
        return self._contracts[dtype]

    def check(self, case: Case, thorough: bool = False, fresh: bool = False, explain: bool = True) -> Verdict:
        """The verdict on a case. Thorough: with the repeated call and the exact run; fresh: run again, in a new process.

        Explain: look for deviations from the contract too, which takes longer than the rest.
        """
        key = (case.key, thorough)
        if self.skips(case):
            return Verdict(case, "skipped")
        if fresh:
            self.restart()
        if fresh or key not in self._verdicts:
            judged = None if thorough or fresh else self._taken(case)
            self._remember(key, self.sifted(judged or self._confirmed(self._once(case, thorough))))
        return self.explained(self._verdicts[key]) if explain else self._verdicts[key]

    def begin(self, cases: Iterable[Case]) -> None:
        """Begin to judge cases that will be asked for, where there are workers to do so."""
        if self.ahead is not None:
            self.ahead.begin(c for c in cases if (c.key, False) not in self._verdicts and not self.skips(c))

    def _taken(self, case: Case) -> Verdict | None:
        """The verdict on a case that was judged ahead."""
        judged = self.ahead.take(case) if self.ahead is not None else None
        if judged is None:
            return None
        self.seconds = {case.key: judged.seconds}
        return judged.verdict

    def check_stored(self, case: Case, path: Path) -> Verdict:
        """The verdict on a case with the inputs of a file; CorpusError says what is wrong with it."""
        made = stored_inputs(case, path)
        execution = self.runner.run(case, exact=True, repeat=True, stored=str(path.resolve()))
        contract, known = self.contract(case.dtype), self.dropout_known
        verdict = judge(case, execution, contract, self.region, dropout_known=known, inputs=made)
        wrong = any(f.oracle in VALUE_ORACLES for f in verdict.failures)
        if not wrong or (case.dropout and not known):
            return verdict
        return replace(verdict, deviations=tuple(diagnose(made, execution.outputs, contract)))

    def reproduces(self, case: Case, key: str, times: int = 3) -> tuple[int, int]:
        """(n, m): of m runs, each in a new process, n failed with the finding's key."""
        seen = 0
        for _ in range(times):
            self.restart()
            seen += key in self._once(case, thorough=True).keys
        return seen, times

    def again(self, case: Case, thorough: bool = True) -> Verdict:
        """The verdict of another run in the same process, not remembered."""
        if self.skips(case):
            return Verdict(case, "skipped")
        return self.sifted(self._confirmed(self._once(case, thorough)))

    def skips(self, case: Case) -> bool:
        """Whether a case must not be run, because of what is known of it."""
        return any(s.skips(case) for s in self.sieves)

    def sifted(self, verdict: Verdict) -> Verdict:
        """The verdict without what is known already."""
        for sieve in self.sieves:
            verdict = sieve.sift(verdict)
        return verdict

    def restart(self) -> None:
        """Begin a new process, where there is one to begin."""
        getattr(self.runner, "restart", lambda: None)()

    def _once(self, case: Case, thorough: bool) -> Verdict:
        repeat = thorough or one_in(REPEAT_ONE_IN, case, "repeat")
        exact = thorough or one_in(EXACT_ONE_IN, case, "exact")
        runner: Any = self.runner
        if getattr(runner, "configs", "") != "each":
            return self._judged(case, runner.run(case, exact=exact, repeat=repeat))
        verdict, count = self._configured(case, exact, repeat, self.config, 0)
        for config in range(count):
            if verdict.failures:
                break
            if config != self.config:
                verdict, _ = self._configured(case, exact, repeat, config, count)
        return verdict

    def _configured(self, case: Case, exact: bool, repeat: bool, config: int, count: int) -> tuple[Verdict, int]:
        """The verdict on one configuration of autotuned kernels, and how many there are; `count` 0 means not known yet."""
        runner: Any = self.runner
        ran = runner.run(case, exact=exact, repeat=repeat, config=config)
        count = count or ran.configurations
        return in_configuration(self._judged(case, ran), config, count), count

    def _judged(self, case: Case, execution: Execution) -> Verdict:
        contract = self.contract(computed_dtype(case, execution))
        return judge(case, execution, contract, self.region, dropout_known=self.dropout_known)

    def _confirmed(self, verdict: Verdict) -> Verdict:
        """A statistical warning becomes a failure when every fresh seed of the same structure shows it too."""
        suspects = {f.tensor for f in verdict.findings if f.oracle == "statistical"} - {
            f.tensor for f in verdict.failures
        }
        for n in range(1, FRESH_SEEDS + 1):
            if not suspects:
                return verdict
            other = self._once(verdict.case.but(seed=verdict.case.seed + 7919 * n), thorough=False)
            suspects &= {f.tensor for f in other.findings if f.oracle == "statistical"}
        if not suspects:
            return verdict
        promoted = tuple(
            _promoted(f) if f.oracle == "statistical" and f.tensor in suspects else f for f in verdict.findings
        )
        return replace(verdict, findings=promoted, status="fail")

    def explained(self, verdict: Verdict) -> Verdict:
        """The verdict with the single deviations from the contract that would explain wrong values."""
        if (
            verdict.deviations
            or not any(f.oracle in VALUE_ORACLES for f in verdict.failures)
            or verdict.execution is None
        ):
            return verdict
        if verdict.case.dropout and not self.dropout_known:
            return verdict
        contract = self.contract(computed_dtype(verdict.case, verdict.execution))
        outputs = verdict.execution.outputs
        found = diagnose(seen(build(verdict.case), outputs), outputs, contract)
        return replace(verdict, deviations=tuple(found))

    def _remember(self, key: tuple[str, bool], verdict: Verdict) -> None:
        """Keep the verdict; the tensors of one that passed are let go."""
        if verdict.status == "pass" and verdict.execution is not None:
            verdict = replace(verdict, execution=replace(verdict.execution, outputs={}, exact=None))
        if len(self._verdicts) >= REMEMBERED:
            del self._verdicts[next(iter(self._verdicts))]
        self._verdicts[key] = verdict


def in_configuration(verdict: Verdict, config: int, count: int) -> Verdict:
    """The verdict whose failures say which configuration ran; as it is where no kernel had a choice."""
    execution = verdict.execution
    of = max(count, config + 1)
    if not verdict.failures or execution is None or of < 2:
        return verdict
    kernels = {name: list(counts) for name, counts in execution.compiled.get("configs", {}).items()}
    told = "; ".join(f"{name} ({' or '.join(chosen)})" for name, chosen in kernels.items())
    said = f"; configuration {config + 1} of {of}{': ' if told else ''}{told}"
    details = {"configuration": {"index": config, "of": of, "kernels": kernels}}
    named = (
        replace(f, message=f.message + said, details={**f.details, **details}) if f.severity == "fail" else f
        for f in verdict.findings
    )
    return replace(verdict, findings=tuple(named))


def _promoted(finding: Finding) -> Finding:
    return replace(finding, severity="fail", message=f"{finding.message}; confirmed on {FRESH_SEEDS} fresh seeds")
