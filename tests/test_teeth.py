"""`flashproof teeth`: a bug that survives, or whose case stays large, fails the run; and no oracle can be left out."""

import json
from dataclasses import replace

import pytest

from flashproof.__main__ import run
from flashproof.ci import teeth
from flashproof.ci.teeth import Hunted, code, grown, hunted, summary
from flashproof.fuzz.case import Case
from flashproof.fuzz.commands import Exit
from flashproof.fuzz.judge import Judge
from flashproof.fuzz.worker import Worker
from flashproof.impls import REGISTRY
from flashproof.impls.planted import KINDS, PLANTED, Planted

KILLED = Hunted("last_tile", "forward", 3, 0.5, "value:o", True, PLANTED["last_tile"].minimal)


@pytest.mark.parametrize(
    ("case", "pinned", "larger"),
    [
        (Case(Lk=17), Case(Lk=17), []),
        (Case(Lk=31), Case(Lk=17), []),
        (Case(Lk=32), Case(Lk=17), ["Lk 32 for 17"]),
        (Case(B=2, Lk=16), Case(Lk=17), []),
        (Case(B=3, D=128), Case(), ["B 3 for 1", "D 128 for 1"]),
        (Case(Lk=1), Case(Lk=0), []),
    ],
)
def test_a_case_may_lie_one_size_of_note_above_its_pinned_one(case, pinned, larger):
    assert grown(case, pinned) == larger


@pytest.mark.parametrize(
    ("found", "exit_code", "said"),
    [
        (KILLED, Exit.RIGHT, "killed 1 of 1"),
        (Hunted("last_tile", "forward"), Exit.WRONG, "last_tile survived"),
        (
            Hunted("last_tile", "forward", 1, 0.1, "value:o", True, Case(Lk=99)),
            Exit.WRONG,
            "last_tile larger: Lk 99 for 17",
        ),
        (Hunted("last_tile", "forward", trouble="the worker died"), Exit.INFRASTRUCTURE, "lost: the worker died"),
    ],
)
def test_what_is_not_killed_and_small_decides_the_exit_code(found, exit_code, said):
    assert code([found]) == exit_code and said in summary([found], 1.0)


def test_what_was_not_hunted_is_never_a_pass():
    assert code([KILLED], left=2) == Exit.BLIND and "; 2 not hunted" in summary([KILLED], 1.0, 2)
    assert code([Hunted("last_tile", "forward")], left=2) == Exit.WRONG


def test_an_interrupted_run_tells_what_it_hunted(monkeypatch, capsys, tmp_path):
    def one_then_stop(*_):
        yield KILLED
        raise KeyboardInterrupt

    monkeypatch.setattr(teeth, "all_hunted", one_then_stop)
    assert run(["teeth", "--only", "forward", "--json", str(tmp_path / "out.json")]) == Exit.BLIND
    left = len(KINDS["forward"]) - 1
    assert (
        f"killed 1 of 1 planted bugs in 0 s; first failure after 0.5 s (median), 0.5 s at most; {left} not hunted"
        in (capsys.readouterr().out)
    )
    assert [b["name"] for b in json.loads((tmp_path / "out.json").read_text())["bugs"]] == ["last_tile"]


def test_a_bug_that_is_none_survives(monkeypatch):
    class Harmless(Planted):
        target = "textbook"

    harmless = Harmless("none", "", "", "", "blockwise", (), "value", "o", Case())
    monkeypatch.setattr(teeth, "PLANTED", {"none": harmless})
    got = hunted("none", "forward", 2.0, seed=0)
    assert got.case is None and got.word == "survived" and code([got]) == Exit.WRONG


@pytest.mark.slow
def test_a_hunt_that_ends_above_the_pinned_case_fails_the_run(monkeypatch):
    tail = replace(PLANTED["last_tile"], minimal=Case(requires_grad=""))
    monkeypatch.setattr(teeth, "PLANTED", {"last_tile": tail})
    got = hunted("last_tile", "forward", 30.0, seed=0)
    assert got.larger == ["Lk 17 for 1"] and got.word == "larger" and code([got]) == Exit.WRONG


@pytest.mark.slow
def test_the_command_hunts_what_it_is_told_to(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["teeth", "--only", "one_tile_sum,axis_lost", "--json", "out.json"]) == Exit.RIGHT
    shown = capsys.readouterr().out
    assert "killed 2 of 2 planted bugs" in shown and "one_tile_sum" in shown and "the same" in shown
    bugs = json.loads((tmp_path / "out.json").read_text())["bugs"]
    assert [b["verdict"] for b in bugs] == ["killed", "killed"] and all(b["case"] == b["pinned"] for b in bugs)


@pytest.mark.parametrize("words", ["no_such_bug", ",", "last_tile,"])
def test_words_that_name_nothing_are_a_usage_error(words, capsys):
    assert run(["teeth", "--only", words]) == Exit.USAGE
    assert "--only must name planted bugs or kinds" in capsys.readouterr().err


def test_a_bug_that_is_named_is_hunted_by_quick_too():
    last = KINDS["forward"][-1].name
    assert teeth.chosen((f"{last},scores",), quick=True) == [
        (last, "forward"),
        *((bug.name, "scores") for bug in KINDS["scores"][: teeth.QUICK_ROWS]),
    ]


def test_quick_takes_rows_of_each_kind():
    rows = teeth.chosen((), quick=True)
    assert {kind for _, kind in rows} == set(KINDS) and len(rows) == 2 * len(KINDS)


class Without:
    """A judge's verdicts without the findings of one oracle."""

    def __init__(self, oracle):
        self.oracle = oracle

    def skips(self, case):
        return False

    def sift(self, verdict):
        kept = tuple(f for f in verdict.findings if f.oracle != self.oracle)
        failing = any(f.severity == "fail" for f in kept)
        return replace(verdict, findings=kept, status=verdict.status if failing or verdict.status != "fail" else "pass")


ALONE = {
    "value": "one_tile_sum",
    "dead-row": "dead_row_mean",
    "purity": "bias_in_place",
    "grad": "gradient_subset",
    "dtype": "output_in_float32",
    "shape": "axis_lost",
    "alias": "output_is_input",
    "exception": "expanded_refused",
    "repeat": "workspace",
    "memory": "k_tail_load",
}
"""An oracle, and a bug that nothing else sees at its pinned case."""


@pytest.mark.parametrize(("oracle", "name"), ALONE.items(), ids=ALONE)
def test_without_its_oracle_a_bug_survives(oracle, name):
    bug = PLANTED[name]
    declared = REGISTRY[bug.target]
    with Worker(bug.target) as worker:  # in this process other tests may have left it some state
        judge = Judge(worker, declared.contract, declared.supports)
        verdict = judge.again(bug.minimal)
    assert verdict.status == "fail"
    judge.sieves.append(Without(oracle))
    assert judge.sifted(verdict).status == "pass"
