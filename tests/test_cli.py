"""Commands: what they print, what they save, and the exit code that says what happened."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import click
import pytest
import torch

from flashproof.__main__ import run
from flashproof.fuzz import hunting, session
from flashproof.fuzz.case import Case
from flashproof.fuzz.commands import Exit, Options, flashproof, worst
from flashproof.fuzz.corpus import Record, load, save
from flashproof.fuzz.engine import hunt
from flashproof.fuzz.execute import Runner
from flashproof.fuzz.found import Policy
from flashproof.fuzz.listing import ORACLES

ROOT = Path(__file__).parents[1]
TARGETS = """
    import torch

    def right(query, key, value, is_causal=False, scale=None):
        s = (query.double() @ key.double().mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        return (s.softmax(-1) @ value.double()).to(query.dtype)

    def wrong(query, key, value, is_causal=False, scale=None):
        return 1.5 * right(query, key, value, is_causal, scale)

    def deaf(query, key, value, is_causal=False, scale=None):
        return right(query, key, value, is_causal)

    def refusing(query, key, value, is_causal=False):
        raise NotImplementedError("this machine is too small")

    def raising(query, key, value, is_causal=False):
        raise KeyError("no such tile")

    def listing(query, key, value, is_causal=False):
        return [query]

    def short(query, key, value, is_causal=False):
        return right(query, key, value, is_causal)[..., :0]

    def printing(query, key, value, is_causal=False, scale=None):
        print("hello from the kernel")
        return right(query, key, value, is_causal, scale)

    def other(tokens, weights):
        return tokens

    def ambiguous(q, k, v):
        return q

    number = 3
"""
QUICK = Policy(more=(1, 2), distinct=2, shrink_seconds=2.0, probes=60, again=1)
FUZZ = ("--in-process", "--examples", "12", "--max-len", "8", "--dtype", "float32", "--contract", "may_leak")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the targets, current; hunts that study what they find only shortly."""
    (tmp_path / "t.py").write_text(textwrap.dedent(TARGETS))
    (tmp_path / "broken.py").write_text("import torch\nvalue = 1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])  # loading a target adds its folder
    monkeypatch.setattr(hunting, "policy", lambda *_: QUICK)
    return tmp_path


def saved(here):
    return sorted((here / "failures").glob("*.json")) if (here / "failures").exists() else []


def test_a_right_target_is_0_and_leaves_nothing(here, capsys):
    assert run(["fuzz", "t.py:right", *FUZZ, "--json", "out.json"]) == Exit.RIGHT
    document = json.loads((here / "out.json").read_text())
    assert document["verdict"] == "pass" and document["cases"] == 12 and document["failures"] == [] and not saved(here)
    assert "PASS" in capsys.readouterr().out


def test_the_json_has_the_promised_fields(here):
    run(["fuzz", "t.py:right", *FUZZ, "--json", "out.json"])
    promised = {
        "schema", "target", "dialect", "device", "contract", "supports", "verdict", "warnings", "cases", "accepted", "refused",
        "inexpressible", "seconds", "seconds_to_first_failure", "failures", "environment",
    }  # fmt: skip
    assert promised <= set(json.loads((here / "out.json").read_text()))


def test_a_wrong_target_is_1_and_its_cases_replay(here, capsys):
    assert run(["fuzz", "t.py:wrong", *FUZZ, "--json", "out.json"]) == Exit.WRONG
    shown = capsys.readouterr().out
    failures = json.loads((here / "out.json").read_text())["failures"]
    assert {f["findings"][0]["tensor"] for f in failures} >= {"o"}
    for failure in failures:
        line = failure["replay"].split()
        assert line[:2] == ["flashproof", "replay"] and Path(line[2]) in [p.relative_to(here) for p in saved(here)]
    assert failures[0]["replay"] in shown
    assert run([*failures[0]["replay"].split()[1:], "--in-process"]) == Exit.WRONG


def test_the_first_lines_say_what_was_understood(here, capsys):
    run(["fuzz", "t.py:right", *FUZZ])
    first = capsys.readouterr().out[:1500]
    for word in (
        "sdpa",
        "keywords is_causal, scale",
        "none declared",
        "contract default; dead rows give zeros; NaN in masked keys may leak",
        "cpu",
        "torch",
        "no lse",
    ):
        assert word in " ".join(first.split()), word


def test_the_same_seed_draws_the_same_cases(here):
    for name in ("a", "b"):
        run(["fuzz", "t.py:wrong", *FUZZ, "--seed", "5", "--save", name])
    names = [{p.name for p in Path(n).iterdir()} for n in "ab"]
    assert names[0] == names[1] != set()


def test_a_keyword_that_is_ignored_is_found_and_found_again(here, capsys):
    assert run(["fuzz", "t.py:deaf", *FUZZ, "--examples", "1"]) == Exit.WRONG
    assert "scale: is accepted and ignored" in capsys.readouterr().out
    (path,) = [p for p in saved(here) if load(p).findings[0].oracle == "ignored-keyword"]
    assert run(["replay", str(path), "--in-process"]) == Exit.WRONG
    assert run(["replay", str(path), "--in-process", "--target", "t.py:right"]) == Exit.RIGHT


def test_a_target_that_refuses_everything_is_blind(here, capsys):
    assert run(["fuzz", "t.py:refusing", *FUZZ]) == Exit.BLIND
    assert "BLIND" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "oracle"),
    [("raising", "exception"), ("listing", "type"), ("short", "shape")],
)
def test_a_target_that_misbehaves_is_wrong(here, target, oracle, capsys):
    assert run(["fuzz", f"t.py:{target}", *FUZZ, "--examples", "3"]) == Exit.WRONG
    assert oracle in capsys.readouterr().out


