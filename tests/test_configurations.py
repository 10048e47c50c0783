"""Autotuned kernels run in their first configuration, in each, or in the one that Triton chooses, and the report names it."""

import importlib.util
import json
from pathlib import Path

import pytest

from flashproof.__main__ import run
from flashproof.fuzz.case import Case
from flashproof.fuzz.commands import Options
from flashproof.fuzz.judge import Judge
from flashproof.fuzz.outcome import Keeper
from flashproof.fuzz.session import opened
from flashproof.fuzz.worker import Worker

TARGET = f"{Path(__file__).parent / 'targets' / 'tuned.py'}:attention"
CASE = Case(Lq=3, Lk=5, D=16, Dv=16, requires_grad="")
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def judged(configs, device="cpu"):
    with Worker(TARGET, dialect="sdpa", contract="forward_only=true", configs=configs, device=device) as one:
        return Judge(one, "forward_only=true").check(CASE), one.compiled.configs


def test_a_bug_of_the_second_configuration_is_found_by_each_alone():
    first, each = judged("first"), judged("each")
    assert (first[0].status, each[0].status) == ("pass", "fail") and "value:o" in each[0].keys


def test_a_finding_names_its_configuration_and_its_file_replays_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = Options(dialect="sdpa", contract="forward_only=true", configs="each")
    with opened(TARGET, options) as session:
        verdict = session.judge.check(CASE, explain=False)
        path = str(Keeper(session, tmp_path).keep(verdict.keys[0], CASE, verdict.failures))
    assert "; configuration 2 of 2: kernel (N: 32, LOST: 1" in verdict.failures[0].message
    failed = json.loads(Path(path).read_text())
    named = failed["findings"][0]["details"]["configuration"]
    assert (named["index"], named["of"]) == (1, 2) and "N: 32" in named["kernels"]["kernel"][0]
    launched = []
    ask = Worker.run
    monkeypatch.setattr(
        Worker, "run", lambda self, *a, **how: launched.append(how.get("config")) or ask(self, *a, **how)
    )
    assert run(["replay", path]) == 1 and launched[0] == 1
    assert "configuration 2 of 2" in " ".join(capsys.readouterr().out.split())
    assert run(["replay", path, "--configs", "first"]) == 0


def test_the_report_says_which_configurations_ran():
    ran, both = judged("first")[1], judged("each")[1]
    assert len(ran["kernel"]) == 1 and len(both["kernel"]) == 2 and any("N: 32" in c for c in both["kernel"])


def test_nothing_can_be_tuned_on_a_cpu(capsys):
    assert run(["inspect", TARGET, "--dialect", "sdpa", "--configs", "tuned"]) == 2
    assert "configs must be first or each on a CPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_winner_of_triton_s_tuning_is_recorded():
    _, ran = judged("tuned", "cuda")
    assert len(ran["kernel"]) == 1
