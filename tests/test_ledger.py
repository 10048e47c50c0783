"""Known failures: an entry has a link, an owner and a day; wrong answers run, crashes are never launched, what passes is told."""

import datetime
import json
import sys
import textwrap

import pytest

from flashproof.__main__ import run
from flashproof.fuzz import hunting
from flashproof.fuzz.case import Case
from flashproof.fuzz.commands import Exit
from flashproof.fuzz.corpus import Record, save
from flashproof.fuzz.found import Policy
from flashproof.fuzz.judge import Verdict
from flashproof.fuzz.ledger import Entry, Known, LedgerError, load
from flashproof.oracles.finding import Finding

DAY = datetime.date(2999, 1, 1)
ENTRY = """
[[known]]
target = "t.py:wrong"
finding = "value:o"
where = { Lk = { min = 5 } }
issue = "owner/kernels#12"
owner = "@attention"
expires = 2999-01-01
"""
TARGETS = """
    import os
    import torch

    def right(query, key, value, scale=None):
        s = (query.double() @ key.double().mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
        return (s.softmax(-1) @ value.double()).to(query.dtype)

    def wrong(query, key, value, scale=None):
        o = right(query, key, value, scale)
        return o * 1.5 if key.shape[-2] >= 5 else o

    def both(query, key, value, scale=None):
        o = right(query, key, value, scale)
        return o * 1.5 if key.shape[-2] >= 5 or query.shape[-2] == 3 else o

    def deadly(query, key, value, scale=None):
        if query.shape[-2] == 3:
            open("launched", "w").close()
            raise SystemExit(3)
        return right(query, key, value, scale)
"""
QUICK = Policy(more=(1, 2), distinct=1, shrink_seconds=1.0, probes=20, again=0)
RUN = (
    "--in-process",
    "--dialect",
    "sdpa",
    "--max-len",
    "8",
    "--dtype",
    "float32",
    "--contract",
    "may_leak,forward_only=true",
    "--examples",
    "60",
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "t.py").write_text(textwrap.dedent(TARGETS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(hunting, "policy", lambda *_: QUICK)
    return tmp_path


def gate(target, ledger, command="gate"):
    with open("flashproof-ledger.toml", "w") as file:
        file.write(ledger)
    more = ["--min-cases", "5"] if command == "gate" else []
    return run([command, target, *RUN, *more, "--json", "out.json"])


def document():
    with open("out.json") as file:
        return json.load(file)


def entry(**changes):
    return Entry(**{"target": "t", "issue": "o/r#1", "owner": "me", "expires": DAY, "finding": "value:o"} | changes)


@pytest.mark.parametrize("command", ["gate", "fuzz"])
def test_a_known_failure_does_not_fail_and_is_told_apart(here, capsys, command):
    assert gate("./t.py:wrong", ENTRY, command) == Exit.RIGHT
    told = document()
    assert told["failures"] == [] and told["known"][0]["issue"] == "owner/kernels#12"
    assert told["known"][0]["cases"] > 3, "wrong answers still run"
    assert "known: value:o (owner/kernels#12, @attention)" in capsys.readouterr().out


def test_a_failure_beside_the_known_ones_fails(here):
    assert gate("t.py:both", ENTRY.replace("wrong", "both")) == Exit.WRONG
    assert all(f["case"]["Lk"] < 5 for f in document()["failures"])


def test_an_entry_for_what_is_right_now_fails_the_gate(here, capsys):
    assert gate("t.py:right", ENTRY.replace("wrong", "right")) == Exit.WRONG
    assert "excuses what is right now" in capsys.readouterr().out
    (failure,) = document()["failures"]
    assert failure["class"] == "ledger" and failure["findings"][0]["oracle"] == "ledger"


def test_the_case_that_an_entry_names_is_run_and_decides(here, capsys):
    path = save(Record("t.py:wrong", Case(Lk=7)), here / "cases")
    text = ENTRY.replace("finding", f'case = "{path.relative_to(here)}"\nfinding')
    assert gate("t.py:wrong", text) == Exit.RIGHT
    assert document()["corpus"]["cases"] == 1
    assert gate("t.py:right", text.replace("wrong", "right")) == Exit.WRONG
    assert "excuses what is right now" in capsys.readouterr().out


def test_an_entry_whose_day_is_over_is_red_and_excuses_nothing(here, capsys):
    assert gate("t.py:wrong", ENTRY.replace("2999", "2001")) == Exit.WRONG
    assert {f["class"] for f in document()["failures"]} == {"ledger", "failure"}
    assert "ended on 2001-01-01" in capsys.readouterr().out


@pytest.mark.parametrize("day", ["2999", "2001"])
def test_what_kills_is_never_launched_not_even_when_its_day_is_over(here, day):
    text = ENTRY.replace("wrong", "deadly").replace('finding = "value:o"', 'kind = "crash"')
    text = text.replace("Lk = { min = 5 }", "Lq = 3").replace("2999", day)
    save(Record("t.py:deadly", Case(Lq=3)), here / "flashproof-corpus")
    code = gate("t.py:deadly", text)
    assert not (here / "launched").exists()
    assert document()["skipped"] > 0 and document()["known"][0]["not_launched"] > 0
    assert code == (Exit.RIGHT if day == "2999" else Exit.WRONG)
    gate("t.py:deadly", "")
    assert (here / "launched").exists(), "without the entry it is launched"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            'issue = "owner/kernels#12"\n',
            "",
            "issue must be a link (https://... or owner/repository#number), got issue=None",
        ),
        ("owner/kernels#12", "later", "issue must be a link"),
        ('owner = "@attention"', 'owner = " "', "owner must be a text that is not empty"),
        ("2999-01-01", '"2999-01-01"', "expires must be a day"),
        ("expires = 2999-01-01", "", "expires must be a day"),
        ("Lk", "length", "where must name fields of a case"),
        ("min = 5", "least = 5", "where.Lk must be a value, a list or {min, max}"),
        ("finding", "find", "only the fields"),
        ('finding = "value:o"\nwhere = { Lk = { min = 5 } }', "", "it must say which failures are known"),
        (
            'finding = "value:o"\nwhere = { Lk = { min = 5 } }',
            'kind = "crash"\nfinding = "crash:SIGSEGV"',
            "it must say which",
        ),
        ('finding = "value:o"', 'kind = "slow"', "kind must be one of wrong, crash, hang"),
        ("where", 'case = "nowhere.json"\nwhere', "there is no such file"),
        ("[[known]]", "[[known]", "must be TOML"),
        ("[[known]]", "[[knwon]]", "must hold [[known]] tables only"),
    ],
)
def test_a_ledger_that_cannot_be_used_is_one_sentence_and_a_usage_error(here, capsys, old, new, said):
    assert old in ENTRY
    assert gate("t.py:wrong", ENTRY.replace(old, new)) == Exit.USAGE
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1 and "flashproof-ledger.toml" in told


