"""The scripts of docs/findings: each runs by itself, says what it expects and what it got, and stands in the table."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FINDINGS = Path(__file__).parents[1] / "docs" / "findings"
SCRIPTS = sorted(FINDINGS.glob("*.py"))
PRESENT, ABSENT, ELSEWHERE = 1, 0, 77
SEEN = {  # what torch alone shows on a CPU, by the version that shows it
    "torch_cpu_flash_causal_scale": ("2.13.0", {PRESENT}),
    "torch_cpu_flash_nan_query": ("2.13.0", {PRESENT}),
    "torch_cpu_flex_nan_neighbour": ("2.13.0", {PRESENT, ABSENT}),  # only a CPU with AMX has the kernel
}


@functools.cache
def run(script: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-W", "ignore", str(script)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def quick(script: Path) -> bool:
    """Whether the script ends within a second or two where neither its library nor a GPU is there."""
    return script.stem in SEEN or script.stem.startswith(("jax_", "flash_attention_jax"))


@pytest.mark.parametrize(
    "script", [pytest.param(s, id=s.stem, marks=[] if quick(s) else pytest.mark.nightly) for s in SCRIPTS]
)
def test_a_finding_says_what_it_expects_and_what_it_got_or_why_it_cannot_run(script: Path):
    done = run(script)
    shown = ("cannot run here",) if done.returncode == ELSEWHERE else ("expected", "actual")
    assert done.returncode in (PRESENT, ABSENT, ELSEWHERE), done.stderr
    assert all(word in done.stdout for word in shown), done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", SEEN)
def test_a_finding_of_torch_on_a_cpu_reproduces_with_the_version_that_showed_it(name: str):
    version, outcomes = SEEN[name]
    if torch.__version__.split("+")[0] != version:
        pytest.skip(f"seen with torch {version}, this is {torch.__version__}")
    assert run(FINDINGS / f"{name}.py").returncode in outcomes


def test_a_finding_needs_no_flashproof():
    for script in SCRIPTS:
        for node in ast.walk(ast.parse(script.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(n.split(".")[0] == "flashproof" for n in names), script.name


def test_every_script_stands_in_the_table_and_every_row_has_its_script():
    linked = set(re.findall(r"\]\((\w+\.py)\)", (FINDINGS / "README.md").read_text()))
    assert linked == {s.name for s in SCRIPTS}
