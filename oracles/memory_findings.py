"""The monitor's violations as findings of the oracle "memory"."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from .finding import Finding, Severity
from .monitor import Monitor
from .monitor_state import Violation

_WORDS = {
    "oob": "out-of-bounds {}",
    "gap": "{} in a gap between the rows of a strided view",
    "wild": "{} at an address that belongs to no argument",
    "size": "{} whose element size is not the argument's, or that is misaligned",
    "uninitialised": "{} of memory that nothing has written",
    "overflow": "{} at an address made from an integer that overflowed",
}
_RACES = {
    "race-load-after-write": "race: it loads what another program writes",
    "race-store-after-write": "race: two programs store to the same element",
    "race-store-after-read": "race: it stores to what another program reads",
    "race-atomic-and-plain": "race: an atomic meets another program's plain access",
    "race-lanes": "race: two lanes of one store write different values to the same element",
}


def findings(monitor: Monitor, outputs: Mapping[str, Tensor], harmed: bool | None = None) -> list[Finding]:
    """One Finding per (kind, kernel, argument), sorted, then one per output that has elements which nothing wrote.

    `harmed` says whether an output holds a NaN that it should not; None: whether any output holds a NaN. Uninitialised floats are
    poisoned with NaN, so a read of them that left no NaN behind did no harm (a `where` dropped it) and is a warning. So is a race in
    a kernel that also uses a lock. Everything else fails.
    """
    if harmed is None:
        harmed = not outputs or any(bool(t.isnan().any()) for t in outputs.values())
    found = [_finding(v, _severity(v, monitor, harmed)) for v in monitor.violations]
    return found + [f for name, tensor in sorted(outputs.items()) for f in _unwritten(monitor, name, tensor)]


def _severity(violation: Violation, monitor: Monitor, harmed: bool) -> Severity:
    kind = violation.kind
    harmless = kind.startswith("uninitialised") and violation.floating and not harmed
    guarded = kind in _RACES and kind != "race-lanes" and violation.kernel in monitor.locking
    return "warning" if harmless or guarded else "fail"


def _finding(violation: Violation, severity: Severity) -> Finding:
    v = violation
    name, _, op = v.kind.partition("-")
    words = _RACES.get(v.kind) or _WORDS[name].format(op)
    file = Path(v.file).name
    message = (
        f"{words}, in {v.kernel} at {file}:{v.line}, {_where(v)}, program {v.program} ({_count(v)}){_why(v, severity)}"
    )
    details = {"kind": v.kind, "kernel": v.kernel, "file": v.file, "line": v.line, "program": list(v.program)}
    details |= {"element": v.element, "lanes": v.lanes, "accesses": v.accesses}
    return Finding("memory", v.argument, message, index=v.index, severity=severity, details=details)


def _where(v: Violation) -> str:
    if v.kind.startswith("wild"):
        return "no element"
    if v.index is not None:
        return f"element {list(v.index)}"
    if v.element < 0:
        return f"{_elements(-v.element)} before the first"
    if v.element >= v.size:
        return f"{_elements(v.element - v.size + 1)} past the last"
    return f"element {v.element} counted from the first"


def _elements(n: int) -> str:
    return "1 element" if n == 1 else f"{n} elements"


def _count(v: Violation) -> str:
    lanes = "1 lane" if v.lanes == 1 else f"{v.lanes} lanes"
    return lanes if v.accesses == 1 else f"{lanes} in {v.accesses} accesses"


def _why(v: Violation, severity: Severity) -> str:
    if severity == "fail":
        return ""
    return "; no NaN of it reached an output" if v.kind.startswith("uninitialised") else "; the kernel uses a lock"


def _unwritten(monitor: Monitor, name: str, tensor: Tensor) -> list[Finding]:
    missing = monitor.unwritten(tensor)
    if missing is None:
        return []
    first = tuple(int(i) for i in missing.nonzero()[0])
    count = int(missing.sum())
    message = f"{count} of {tensor.numel()} elements were never written, the first at {list(first)}"
    return [Finding("memory", name, message, index=first, details={"kind": "unwritten", "lanes": count})]