def test_a_target_that_prints_is_right(here):
    assert run(["fuzz", "t.py:printing", *FUZZ, "--json", "out.json"]) == Exit.RIGHT
    assert json.loads((here / "out.json").read_text())["verdict"] == "pass"


BAD = [
    (["fuzz", "nosuch"], "target must be package.module:attr"),
    (["fuzz", "no.such:thing"], "failed to import"),
    (["fuzz", "absent.py:f"], "must name a file that exists"),
    (["fuzz", "t.py:absent"], "got attr='absent'"),
    (["fuzz", "t.py:number"], "must be callable"),
    (["fuzz", "t.py:other"], "must begin with the parameters"),
    (["fuzz", "t.py:ambiguous"], "--dialect"),
    (["fuzz", "t.py:right", "--dialect", "nosuch"], "dialect must be one of"),
    (["fuzz", "t.py:right", "--contract", "nosuch"], "contract must name a preset"),
    (["fuzz", "t.py:right", "--device", "gpu"], "device must be cpu, cuda or cuda:N"),
    (["fuzz", "t.py:right", "--dtype", "float8"], "is not one of"),
    (["fuzz", "t.py:right", "--seconds", "0"], "must be a number of seconds above 0, got 0"),
    (["fuzz", "t.py:right", "--seconds", "-3"], "above 0"),
    (["fuzz", "t.py:right", "--seconds", "soon"], "above 0"),
    (["fuzz", "t.py:right", "--seconds", "nan"], "above 0"),
    (["fuzz", "t.py:right", "--examples", "0"], "range"),
    (["fuzz", "t.py:right", "--max-len", "-1"], "range"),
    (["fuzz"], "Missing argument"),
    (["nosuch"], "No such command"),
    (["replay", "absent.json"], "there is no such file"),
    (["replay", "t.py"], "must be JSON"),
    (["replay", "empty"], "must hold case files"),
    (["repro", "absent.json"], "there is no such file"),
    (["repro", "empty"], "got a directory"),
    (["gate", "t.py:right", "--corpus", "absent"], "there is no absent"),
]


