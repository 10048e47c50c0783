"""The gate replays saved cases first, runs a fixed number of drawn ones, and never passes on too little."""

import json
import sys
import textwrap

import pytest

from flashproof.__main__ import run
from flashproof.ci import comment
from flashproof.fuzz import hunting
from flashproof.fuzz.case import Case
from flashproof.fuzz.commands import Exit
from flashproof.fuzz.corpus import Record, save
from flashproof.fuzz.found import Policy
from flashproof.fuzz.region import Region

TARGETS = """
    import torch
    from flashproof.fuzz.region import Region
    from flashproof.impls import Implementation

    def right(query, key, value, is_causal=False, scale=None):
        s = (query.double() @ key.double().mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        return (s.softmax(-1) @ value.double()).to(query.dtype)

    def wrong_at_7(query, key, value, is_causal=False, scale=None):
        return right(query, key, value, is_causal, scale) * (2 if key.shape[-2] == 7 else 1)

    def choosy(query, key, value, is_causal=False, scale=None):
        if key.shape[-2] % 2:
            raise NotImplementedError("odd lengths")
        return right(query, key, value, is_causal, scale)

    def no_causal(query, key, value, is_causal=False, scale=None):
        if is_causal:
            raise NotImplementedError("causal")
        return right(query, key, value, is_causal, scale)

    declared = Implementation("declared", no_causal, supports=Region(dtypes=("float32",), masks=("none", "causal_top_left"), max_len=8))
"""
QUICK = Policy(more=(1, 2), distinct=1, shrink_seconds=1.0, probes=20, again=0)
GATE = (
    "--in-process",
    "--max-len",
    "8",
    "--dtype",
    "float32",
    "--contract",
    "may_leak",
    "--examples",
    "25",
    "--min-cases",
    "5",
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "t.py").write_text(textwrap.dedent(TARGETS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])  # loading a target adds its folder
    monkeypatch.setattr(hunting, "policy", lambda *_: QUICK)
    return tmp_path


def gate(*arguments):
    return run(["gate", *GATE, *arguments, "--json", "out.json"])


def document(here):
    return json.loads((here / "out.json").read_text())


def test_a_right_target_passes(here, capsys):
    assert gate("t.py:right") == Exit.RIGHT
    assert document(here)["cases"] == 25 and "PASS" in capsys.readouterr().out


def test_saved_cases_are_replayed_first_and_on_every_target(here, capsys):
    save(Record("elsewhere:fn", Case(Lk=7)), here / "flashproof-corpus")
    assert gate("t.py:wrong_at_7", "t.py:right") == Exit.WRONG
    first, second = document(here)["targets"]
    assert first["corpus"] == {"cases": 1, "accepted": 1, "failures": 1} and first["failures"][0]["case"]["Lk"] == 7
    assert second["corpus"]["failures"] == 0 and second["verdict"] == "pass"
    shown = capsys.readouterr().out
    assert shown.index("flashproof-corpus/") < shown.index("FAILURE"), "saved cases come first"


def test_a_corpus_elsewhere_is_named(here):
    save(Record("elsewhere:fn", Case(Lk=7)), here / "mine")
    assert gate("t.py:right", "--corpus", "mine") == Exit.RIGHT
    assert document(here)["corpus"]["cases"] == 1


def test_a_broken_file_in_the_corpus_is_told_before_anything_runs(here, capsys):
    (here / "flashproof-corpus").mkdir()
    (here / "flashproof-corpus/x.json").write_text("{}")
    assert gate("t.py:right") == Exit.USAGE
    assert "schema must be 1" in capsys.readouterr().err


@pytest.mark.slow
def test_the_time_reached_first_is_blind(here, capsys):
    assert gate("t.py:right", "--max-seconds", "1.5", "--examples", "100000") == Exit.BLIND
    assert "before the time was over" in capsys.readouterr().out


def test_too_few_accepted_cases_are_blind(here, capsys):
    assert gate("t.py:right", "--min-cases", "12") == Exit.RIGHT
    assert gate("t.py:choosy", "--min-cases", "12") == Exit.BLIND
    assert "fewer than 12" in capsys.readouterr().out