@pytest.mark.parametrize(
    ("where", "covered"),
    [
        ((("dtype", ("bfloat16", "float32")),), True),
        ((("mask", ("causal_top_left",)),), False),
        ((("D", (64,)), ("Lk", (7,))), False),
        ((), True),
    ],
)
def test_every_condition_of_an_entry_must_hold(where, covered):
    assert entry(where=where).covers(Case(Lk=7, D=8, Dv=8)) == covered


def test_an_entry_with_a_case_alone_covers_that_case():
    known = entry(record=Record("t", Case(Lk=7)))
    assert known.covers(Case(Lk=7)) and not known.covers(Case(Lk=8))


def test_one_finding_that_is_not_known_keeps_the_case_failing():
    verdict = Verdict(Case(), "fail", (Finding("value", "o", ""), Finding("value", "dk", "")))
    known = Known((entry(),), DAY)
    assert known.sift(verdict).keys == ("value:dk",) and known.sift(verdict).status == "fail"
    assert known.sift(Verdict(Case(), "fail", verdict.findings[:1])).status == "known"


def test_few_passing_cases_do_not_make_an_entry_stale():
    known = Known((entry(where=(("D", (8,)),)),), DAY)
    for n in range(11):
        known.sift(Verdict(Case(D=8, Dv=8, seed=n), "pass"))
    assert not known.passing()
    known.sift(Verdict(Case(D=8, Dv=8, seed=99), "refused"))
    assert not known.passing(), "a refusal shows nothing"
    known.sift(Verdict(Case(D=8, Dv=8, seed=11), "pass"))
    assert known.passing()


def test_the_day_itself_still_counts():
    assert Known((entry(),), DAY).expired() == []
    assert Known((entry(),), DAY + datetime.timedelta(days=1)).expired() == [entry()]


def test_a_ledger_that_cannot_be_read_is_told(tmp_path):
    with pytest.raises(LedgerError, match="can be read"):
        load(tmp_path)