@pytest.mark.parametrize(("arguments", "sentence"), BAD, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_bad_input_is_2_with_one_sentence(here, arguments, sentence, capsys):
    (here / "empty").mkdir()
    own = ["--in-process"] if arguments[:1] in (["fuzz"], ["gate"]) and len(arguments) > 1 else []
    assert run([*arguments, *own]) == Exit.USAGE
    shown = capsys.readouterr()
    assert sentence in shown.err.replace("\n", " ") and "Traceback" not in shown.err and not saved(here)


def test_an_import_error_of_a_target_shows_its_own_traceback(here, capsys):
    assert run(["fuzz", "broken.py:f", "--in-process"]) == Exit.USAGE
    shown = capsys.readouterr().err
    assert "value = 1 / 0" in shown and "ZeroDivisionError" in shown and str(ROOT / "fuzz") not in shown
    assert shown.strip().splitlines()[-1].startswith("Error: target broken.py:f failed to import")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_an_absent_device_is_4(here, capsys):
    assert run(["fuzz", "t.py:right", "--device", "cuda", "--in-process"]) == Exit.BLIND
    assert "device cuda is not there" in capsys.readouterr().err


def test_a_dtype_that_the_target_does_not_declare_is_told(here, capsys):
    assert run(["fuzz", "blockwise", "--dtype", "float64", "--in-process", "--examples", "1"]) in (
        Exit.USAGE,
        Exit.RIGHT,
    )
    error = capsys.readouterr().err
    assert error == "" or "--dtype must be one that the target declares" in error


class Stopping(Runner):
    """A runner on which Ctrl-C comes with the fifth case."""

    seen = 0

    def run(self, case, **how):
        Stopping.seen += 1
        if Stopping.seen > 4:
            raise KeyboardInterrupt
        return super().run(case, **how)


@pytest.mark.parametrize(("target", "code"), [("right", Exit.BLIND), ("wrong", Exit.WRONG)])
def test_ctrl_c_keeps_what_was_found(here, monkeypatch, target, code):
    monkeypatch.setattr(session, "Runner", Stopping)
    monkeypatch.setattr(Stopping, "seen", 0)
    assert run(["fuzz", f"t.py:{target}", *FUZZ, "--json", "out.json"]) == code
    document = json.loads((here / "out.json").read_text())
    assert document["cases"] <= 4 and document["stopped"] == "interrupted" and bool(saved(here)) == (target == "wrong")


def test_a_failure_is_on_disk_before_the_hunt_ends(here, monkeypatch):
    def dying(judge, region, *, on_event, **how):
        def relay(event):
            on_event(event)
            if event.kind == "found":
                raise MemoryError

        hunt(judge, region, on_event=relay, **how | {"policy": QUICK})

    monkeypatch.setattr(hunting, "hunt", dying)
    assert run(["fuzz", "t.py:wrong", *FUZZ]) == Exit.INFRASTRUCTURE
    assert len(saved(here)) == 1


def test_a_smaller_case_takes_the_file_of_the_first(here):
    run(["fuzz", "t.py:wrong", *FUZZ, "--json", "out.json"])
    named = {Path(f["replay"].split()[2]).name for f in json.loads((here / "out.json").read_text())["failures"]}
    assert {p.name for p in saved(here)} == named


def test_replay_runs_the_cases_that_came_before(here, capsys):
    (here / "state.py").write_text(
        "import torch\nfrom t import right\nseen = []\n"
        "def stale(query, key, value, is_causal=False, scale=None):\n"
        "    seen.append(query.shape[-2])\n"
        "    return right(query, key, value, is_causal, scale) * (2 if 7 in seen else 1)\n"
    )
    alone, after = (save(Record("state.py:stale", Case(Lk=3), preceding=p), here / "f") for p in ((), (Case(Lq=7),)))
    assert run(["replay", str(alone), "--in-process"]) == Exit.RIGHT
    assert run(["replay", str(after), "--in-process"]) == Exit.WRONG


def test_replay_takes_a_folder_and_counts(here, capsys):
    for n in range(3):
        save(Record("t.py:right", Case(seed=n)), here / "f")
    save(Record("t.py:wrong", Case()), here / "f")
    assert run(["replay", "f", "--in-process", "--json", "out.json"]) == Exit.WRONG
    targets = json.loads((here / "out.json").read_text())["targets"]
    assert [(t["target"], t["cases"], t["verdict"]) for t in targets] == [
        ("t.py:right", 3, "pass"),
        ("t.py:wrong", 1, "fail"),
    ]


def test_repro_prints_a_script(here, capsys):
    run(["fuzz", "t.py:wrong", *FUZZ])
    capsys.readouterr()
    assert run(["repro", str(saved(here)[0])]) == Exit.RIGHT
    text = capsys.readouterr().out
    assert "target = module.wrong" in text and ast.parse(text)


@pytest.mark.slow
def test_repro_of_a_file_that_does_not_say_how_the_target_is_called_loads_it(here, capsys):
    path = save(Record("t.py:wrong", Case(Lk=2)), here / "f")
    assert run(["repro", str(path)]) == Exit.RIGHT
    assert "target = module.wrong" in capsys.readouterr().out


def test_inspect_runs_five_cases(here, capsys):
    how = (
        "--in-process",
        "--contract",
        "may_leak",
    )  # the probe draws NaN in masked keys, which softmax(-inf) @ v lets through
    assert run(["inspect", "t.py:right", *how, "--json", "out.json"]) == Exit.RIGHT
    shown = capsys.readouterr().out
    assert shown.count("  pass ") == 5 and "is_causal          changes the answer" in shown
    assert run(["inspect", "t.py:wrong", "--in-process"]) == Exit.WRONG


def test_list_shows_every_table(here, capsys):
    assert run(["list"]) == Exit.RIGHT
    shown = capsys.readouterr().out
    names = ("blockwise", "triton_flash", "flash_attn", "bottom right", "dead-row", "hopper", "nonfinite_masked")
    for name in (*names, "block_sparse"):
        assert name in shown


def test_list_refuses_an_unknown_table(here, capsys):
    assert run(["list", "kernels"]) == Exit.USAGE


def test_every_finding_that_the_code_makes_is_listed():
    made = set()
    for folder in ("fuzz", "oracles"):
        for path in (ROOT / folder).glob("*.py"):
            made |= set(re.findall(r'\bFinding\(\s*"([\w-]+)"', path.read_text()))
    assert made - set(ORACLES) == set()


@pytest.mark.parametrize("name", sorted(flashproof.commands))
def test_every_command_s_help_ends_with_an_example(name, capsys):
    assert run([name, "--help"]) == Exit.RIGHT
    assert f"Example: flashproof {name}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", ["fuzz", "inspect", "gate", "replay"])
