"""A short list of cases under compute-sanitizer: which cases, the run itself, and its report read as findings.

The report is text, and differs a little between versions; what is read of it is the first line of each error, and of the lines that
follow it the kernel, the source line, the thread and the address.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..oracles.finding import Finding
from .case import Case
from .generate import drawn
from .region import Region
from .sanitized import MARK
from .simpler import size
from .strategies import cases as all_cases

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
AT_MOST = 20
"""Cases of one run: a sanitizer makes a kernel ten to a hundred times slower."""
CANDIDATES = 128
ERROR_CODE = 86
"""Exit code of the sanitizer when it reported an error; the process's own otherwise."""
SECONDS = 1800.0
PLACES = ("/usr/local/cuda/bin",)
OPTIONS = {"memcheck": ("--destroy-on-device-error", "kernel", "--report-api-errors", "no")}
"""An error ends its kernel and not the process, so that later cases run; errors that torch's own calls provoke and handle are left out."""


class SanitizerAbsent(Exception):
    """There is no compute-sanitizer here."""


@dataclass
class Checked:
    """What a run said of each case: its findings and its last words (status and sentence); `lost` is why it ended early, or ""."""

    findings: dict[int, list[Finding]] = field(default_factory=dict)
    told: dict[int, str] = field(default_factory=dict)
    lost: str = ""


def found_sanitizer() -> str:
    """The path of compute-sanitizer; SanitizerAbsent names the places where it was looked for."""
    home = os.environ.get("CUDA_HOME", "")
    folders = [*([f"{home}/bin"] if home else []), *PLACES]
    path = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(folders))
    if path is None:
        raise SanitizerAbsent(
            f"compute-sanitizer must be on PATH, in $CUDA_HOME/bin ({home or 'not set'}) or in {', '.join(PLACES)}, "
            "but it is in none of them"
        )
    return path


def short_list(corpus: Iterable[Case], region: Region, seed: int) -> list[Case]:
    """The corpus's cases, then the simplest drawn one of each structure: dtype, kinds of mask, features; at most AT_MOST."""
    out = {c.key: c for c in corpus}
    simplest: dict[tuple[Any, ...], Case] = {}
    for case in sorted(drawn(all_cases(region), CANDIDATES, seed), key=size):
        simplest.setdefault(structure(case), case)
    out |= {c.key: c for c in simplest.values()}
    return list(out.values())[:AT_MOST]


def structure(case: Case) -> tuple[Any, ...]:
    """What makes two cases run different code in most kernels."""
    mask = tuple(type(m).__name__ for m in case.mask.walk())
    return (case.dtype, mask, case.bias, case.softcap != 0, case.dropout != 0, case.G > 1, case.requires_grad != "")


def sanitized(tool: str, runner: Mapping[str, Any], cases: Sequence[Case], seconds: float = SECONDS) -> Checked:
    """What the tool says of a target on these cases, in one process. `runner` is a Runner's arguments."""
    program = found_sanitizer()
    with tempfile.TemporaryDirectory() as folder:
        listed, report = Path(folder, "cases.json"), Path(folder, "report.txt")
        listed.write_text(json.dumps({"runner": dict(runner), "cases": [c.to_json() for c in cases]}))
        command = [program, "--tool", tool, *OPTIONS.get(tool, ()), "--error-exitcode", str(ERROR_CODE)]
        command += [sys.executable, "-m", f"{__package__}.sanitized", str(listed)]
        with report.open("wb") as out:
            code = _run(command, out.fileno(), seconds)
        text = report.read_text(errors="replace")
    checked = read_report(text)
    if len(checked.told) < len(cases) and not any(checked.findings.values()):
        checked.lost = (
            f"compute-sanitizer ended after {len(checked.told)} of {len(cases)} cases ({code}): {_last(text)}"
        )
    elif code == f"exit code {ERROR_CODE}" and not any(checked.findings.values()):
        checked.lost = f"compute-sanitizer reports an error in words that are not known here: {_last(text)}"
    return checked


def _run(command: list[str], out: int, seconds: float) -> str:
    """How the command ended, in words."""
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    # torch keeps freed memory and hands out parts of larger blocks, which hides where a tensor ends.
    environment = {**os.environ, "PYTHONPATH": path, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)
    try:
        return f"exit code {process.wait(seconds)}"
    except subprocess.TimeoutExpired:
        return f"not done within {seconds:g} s"
    finally:
        process.kill()
        process.wait()


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(MARK)]
    return lines[-1].strip() if lines else "it printed nothing"


PREFIX = re.compile(r"^=+ ?")
_MEMORY = re.compile(r"(Invalid|Misaligned|Uninitialized) __(\w+)__ (?:memory )?(\w+)(?: of size (\d+)(?: bytes)?)?")
_BEGINNINGS = (
    _MEMORY,
    re.compile(r"(?:Error: |Warning: )?(?:Race reported between|(?:Potential )?\w+ hazard detected)\b"),
    re.compile(r"Barrier error detected"),
)
_KERNEL = re.compile(r"\bat (?:0x[0-9a-f]+ in )?(?:void )?(?!__\w+__)([A-Za-z_$][\w$:]*)")
_SOURCE = re.compile(r"([\w./-]+\.(?:py|cu|cuh|h|hpp|cpp)):(\d+)")
_ADDRESS = re.compile(r"(?:Access to|Access at|Address) (0x[0-9a-f]+)([^\n]*)")


def read_report(text: str) -> Checked:
    """The findings of a report, each with the case between whose marks it stands; those before the first count for the first."""
    checked, number = Checked(), 0
    for kind, lines in _blocks(text):
        if kind == "mark":
            at, word, *rest = lines[0].split(" ", 3)[1:]
            number = int(at)
            if word == "end":
                checked.told[number] = " ".join(rest)
        else:
            finding = _finding(lines)
            mine = checked.findings.setdefault(number, [])
            if finding.key not in {f.key for f in mine}:
                mine.append(finding)
    return checked


def _blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """("mark", its line) and ("error", the lines of one error without the sanitizer's prefix), in order."""
    block: list[str] = []
    for raw in text.splitlines():
        line = PREFIX.sub("", raw).strip()
        begins = any(b.match(line) for b in _BEGINNINGS) and raw.startswith("=")
        if block and (raw.startswith(MARK) or begins or (raw.startswith("=") and not line)):
            yield "error", block
            block = []
        if raw.startswith(MARK):
            yield "mark", [raw]
        elif begins or (block and raw.startswith("=")):
            block.append(line)
    if block:
        yield "error", block


def _finding(lines: list[str]) -> Finding:
    """One error as a finding about its kernel."""
    text = "\n".join(lines)
    kernel, source, address = _KERNEL.search(text), _SOURCE.search(text), _ADDRESS.search(text)
    name = kernel[1] if kernel else "kernel"
    details: dict[str, Any] = {"report": lines[:12]}
    told = [lines[0].removeprefix("Error: ").removeprefix("Warning: ").rstrip(".: ")]
    if address:
        details["address"] = address[1]
        told.append(f"address {address[1]}{address[2].rstrip()}")
    if source:
        details["source"] = f"{source[1]}:{source[2]}"
        told.append(f"at {details['source']}")
    memory = _MEMORY.match(lines[0])
    if memory and memory[4]:
        details["size"] = int(memory[4])
    return Finding("sanitizer", name, "; ".join(told), details=details)
