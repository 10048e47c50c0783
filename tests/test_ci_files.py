"""The action and the workflows that a team copies: their text is checked for what must never be in it, and against the commands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import textwrap
from pathlib import Path

import click
import pytest

from flashproof.__main__ import flashproof

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / "ci/workflows").glob("*.yml"))
ACTION = ROOT / "ci/actions/flashproof/action.yml"
FILES = [*WORKFLOWS, ACTION]


def code(path: Path) -> str:
    """A file without its comments."""
    return "\n".join(re.sub(r"(^|\s)#\s.*$", "", line) for line in path.read_text().splitlines())


def parsed(path: Path) -> dict:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return yaml.safe_load(path.read_text())


@pytest.fixture(params=FILES, ids=lambda p: p.name)
def path(request):
    return request.param


def test_no_change_runs_with_the_rights_of_the_main_branch(path):
    assert "pull_request_target" not in path.read_text()


def test_every_action_is_pinned_to_a_commit_and_says_which_version_that_is(path):
    used = re.findall(r"uses: (\S+)(.*)", path.read_text())
    assert used
    for name, rest in used:
        assert name == "./ci/actions/flashproof" or (
            re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", name) and re.fullmatch(r" # v\d+\.\d+\.\d+", rest)
        ), name


def test_no_expression_stands_in_a_script(path):
    scripts = re.findall(r"(?m)^( *)(?:- )?run: \|\n((?:\1 +.*\n|\n)+)", path.read_text())
    lines = re.findall(r"run: ([^|\n]+)", path.read_text())
    assert scripts or lines
    assert not [s for s in (*(body for _, body in scripts), *lines) if "${{" in s]


def test_rights_are_no_more_than_needed():
    texts = {p.name: code(p) for p in WORKFLOWS}
    granted = {name: sorted(re.findall(r"(\S+): (write|read)\s*$", text, re.MULTILINE)) for name, text in texts.items()}
    assert granted == {
        "flashproof.yml": [("contents", "read")],
        "flashproof-comment.yml": [("actions", "read"), ("pull-requests", "write")],
    }
    assert "permissions: {}" in texts["flashproof-comment.yml"]
    assert all("secrets." not in text for text in texts.values())


def test_the_job_that_may_write_runs_nothing_of_the_change():
    text = code(ROOT / "ci/workflows/flashproof-comment.yml")
    assert "workflow_run:" in text and "checkout" not in text and "cache" not in text
    assert "flashproof gate" not in text and "-m flashproof.ci.comment" in text


def test_only_the_main_branch_writes_a_cache():
    text = code(ROOT / "ci/workflows/flashproof.yml")
    assert not re.search(r"uses: actions/cache@", text)
    (before,) = re.findall(r"(.*)\n\s+uses: actions/cache/save@", text)
    assert before.strip() == "- if: github.event_name == 'push'"
    assert "cache:" not in text, "setup-python's own cache would be written by changes"
    assert "TRITON_CACHE_DIR: ${{ runner.temp }}" in ACTION.read_text()


def job(name: str) -> str:
    """The text of one job of the workflow with the lanes."""
    rest = code(ROOT / "ci/workflows/flashproof.yml").partition(f"\n  {name}:\n")[2]
    return re.split(r"(?m)^  \w+:$", rest)[0] + "\n"


def test_what_is_compiled_without_a_gpu_reaches_the_gpu_lane_as_an_artifact_and_never_as_a_cache():
    warm, gpu = job("warm"), job("gpu")
    assert "runs-on: ubuntu-latest" in warm and "environment:" not in warm, "no GPU machine, no reviewer"
    (line,) = re.findall(r"flashproof warm .*", warm)
    known = {o for p in flashproof.commands["warm"].params if isinstance(p, click.Option) for o in p.opts}
    assert {"--arch", "--cache"} <= set(re.findall(r"--[a-z-]+", line)) <= known
    assert "actions/cache" not in warm + gpu + ACTION.read_text()
    (left,) = re.findall(r"uses: actions/upload-artifact@\S+\s+with:\n((?: {10}.*\n)+)", warm)
    (taken,) = re.findall(r"uses: actions/download-artifact@\S+\s+with:\n((?: {10}.*\n)+)", gpu)
    name, folder = re.findall(r" (name|path): (\S.*)", left.replace("${{ runner.temp }}", "$RUNNER_TEMP"))
    assert dict(re.findall(r" (\S+): (\S+)", taken.replace("${{ runner.temp }}", "$RUNNER_TEMP"))) == dict(
        [name, folder]
    )
    assert f'--cache "{folder[1]}"' in line
    assert "run-id" not in gpu and "github-token" not in gpu, "of the same run: no other run's is taken"
    assert re.search(
        r"warm: \$\{\{ needs\.warm\.result == 'success' && format\('\{0\}/triton-warm', runner\.temp\)", gpu
    )
    assert re.search(r"needs: \[warm\]\n    if: \$\{\{ !cancelled\(\) \}\}", gpu), "it runs where warm failed"


def test_the_folder_that_warm_filled_becomes_the_cache_of_the_step(tmp_path):
    script = textwrap.dedent(ACTION.read_text().partition("      run: |\n")[2].partition("    - name:")[0])
    for folder in (tmp_path / "bin", tmp_path / "warm", tmp_path / "temp/flashproof/triton"):
        folder.mkdir(parents=True)
    (tmp_path / "warm/kernel.cubin").write_text("compiled")
    (tmp_path / "temp/flashproof/triton/stale.cubin").write_text("of an earlier job")
    stand_in = tmp_path / "bin/flashproof"
    stand_in.write_text('#!/bin/sh\nls "$TRITON_CACHE_DIR" 2>/dev/null > seen\nexit 4\n')
    stand_in.chmod(0o755)
    given = {"BASE": "", "DEVICE": "cuda", "EXAMPLES": "1", "MAX_SECONDS": "1", "MIN_CASES": "1", "ALLOW_LOST": "false"}
    temp = {"RUNNER_TEMP": str(tmp_path / "temp"), "TRITON_CACHE_DIR": str(tmp_path / "temp/flashproof/triton")}
    for warm, seen in (("", ""), (str(tmp_path / "warm"), "kernel.cubin\n")):
        env = {**given, **temp, "TARGETS": "t.py:f", "WARM": warm, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
        bash = ["bash", "-e", "-o", "pipefail", "-c", script]  # as GitHub runs it
        assert subprocess.run(bash, env=env, cwd=tmp_path, check=False).returncode == 4
        assert (tmp_path / "seen").read_text() == seen


def test_the_gate_always_runs_and_wants_every_lane():
    text = code(ROOT / "ci/workflows/flashproof.yml")
    lanes = re.findall(r"(?m)^  (\w+):$", text.partition("\njobs:\n")[2])
    assert lanes == ["cpu", "warm", "gpu", "gate"]
    gate = text.partition("\n  gate:\n")[2]
    assert "if: always()" in gate and "needs: [cpu, gpu]" in gate
    assert all(f'"${lane.upper()}" = success' in gate for lane in ("cpu", "gpu"))
    assert "environment: gpu" in text


def test_the_commands_and_their_options_exist():
    text = ACTION.read_text()
    (line,) = re.findall(r"flashproof gate .*", text)
    used = set(re.findall(r"--[a-z-]+", line)) | set(re.findall(r"more\+=\((--[a-z-]+)", text))
    known = {o for p in flashproof.commands["gate"].params if isinstance(p, click.Option) for o in p.opts}
    assert len(used) > 8 and used <= known, used - known
    assert shlex.split(line.partition(" || ")[0])[:2] == ["flashproof", "gate"]


def test_every_input_that_a_workflow_gives_exists():
    action = ACTION.read_text()
    known = set(re.findall(r"(?m)^  ([a-z-]+):$", action.partition("inputs:")[2].partition("\nruns:")[0]))
    assert "targets" in known
    assert set(re.findall(r"inputs\.([a-z-]+)", action)) == known, "each is used"
    for block in re.findall(r"uses: ./ci/actions/flashproof\n\s+with:\n((?: {10}.*\n)+)", code(WORKFLOWS[1]) + "\n"):
        assert set(re.findall(r"(?m)^ {10}([a-z-]+):", block)) <= known


def test_the_files_are_yaml_of_the_usual_form(path):
    data = parsed(path)
    jobs = data["jobs"].values() if "jobs" in data else [data["runs"]]
    for job in jobs:
        assert job["steps"] and all(("run" in s) != ("uses" in s) for s in job["steps"])
        assert "jobs" not in data or job["timeout-minutes"] <= 30
