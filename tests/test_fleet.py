"""Several workers at once find what one finds, in the same order; a death of one of them is one finding."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashproof.__main__ import run
from flashproof.fuzz import fleet, hunting
from flashproof.fuzz.case import Case
from flashproof.fuzz.commands import Options
from flashproof.fuzz.compiling import Compiled
from flashproof.fuzz.delivery import packed, unpacked
from flashproof.fuzz.engine import hunt
from flashproof.fuzz.execute import DeviceAbsent
from flashproof.fuzz.found import Campaign, Policy
from flashproof.fuzz.session import opened

TARGETS = Path(__file__).parent / "targets"
QUICK = Policy(more=(8, 16), distinct=2, shrink_seconds=8.0, probes=60, again=1)


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TARGETS)


def target(name: str) -> str:
    return f"{TARGETS / 'fleets.py'}:{name}"


def hunted(name: str, jobs: int, examples: int = 40) -> tuple[Campaign, list[str], Any]:
    """The campaign, the cases in the order they were entered, and the session's worker."""
    entered: list[str] = []

    def note(event: Any) -> None:
        if event.kind == "case":
            entered.append(event.case.key)

    options = Options(jobs=jobs, max_len=24, dtypes=("float32",))
    with opened(target(name), options) as session, session.workers():
        campaign = hunt(session.judge, session.region, examples=examples, seed=4, policy=QUICK, on_event=note)
        return campaign, entered, session.runner


def test_two_workers_find_what_one_finds_in_the_same_order(path: None) -> None:
    (one, cases, _), (two, cases_of_two, _) = hunted("wrong_tail", 1), hunted("wrong_tail", 2)
    assert cases == cases_of_two and one.cases_to_first_failure == two.cases_to_first_failure is not None
    assert [(f.key, f.case.key, f.original.key) for f in one.failures] == [
        (f.key, f.case.key, f.original.key) for f in two.failures
    ]
    same = ("accepted", "refused", "inexpressible", "stopped", "learnt", "by_kind", "warnings", "budget", "refusals")
    assert [getattr(one, n) for n in same] == [getattr(two, n) for n in same]


