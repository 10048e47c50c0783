"""What compute-sanitizer reports is read as findings of the case that ran; a stand-in prints reports as the tool does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashproof.__main__ import run
from flashproof.fuzz import sanitizer, sanitizing
from flashproof.fuzz.case import Case
from flashproof.fuzz.masks import Causal
from flashproof.fuzz.region import Region

TARGETS = Path(__file__).parent / "targets"
REPORTS = {
    "memcheck": """
========= Invalid __global__ read of size 4 bytes
=========     at stray+0x160 in /kernels/attention.py:12
=========     by thread (0,0,0) in block (3,0,0)
=========     Access to 0x7f8e5a000400 is out of bounds
=========     and is 1,025 bytes after the nearest allocation at 0x7f8e5a000000 of size 512 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: [0x2f2b7e] in libcuda.so.1
=========
""",
    "racecheck": """
========= Error: Race reported between Write access at sum_kernel(int *, int *)+0x120 in block.cu:19
=========     and Read access at sum_kernel(int *, int *)+0x1e0 in block.cu:27 [4095 hazards]
=========
""",
    "initcheck": """
========= Uninitialized __global__ memory read of size 8 bytes
=========     at 0x70 in void reduce_rows<float>(float *)
=========     by thread (1,0,0) in block (0,0,0)
=========     Address 0x7fe3c1600004
=========
""",
    "synccheck": """
========= Barrier error detected. Divergent thread(s) in block.
=========     at divergent(int*)+0x140 in threads.cu:65
=========     by thread (32,0,0) in block (0,0,0)
=========
""",
}
EXPECTED = {
    "memcheck": (
        "stray",
        "Invalid __global__ read of size 4 bytes; address 0x7f8e5a000400 is out of bounds; at /kernels/attention.py:12",
    ),
    "racecheck": (
        "sum_kernel",
        "Race reported between Write access at sum_kernel(int *, int *)+0x120 in block.cu:19; at block.cu:19",
    ),
    "initcheck": ("reduce_rows", "Uninitialized __global__ memory read of size 8 bytes; address 0x7fe3c1600004"),
    "synccheck": ("divergent", "Barrier error detected. Divergent thread(s) in block; at threads.cu:65"),
}
BANNER = "========= COMPUTE-SANITIZER"
STAND_IN = """#!{python}
# Runs the command, and prints a report in the middle of the case whose number is in the environment.
import os, subprocess, sys
arguments = sys.argv[1:]
tool = arguments[arguments.index("--tool") + 1]
code = int(arguments[arguments.index("--error-exitcode") + 1])
command = arguments[arguments.index("--error-exitcode") + 2:]
assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
print("{banner}", flush=True)
wanted, errors = os.environ.get("BAD_CASE", ""), 0
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    for line in process.stdout:
        sys.stdout.write(line)
        if wanted and line.split()[1:] == [wanted, "begin"]:
            print(open(os.environ["REPORT"]).read(), flush=True)
            errors += 1
print(f"========= ERROR SUMMARY: {{errors}} errors", flush=True)
sys.exit(code if errors else process.returncode)
"""

TWO_REVISIONS = """#!{python}
# Runs the command; in the middle of its first case it prints new.txt, or base.txt where the target lies in a checked out revision.
import json, subprocess, sys
command = sys.argv[sys.argv.index("--error-exitcode") + 2:]
root = json.load(open(command[-1]))["runner"]["tree"]["root"]
revision = "base" if "/flashproof-" in root and root.endswith("/tree") else "new"
print(revision, file=open("asked.txt", "a"))
print("{banner}", flush=True)
errors = 0
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    for line in process.stdout:
        sys.stdout.write(line)
        report = open(revision + ".txt").read()
        if report and line.split()[1:] == ["0", "begin"]:
            print(report, flush=True)
            errors = 1