def test_a_declared_kind_that_is_always_refused_is_no_pass(here, capsys):
    assert gate("t.py:declared") == Exit.WRONG, "a refusal inside the declared region is a failure"
    assert "refused a case inside the declared region" in capsys.readouterr().out


def test_a_target_that_cannot_run_does_not_keep_the_others_from_it(here, capsys):
    assert gate("nosuch", "t.py:right") == Exit.USAGE
    first, second = document(here)["targets"]
    assert (first["verdict"], second["verdict"], document(here)["verdict"]) == ("error", "pass", "error")
    assert "nosuch" in capsys.readouterr().err


def test_the_same_seed_gives_the_same_result(here):
    outcomes = []
    for _ in range(2):
        gate("t.py:wrong_at_7", "--seed", "1")
        outcomes.append([f["case"] for f in document(here)["failures"]])
    assert outcomes[0] == outcomes[1] != []


@pytest.mark.slow
def test_the_summary_is_markdown_with_the_failures(here):
    gate("t.py:wrong_at_7", "t.py:right", "--summary", "out.md", "--examples", "60")
    text = (here / "out.md").read_text()
    assert text.startswith("## flashproof: fail") and "| t.py:right" in text and "flashproof replay failures/" in text


def test_ctrl_c_during_the_saved_cases_keeps_what_was_seen(here, monkeypatch, capsys):
    for n in range(3):
        save(Record("t.py:right", Case(Lk=7, seed=n)), here / "flashproof-corpus")
    asked = []

    def stopping(session, record):
        asked.append(record)
        if len(asked) > 1:
            raise KeyboardInterrupt
        return hunting.rerun(session, record)

    monkeypatch.setattr("flashproof.ci.gate.rerun", stopping)
    assert gate("t.py:wrong_at_7", "t.py:right") == Exit.WRONG
    assert document(here)["corpus"]["cases"] == 1 and document(here)["target"] == "t.py:wrong_at_7"
    assert Region().refuses(Case(Lk=7)) == ""


def test_a_saved_case_too_large_to_judge_is_told_before_anything_runs(here, capsys):
    save(Record("t.py:right", Case(Lq=10**9, Lk=10**9)), here / "flashproof-corpus")
    assert gate("t.py:right") == Exit.USAGE
    assert "bytes to judge" in capsys.readouterr().err


def test_a_device_that_is_required_and_absent_is_blind(here, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert gate("t.py:right", "--require-device", "cuda") == Exit.BLIND
    assert "--require-device cuda: device cuda is not there" in capsys.readouterr().err
    assert gate("t.py:right", "--require-device", "cuda", "--device", "cpu") == Exit.BLIND
    assert gate("t.py:right", "--require-device", "cpu") == Exit.RIGHT


def test_what_the_gate_writes_fits_its_schema(here):
    assert gate("t.py:right", "nosuch", "--junit", "out.xml", "--comment", "out.md") == Exit.USAGE
    assert comment.read(here / "out.json")["verdict"] == "error"
    assert (here / "out.md").read_text().startswith(comment.MARKER)
    assert 'errors="1"' in (here / "out.xml").read_text()


ADAPTED = """
    import flashproof
    from t import right

    @flashproof.target()
    def bad(q, k, v, scale):
        return right(q, k, v, False, scale) * (2 if k.shape[-2] == 7 else 1)
"""


def test_an_adapted_target_is_judged_like_any_other(here):
    (here / "a.py").write_text(textwrap.dedent(ADAPTED))
    save(Record("a.py:bad", Case(Lq=1, Lk=7, D=1, Dv=1)), here / "flashproof-corpus")
    assert run(["gate", "a.py:bad", *GATE, "--json", "out.json"]) == Exit.WRONG
    document = comment.read(here / "out.json")
    assert document["corpus"] == {"cases": 1, "accepted": 1, "failures": 1}
    assert document["failures"][0]["findings"][0]["oracle"] == "value"