def test_two_workers_judge_in_two_other_processes(path: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_PIDS", str(tmp_path))
    campaign, _, worker = hunted("telling", 2, examples=24)
    assert campaign.accepted + campaign.refused >= 20
    assert len(list(tmp_path.iterdir())) == 2 and worker.history == type(worker.history)(maxlen=worker.history.maxlen)


def test_a_death_under_two_workers_is_one_finding_and_the_hunt_goes_on(path: None) -> None:
    campaign, entered, _ = hunted("dies_when_wide", 2)
    assert [f.key for f in campaign.failures] == ["crash:exited with code 7"]
    assert campaign.infrastructure == 0 and len(entered) > (campaign.cases_to_first_failure or 0)


def test_a_lost_process_that_judges_loses_its_case_alone(path: None) -> None:
    with opened(target("plain"), Options(jobs=2, max_len=8)) as session, session.workers():
        crew: Any = session.judge.ahead
        cases = [Case(Lq=n, Lk=n) for n in range(1, 7)]
        session.judge.begin(cases)
        os.kill(crew.jurors[0].pid, signal.SIGKILL)
        verdicts = [session.judge.check(c) for c in cases]
    assert [v.status for v in verdicts].count("infrastructure") == 1
    assert [v.status for v in verdicts].count("pass") == 5 and session.runner.unusable == ""


def test_processes_that_are_lost_again_and_again_stop_the_run(path: None) -> None:
    with opened(target("plain"), Options(jobs=2)) as session, session.workers():
        crew: Any = session.judge.ahead
        cases = [Case(Lq=n, Lk=n) for n in range(1, 9)]
        session.judge.begin(cases)
        for case in cases:
            os.kill(crew.jurors[0].pid, signal.SIGKILL)
            os.kill(crew.jurors[1].pid, signal.SIGKILL)
            session.judge.check(case)
        assert "a process that judges was lost" in session.runner.unusable


def test_a_worker_that_cannot_start_stops_the_run_with_one_sentence(
    path: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(target("plain"), Options(jobs=2)) as session:
        session.runner.arguments["target"] = target("gone")
        with session.workers():
            campaign = hunt(session.judge, session.region, examples=20)
    assert campaign.stopped == "infrastructure" and "a further worker did not start: " in session.runner.unusable


def test_a_verdict_comes_over_as_it_was_sent(path: None) -> None:
    with opened(target("wrong_tail"), Options()) as session:
        verdict = session.judge.check(Case(Lq=4, Lk=20), explain=False)
    message, tensors = packed(verdict, 0.5, Compiled({"k 1"}, 1, 2.0), "")
    judged = unpacked(verdict.case, json.loads(json.dumps(message)), tensors)
    assert verdict.failures and judged.verdict.findings == verdict.findings and judged.verdict.status == "fail"
    got, want = judged.verdict.execution, verdict.execution
    assert got is not None and want is not None and got.to_json() == want.to_json()
    assert all(torch.equal(got.outputs[n], x) for n, x in want.outputs.items()) and got.outputs
    assert judged.verdict.report is not None and verdict.report is not None
    assert all(torch.equal(judged.verdict.report.wrong[n], x) for n, x in verdict.report.wrong.items())
    assert judged.compiled == {"variants": ["k 1"], "built": 1, "seconds": 2.0, "configs": {}}


def test_every_device_is_a_worker_that_sees_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert fleet.devices("cuda:all") == ("cuda:0", "cuda:1", "cuda:2")
    assert fleet.devices("cuda:2,cuda:0") == ("cuda:2", "cuda:0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [fleet.visible(d) for d in ("cpu", "cuda", "cuda:2")] == ["", "0", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,MIG-1,7")
    assert [fleet.visible(d) for d in ("cuda", "cuda:1", "cuda:2")] == ["5", "MIG-1", "7"]


def test_the_target_s_process_has_the_chosen_gpu_in_its_environment(
    path: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_PIDS", str(tmp_path))
    monkeypatch.setattr(fleet, "visible", lambda _: "6")
    with opened(target("telling"), Options(jobs=2)) as session, session.workers():
        session.judge.begin([Case(Lq=2, Lk=2)])
        assert session.judge.check(Case(Lq=2, Lk=2)).status == "pass"
    assert {p.read_text() for p in tmp_path.iterdir()} == {"6"}


@pytest.mark.parametrize("text", ["cuda:0,cuda:0", "cpu,cpu", "cuda,cuda:1", "tpu", "cuda:0,", "cuda:x,cuda:1"])
def test_an_unknown_device_is_one_sentence(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["fuzz", target("plain"), "--device", text]) == 2
    assert capfd.readouterr().err.strip().startswith("Error: device must be cpu, cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("text", ["cuda:all", "cuda:0,cuda:1"])
def test_absent_devices_are_exit_code_4(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["fuzz", target("plain"), "--device", text]) == 4
    assert "is not there" in capfd.readouterr().err
    with pytest.raises(DeviceAbsent):
        fleet.devices(text)


@pytest.mark.parametrize("arguments", [["--jobs", "0"], ["--jobs", "2", "--in-process"]])
def test_jobs_that_cannot_be_are_exit_code_2(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["fuzz", target("plain"), *arguments]) == 2
    assert "--jobs" in capfd.readouterr().err


def test_fuzz_with_two_jobs_saves_what_one_job_saves(
    path: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hunting, "policy", lambda *_: QUICK)
    monkeypatch.chdir(tmp_path)
    names = {}
    for jobs in ("1", "2"):
        arguments = ["fuzz", target("wrong_tail"), "--examples", "30", "--max-len", "24", "--dtype", "float32"]
        assert run([*arguments, "--jobs", jobs, "--save", f"of{jobs}"]) == 1
        names[jobs] = sorted(p.name for p in Path(f"of{jobs}").iterdir())
    assert names["1"] == names["2"] != []


@pytest.mark.slow
def test_ctrl_c_with_two_workers_ends_at_once_with_what_was_found_and_no_process_left(tmp_path: Path) -> None:
    mark = f"FLEET_MARK={tmp_path}"
    command = [sys.executable, "-m", "flashproof", "fuzz", target("wrong_tail"), "--jobs", "2", "--seconds", "300"]
    command += ["--max-len", "24", "--dtype", "float32", "--json", "out.json"]
    environment = {**os.environ, "FLEET_MARK": str(tmp_path)}
    with (tmp_path / "printed").open("wb") as printed:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=printed, stderr=printed, start_new_session=True
        )
    try:
        until(
            lambda: "found value" in (tmp_path / "printed").read_text(), 120
        )  # what follows is shrinking, which takes longer
        assert len(family(mark)) > 4  # nurseries, two that judge, workers
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 1
        until(lambda: not family(mark), 5)
    finally:
        for pid in family(mark):
            os.kill(pid, signal.SIGKILL)
    result = json.loads((tmp_path / "out.json").read_text())
    assert (
        result["stopped"] in ("interrupted", "failure") and result["failures"]
    )  # Ctrl-C may come after the last is studied
    assert all((tmp_path / f["replay"].split()[-1]).is_file() for f in result["failures"])
    assert "(exit 1)" in (tmp_path / "printed").read_text()


def family(mark: str) -> list[int]:
    """The processes that have these words in their environment."""
    out = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            out += [int(path.parent.name)] * (mark.encode() in path.read_bytes().split(b"\0"))
        except OSError:
            continue
    return out


def until(holds: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_ctrl_c_while_two_workers_hunt_keeps_the_count_and_leaves_no_process(tmp_path: Path) -> None:
    mark = f"FLEET_MARK={tmp_path}"
    command = [sys.executable, "-m", "flashproof", "fuzz", target("plain"), "--jobs", "2", "--seconds", "300"]
    command += ["--contract", "may_leak", "--max-len", "24", "--dtype", "float32", "--json", "out.json", "--log", "log"]
    environment = {**os.environ, "FLEET_MARK": str(tmp_path)}
    with (tmp_path / "printed").open("wb") as printed:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=printed, stderr=printed, start_new_session=True
        )
    logs = [tmp_path / "log.1", tmp_path / "log.2"]
    try:
        until(lambda: all(p.exists() and p.read_text().count("\n") > 40 for p in logs), 120)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 4, (tmp_path / "printed").read_text()
        until(lambda: not family(mark), 5)
    finally:
        for pid in family(mark):
            os.kill(pid, signal.SIGKILL)
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["stopped"] == "interrupted" and result["cases"] > 0 and not result["failures"]