print(f"========= ERROR SUMMARY: {{errors}} errors", flush=True)
sys.exit(int(sys.argv[sys.argv.index("--error-exitcode") + 1]) if errors else process.returncode)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compute-sanitizer on PATH, and a session that takes a CPU for a device that it sees."""
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    program.write_text(STAND_IN.format(python=sys.executable, banner=BANNER))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sanitizing, "KINDS", ("cpu", "cuda"))
    monkeypatch.syspath_prepend(TARGETS)
    monkeypatch.chdir(tmp_path)
    return program


def fuzz(tool: str, *more: str) -> int:
    target = f"{TARGETS / 'fleets.py'}:plain"
    return run(
        ["fuzz", target, "--sanitizer", tool, "--max-len", "8", "--dtype", "float32", "--json", "out.json", *more]
    )


@pytest.mark.parametrize("tool", sanitizer.TOOLS)
def test_an_error_is_read_with_its_kernel_size_address_and_line(tool: str) -> None:
    checked = sanitizer.read_report(f"{BANNER}\n{sanitizer.MARK} 5 begin\n{REPORTS[tool]}")
    kernel, message = EXPECTED[tool]
    assert [(f.oracle, f.tensor, f.message) for f in checked.findings[5]] == [("sanitizer", kernel, message)]
    assert list(checked.findings) == [5] and checked.told == {}


def test_errors_under_the_sanitizer_are_failures_of_the_case_that_ran(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("report.txt").write_text("".join(REPORTS.values()))
    monkeypatch.setenv("REPORT", str(Path("report.txt").absolute()))
    monkeypatch.setenv("BAD_CASE", "2")
    assert fuzz("racecheck") == 1
    result = json.loads(Path("out.json").read_text())
    assert [f["findings"][0]["tensor"] for f in result["failures"]] == [EXPECTED[t][0] for t in REPORTS]
    assert len({json.dumps(f["case"]) for f in result["failures"]}) == 1
    shown = capfd.readouterr().out
    assert all(f"FAIL {kernel}: {message}\n  case 2: " in shown for kernel, message in EXPECTED.values())
    assert len(list(Path("failures").glob("*.json"))) == 4
    assert 3 <= result["cases"] == result["accepted"] == len(result["sanitizer"]["told"]) <= sanitizer.AT_MOST


@pytest.mark.slow
def test_a_clean_run_passes_and_every_case_is_counted(stand_in: Path) -> None:
    assert fuzz("memcheck") == 0
    result = json.loads(Path("out.json").read_text())
    assert result["cases"] == len(result["sanitizer"]["told"]) == result["accepted"] > 1


def test_a_run_that_ends_early_is_exit_code_5(stand_in: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stand_in.write_text(f"#!/bin/sh\necho '{BANNER}'\necho '========= Error: Target application terminated'\nexit 1\n")
    assert fuzz("memcheck") == 5
    assert "compute-sanitizer ended after 0 of" in capfd.readouterr().out


def test_an_error_in_unknown_words_is_no_pass(stand_in: Path) -> None:
    marks = f"echo '{sanitizer.MARK} 0 begin'\necho '{sanitizer.MARK} 0 end ok'\n"
    stand_in.write_text(f"#!/bin/sh\n{marks}echo '========= Something new in kernel k'\nexit {sanitizer.ERROR_CODE}\n")
    checked = sanitizer.sanitized("memcheck", {}, [Case()])
    assert "in words that are not known here: ========= Something new" in checked.lost


def test_without_a_sanitizer_the_exit_code_is_4_and_the_places_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr(sanitizer, "PLACES", (str(tmp_path / "other"),))
    monkeypatch.chdir(tmp_path)
    assert fuzz("memcheck") == 4
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and all(p in said for p in ("PATH", f"{tmp_path}/cuda", f"{tmp_path}/other"))


def test_a_sanitizer_in_cuda_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert sanitizer.found_sanitizer() == str(program)


def test_a_cpu_is_nothing_for_a_sanitizer(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitizing, "KINDS", ("cuda",))
    assert fuzz("memcheck") == 4
    assert "--device must be cuda" in capfd.readouterr().err


def test_errors_are_told_apart_by_kernel_and_by_case() -> None:
    mark = sanitizer.MARK
    again = REPORTS["memcheck"].replace("stray", "other")
    first = f"{mark} 0 begin\n{REPORTS['memcheck']}{REPORTS['memcheck']}{mark} 0 end raised RuntimeError: x y\n"
    text = f"{BANNER}\n{first}{mark} 1 begin\n{again}{mark} 1 end ok\n"
    checked = sanitizer.read_report(text)
    assert {n: [f.key for f in found] for n, found in checked.findings.items()} == {
        0: ["sanitizer:stray"],
        1: ["sanitizer:other"],
    }
    assert checked.told == {0: "raised RuntimeError: x y", 1: "ok"}
    assert checked.findings[0][0].details["size"] == 4 and checked.findings[0][0].details["address"] == "0x7f8e5a000400"


def test_the_corpus_comes_first_and_the_list_is_short() -> None:
    corpus = [Case(Lq=7, Lk=9, seed=11), Case(Lq=3, Lk=3, mask=Causal())]
    cases = sanitizer.short_list(corpus, Region(), 0)
    assert cases[:2] == corpus and len(cases) == sanitizer.AT_MOST and len({c.key for c in cases}) == len(cases)
    assert cases == sanitizer.short_list(corpus, Region(), 0)


def gate(*more: str) -> int:
    target = f"{TARGETS / 'fleets.py'}:plain"
    few = ["--examples", "3", "--min-cases", "1", "--max-len", "8", "--dtype", "float32"]
    files = ["--json", "out.json", "--summary", "out.md", "--junit", "out.xml"]
    return run(["gate", target, "--sanitizer", "memcheck", *few, *files, *more])


def test_an_error_under_the_sanitizer_fails_the_gate_and_is_in_every_report(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("report.txt").write_text(REPORTS["memcheck"])
    monkeypatch.setenv("REPORT", str(Path("report.txt").absolute()))
    monkeypatch.setenv("BAD_CASE", "2")
    assert gate() == 1
    result = json.loads(Path("out.json").read_text())
    (failure,) = result["failures"]
    assert failure["findings"][0]["oracle"] == "sanitizer" and Path(failure["replay"].split()[-1]).is_file()
    assert result["sanitizer"]["tool"] == "memcheck" and result["cases"] == 3
    assert EXPECTED["memcheck"][1] in Path("out.md").read_text()
    assert 'name="sanitizer:stray"' in Path("out.xml").read_text()
    Path("flashproof-ledger.toml").write_text(
        f'[[known]]\ntarget = "{TARGETS / "fleets.py"}:plain"\nfinding = "sanitizer:stray"\nissue = "me/k#1"\n'
        'owner = "@me"\nexpires = 2999-01-01\n'
    )
    assert gate() == 0, "the ledger excuses it"
    assert [k["finding"] for k in json.loads(Path("out.json").read_text())["known"]] == ["sanitizer:stray"]


def test_a_gate_whose_sanitizer_is_absent_or_ends_early_does_not_pass(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stand_in.write_text(f"#!/bin/sh\necho '{BANNER}'\nexit 1\n")
    assert gate() == 5
    assert any("compute-sanitizer ended after 0 of" in p for p in json.loads(Path("out.json").read_text())["problems"])
    stand_in.unlink()
    monkeypatch.setattr(sanitizer, "PLACES", ())
    assert gate("--require-device", "cpu") == 4
    assert "compute-sanitizer must be on PATH" in capfd.readouterr().err


def committed(folder: Path, *commands: str) -> None:
    """Run git commands there, as somebody."""
    who = {f"GIT_{who}_{what}": "x@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    for command in commands:
        subprocess.run(["git", *command.split()], cwd=folder, env=os.environ | who, check=True, capture_output=True)  # noqa: S607


@pytest.mark.slow
def test_what_the_sanitizer_reports_of_the_base_too_is_not_new_and_fails_nothing(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in reports on one case of the change; of the base what the file `base.txt` says."""
    kernels = Path("scratch")
    kernels.mkdir()
    for name in ("fleets.py", "layers.py"):
        kernels.joinpath(name).write_text((TARGETS / name).read_text())
    committed(kernels, "init -q -b main", "add -A", "commit -q -m kernels")
    monkeypatch.chdir(kernels)
    stand_in.write_text(TWO_REVISIONS.format(python=sys.executable, banner=BANNER))
    Path("new.txt").write_text(REPORTS["memcheck"])
    other = REPORTS["memcheck"].replace("stray", "another")
    told = {}
    for name, text in {"the same": REPORTS["memcheck"], "another kernel": other}.items():
        Path("base.txt").write_text(text)
        code = run(["gate", "fleets.py:plain", "--sanitizer", "memcheck", "--base", "main", "--examples", "3",
                    "--min-cases", "1", "--max-len", "8", "--dtype", "float32", "--json", "out.json"])  # fmt: skip
        result = json.loads(Path("out.json").read_text())
        classes = [(f["findings"][0]["tensor"], f["class"]) for f in result["failures"]]
        told[name] = (code, classes, [e["finding"] for e in result["base"]["existing"]])
        assert Path("asked.txt").read_text().split() == ["new", "base"], "the base is asked once, after the change"
        Path("asked.txt").unlink()
    assert told == {
        "the same": (0, [], ["sanitizer:stray"]),
        "another kernel": (1, [("stray", "new")], []),
    }
