"""`flashproof shrink` goes on where a hunt had no time, and what a hunt prints leads there."""

import json
import sys
from dataclasses import replace

import pytest

from flashproof.__main__ import run
from flashproof.fuzz import hunting
from flashproof.fuzz.case import Case
from flashproof.fuzz.commands import Exit
from flashproof.fuzz.corpus import Record, load, save
from flashproof.fuzz.found import Policy

TARGETS = """
import torch

def right(query, key, value, is_causal=False, scale=None):
    s = (query.double() @ key.double().mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return (s.softmax(-1) @ value.double()).to(query.dtype)

def wrong(query, key, value, is_causal=False, scale=None):
    return 1.5 * right(query, key, value, is_causal, scale)
"""
QUICK = Policy(more=(1, 2), distinct=2, shrink_seconds=2.0, probes=60, again=1)
FUZZ = ("--in-process", "--examples", "12", "--max-len", "8", "--dtype", "float32", "--contract", "may_leak")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the targets, current."""
    (tmp_path / "t.py").write_text(TARGETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])  # loading a target adds its folder
    return tmp_path


def saved(here):
    return sorted((here / "failures").glob("*.json"))


def test_a_hunt_that_could_not_shrink_says_how_to_go_on(here, capsys, monkeypatch):
    monkeypatch.setattr(hunting, "policy", lambda *_: replace(QUICK, probes=0))
    assert run(["fuzz", "t.py:wrong", *FUZZ]) == Exit.WRONG
    shown = " ".join(capsys.readouterr().out.split())
    assert "not to the end (stopped after 0 runs)" in shown and "continue flashproof shrink failures/" in shown


IN_PROCESS = ("--in-process", "--contract", "may_leak", "--seconds", "20", "--json", "out.json")


def test_shrink_makes_a_saved_case_smaller_and_keeps_its_file(here):
    path = save(Record("t.py:wrong", Case(B=2, Lq=7, Lk=8, D=5, Dv=5)), here / "failures")
    assert run(["shrink", str(path), *IN_PROCESS]) == Exit.WRONG
    first = json.loads((here / "out.json").read_text())["failures"][0]
    assert first["shrunk"] and all(first["case"][n] == 1 for n in ("B", "Lq", "Lk", "D")) and path.exists()
    assert any(load(p).case.Lk == 1 for p in saved(here))


def test_there_is_nothing_to_shrink_in_what_is_right(here, capsys):
    path = save(Record("t.py:right", Case(Lq=7, Lk=8)), here / "failures")
    assert run(["shrink", str(path), *IN_PROCESS]) == Exit.RIGHT
    assert "right now: nothing to shrink" in capsys.readouterr().out