def test_the_shared_options_are_everywhere(name):
    options = {o for p in flashproof.commands[name].params for o in p.opts}
    assert {"--dialect", "--device", "--contract", "--dtype", "--max-len", "--in-process", "--json"} <= options


@pytest.mark.parametrize(
    ("codes", "code"), [([], 0), ([0, 4], 4), ([4, 5], 5), ([5, 3], 3), ([3, 1, 0], 1), ([1, 2, 4], 2), ([0, 0], 0)]
)
def test_the_worst_code_decides(codes, code):
    assert worst(codes) == code


def test_a_bug_of_ours_is_5_not_1(here, monkeypatch, capsys):
    def broken(*_, **__):
        raise RuntimeError("ours")

    monkeypatch.setattr(hunting, "hunt", broken)
    assert run(["fuzz", "t.py:right", *FUZZ]) == Exit.INFRASTRUCTURE
    assert "flashproof itself failed" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_failure(monkeypatch):
    def closed(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr(flashproof, "main", closed)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    assert run(["list"]) == Exit.RIGHT


def test_options_of_a_file_stand_where_none_were_given():
    assert Options(device="cuda").over("sdpa", "cpu", "ieee") == Options("sdpa", "cuda", "ieee")


def test_usage_errors_of_click_are_2():
    assert click.UsageError("x").exit_code == Exit.USAGE


@pytest.mark.slow
def test_a_signal_ends_a_real_run_with_its_failures(here):
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "flashproof", "fuzz", "t.py:wrong", "--seconds", "100", "--json", "out.json"]
    with subprocess.Popen(
        command, cwd=here, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        end = time.monotonic() + 90
        while not saved(here) and time.monotonic() < end:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        shown, _ = process.communicate(timeout=60)
    assert process.returncode == Exit.WRONG, shown
    assert json.loads((here / "out.json").read_text())["verdict"] == "fail" and "FAILURE" in shown
