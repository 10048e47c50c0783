"""Autotuned kernels run in their first configuration, in each, or in the one that Triton chooses, and the report names it."""

import importlib.util
from pathlib import Path

import pytest

from flashproof.__main__ import run
from flashproof.fuzz.case import Case
from flashproof.fuzz.judge import Judge
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
