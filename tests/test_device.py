"""A device is proved after every death; memory that is missing is the target's fault or ours; compilation has time of its own."""

import importlib.util
import json
from pathlib import Path

import pytest

from flashproof.__main__ import run
from flashproof.fuzz import worker
from flashproof.fuzz.buckets import VARIANTS
from flashproof.fuzz.case import Case
from flashproof.fuzz.engine import hunt
from flashproof.fuzz.execute import known_good
from flashproof.fuzz.found import Policy, verdict_and_exit_code
from flashproof.fuzz.judge import Judge
from flashproof.fuzz.region import Region
from flashproof.fuzz.worker import Worker

TARGETS = Path(__file__).parent / "targets"
CASE = Case(Lq=2, Lk=2, D=16, Dv=16, dtype="float16", requires_grad="")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def target(name: str) -> str:
    return f"{TARGETS / 'devices.py'}:{name}"


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TARGETS)


def proving(name: str) -> Worker:
    """A worker that proves its device, though it is a CPU."""
    one = Worker(target(name))
    one.proves_device = True
    return one


@pytest.mark.parametrize("name", ["out_of_memory", "host_out_of_memory"])
def test_a_target_that_runs_out_of_memory_is_wrong(path, name):
    with Worker(target(name)) as one:
        verdict = Judge(one).check(CASE)
    assert verdict.status == "fail" and verdict.keys[0] in ("exception:OutOfMemoryError", "exception:MemoryError")


def test_memory_that_the_harness_lacks_stops_the_run_with_exit_code_5(path, monkeypatch):
    monkeypatch.setenv("HOG", "1")
    with Worker(target("plain")) as one:
        campaign = hunt(Judge(one), examples=50)
    assert (campaign.stopped, campaign.cases) == ("infrastructure", 1)
    assert "flashproof itself is out of memory" in campaign.trouble and verdict_and_exit_code(campaign)[1] == 5


def test_a_death_on_a_good_device_is_the_target_s(path):
    with proving("dies") as one:
        assert one.run(CASE).status == "crashed" and one.unusable == ""


def test_a_death_that_leaves_a_bad_device_stops_the_run_and_names_the_case(path, monkeypatch):
    monkeypatch.setenv("BROKEN_DEVICE", "1")
    with proving("breaks_the_device") as one:
        campaign = hunt(Judge(one), examples=50)
    assert (campaign.stopped, campaign.cases, campaign.failures) == ("infrastructure", 1, [])
    assert "fails a known computation" in campaign.trouble and '"schema": 1' in campaign.trouble


def test_the_known_computation_is_right_here():
    assert known_good("cpu") == ""


@needs_triton
def test_compilation_does_not_count_against_the_deadline(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with Worker("triton_flash", device="cuda", arch="sm_90", deadline=0.9) as one:
        out = one.run(CASE.but(D=64, Dv=64))
        assert out.status == "ok" and one.compiled.built == 1 and out.compiled["seconds"] > 0.05
        assert out.seconds < 0.9


@needs_triton
def test_a_compilation_without_end_is_a_hang_that_names_the_kernel(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(worker, "COMPILE_SECONDS", 0.05)
    with Worker("triton_flash", device="cuda", arch="sm_90") as one:
        out = one.run(CASE)
    assert (out.status, out.message) == ("hung", "forward_kernel was not compiled within 0.05 s for one case")


@pytest.mark.slow
@needs_triton
def test_a_second_warm_compiles_nothing(tmp_path):
    cache, told = tmp_path / "cache", tmp_path / "told.json"
    line = ["warm", "triton_flash", "--arch", "sm_90", "--cache", str(cache), "--examples", "1", "--dtype", "float16"]
    built = []
    for _ in range(2):
        assert run([*line, "--json", str(told)]) == 0
        built.append(json.loads(told.read_text())["compiled"]["built"])
    assert built[0] >= 3 and built[1] == 0


def test_warm_says_that_a_target_without_kernels_leaves_nothing_to_keep(tmp_path, capsys):
    assert run(["warm", "textbook", "--arch", "sm_90", "--cache", str(tmp_path), "--examples", "3"]) == 4
    assert "launched no Triton kernel" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "key"), [("illegal_access", "crash:"), ("hang", "hang:")])
def test_a_kernel_that_takes_the_device_down_is_found_and_the_hunt_goes_on(path, name, key):
    few = Policy(variants=VARIANTS, distinct=1, probes=6, slow_probes=2, again=1, more=(5, 10))
    one = Worker(f"{TARGETS / 'gpu_faults.py'}:{name}", dialect="sdpa", device="cuda", deadline=6.0)
    with one:
        campaign = hunt(Judge(one), Region(masks=("none",), gqa=False), examples=40, policy=few)
    keys = [f.key for f in campaign.failures] + list(campaign.unshrunk)
    assert any(k.startswith(key) for k in keys) and campaign.infrastructure == 0
    assert campaign.cases > (campaign.cases_to_first_failure or 0)
