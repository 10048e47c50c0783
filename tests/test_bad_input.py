"""What cannot be used is told in one sentence before anything runs."""

import pytest

from flashproof.__main__ import run
from flashproof.fuzz.case import Case
from flashproof.fuzz.commands import Exit
from flashproof.fuzz.corpus import Record, save


@pytest.mark.parametrize("option", ["--json", "--save"])
def test_a_place_that_cannot_be_written_is_a_usage_error_before_anything_runs(capsys, option):
    assert run(["fuzz", "textbook", "--in-process", "--examples", "1", option, "/proc/nothing/here"]) == Exit.USAGE
    told = capsys.readouterr()
    assert "must be writable" in told.err and "Traceback" not in told.err and not told.out


@pytest.mark.parametrize("command", ["replay", "repro"])
def test_a_case_too_large_to_judge_is_a_usage_error(tmp_path, capsys, command):
    path = save(Record("textbook", Case(Lq=10**9, Lk=10**9)), tmp_path)
    assert run([command, str(path)]) == Exit.USAGE
    assert "bytes to judge" in capsys.readouterr().err
