"""A child process per target: deaths, hangs, printing, the log, messages."""

import json
import os
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flashproof.fuzz import nursery, wire, worker
from flashproof.fuzz.case import Case
from flashproof.fuzz.engine import hunt
from flashproof.fuzz.execute import DeviceAbsent, Runner
from flashproof.fuzz.found import Policy
from flashproof.fuzz.judge import Judge
from flashproof.fuzz.worker import Worker, WorkerError
from flashproof.impls.loading import TargetError

TARGETS = Path(__file__).parent / "targets"
SHORT, LONG = Case(Lk=3), Case(Lk=6)


def faulty(name: str) -> str:
    return f"{TARGETS}/faulty.py:{name}"


def written(folder: Path, code: str) -> str:
    """A target file with this code."""
    (folder / "written.py").write_text(textwrap.dedent(code))
    return f"{folder}/written.py:f"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def right() -> Iterator[Worker]:
    with Worker(f"{TARGETS}/right.py:sdpa") as one:
        yield one


@pytest.mark.slow
def test_worker_gives_what_a_runner_gives(right: Worker) -> None:
    case = Case(B=2, Hq=2, Hkv=1, Lq=3, Lk=4, D=2, dtype="bfloat16")
    here, there = Runner(f"{TARGETS}/right.py:sdpa").run(case), right.run(case)
    assert there.status == here.status == "ok"
    assert there.outputs.keys() == here.outputs.keys()
    assert all(torch.equal(x, there.outputs[n]) and x.dtype == there.outputs[n].dtype for n, x in here.outputs.items())


def test_empty_outputs_cross_the_pipe(right: Worker) -> None:
    assert right.run(Case(Lq=0, Lk=0, B=2)).outputs["o"].shape == (2, 1, 0, 1)


def test_an_interrupt_that_the_target_raises_is_an_exception_like_any_other() -> None:
    with Worker(faulty("interrupts")) as worker:
        out = worker.run(Case())
        assert (out.status, out.message, worker.deaths) == ("raised", "KeyboardInterrupt", 0)


def test_child_has_one_thread_and_interprets_triton(tmp_path: Path) -> None:
    code = """
    import os, torch
    def f(q, k, v, is_causal=False):
        print(torch.get_num_threads(), os.environ["TRITON_INTERPRET"])
    """
    with Worker(written(tmp_path, code)) as one:
        assert one.run(SHORT).printed == "1 1\n"


def test_nursery_leaves_the_choice_of_the_interpreter_to_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET" not in nursery._environment()


def test_a_first_case_imports_nothing_slow(tmp_path: Path) -> None:
    code = """
    import sys
    def f(q, k, v, is_causal=False):
        print(*{"sympy", "torch._dynamo", "triton"} & set(sys.modules))
        return q + 0 * (k + v)
    """
    with Worker(written(tmp_path, code)) as one:
        assert [one.run(Case(seed=n)).printed for n in range(2)] == ["\n", "\n"]


@pytest.mark.slow
def test_nursery_that_died_is_replaced() -> None:
    process = nursery.nursery().process
    process.kill()
    process.wait()
    with Worker(f"{TARGETS}/right.py:sdpa") as one:
        assert one.run(SHORT).status == "ok"


def test_crash_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    with Worker(faulty("crashes_long"), log=log) as one:
        outs = [one.run(case) for case in (SHORT, LONG, SHORT)]
    assert [out.status for out in outs] == ["ok", "crashed", "ok"]
    assert outs[1].message == "SIGSEGV"
    assert "crashes_long" in outs[1].printed
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines[2] == {"start": 2, "case": LONG.to_json()}
    assert [line["status"] for line in lines if "done" in line] == ["ok", "crashed", "ok"]


def test_log_names_the_case_before_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "run.jsonl"

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with Worker(f"{TARGETS}/right.py:sdpa", log=log) as one:
        monkeypatch.setattr(worker._Child, "ask", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.run(LONG)
    assert json.loads(log.read_text()) == {"start": 1, "case": LONG.to_json()}


def test_hang_ends_at_its_deadline_with_its_process_group() -> None:
    with Worker(faulty("hangs_long")) as one:
        assert one.run(SHORT).status == "ok"
        pid = one._start().pid
        started = time.monotonic()
        out = one.run(LONG, deadline=0.5)
        assert time.monotonic() - started < 5
        assert (out.status, out.message) == ("hung", "no answer within 0.5 s")
        assert not alive(pid)
        assert one.run(SHORT).status == "ok"


def test_exit_of_the_target_is_a_crash() -> None:
    with Worker(faulty("exits")) as one:
        out = one.run(SHORT)
    assert (out.status, out.message) == ("crashed", "exited with code 0")


def test_child_killed_from_outside_is_no_fault_of_the_target(tmp_path: Path) -> None:
    code = f"""
    import os
    def f(q, k, v, is_causal=False):
        if not os.path.exists({str(tmp_path / "mark")!r}):
            open({str(tmp_path / "mark")!r}, "w").close()
            os.kill(os.getpid(), 9)
        return q + 0 * (k + v)
    """
    with Worker(written(tmp_path, code)) as one:
        assert one.run(SHORT).status == "ok"
        assert one.lost == 1


def test_target_that_is_killed_again_is_to_blame() -> None:
    with Worker(faulty("killed_always")) as one:
        out = one.run(SHORT)
        assert (out.status, out.message, one.lost) == ("crashed", "SIGKILL", 0)


def test_what_a_target_prints_is_kept_with_its_case() -> None:
    with Worker(faulty("prints")) as one:
        assert [one.run(SHORT).printed for _ in range(2)] == ["hello from python\nhello from C\n"] * 2


def test_write_past_a_workspace_is_found() -> None:
    with Worker(faulty("writes_past_workspace")) as one:
        assert [f.key for f in one.run(SHORT).findings] == ["guard:workspace"]


def test_kernel_that_is_imported_in_the_first_call_is_monitored_in_it() -> None:
    with Worker(f"{TARGETS}/lazy_triton.py:attention") as one:
        (found,) = one.run(SHORT).findings
    assert found.key == "memory:K"
    assert "out-of-bounds load, in last at lazy_kernel.py:" in found.message


def test_exact_outputs_of_interpreted_kernels_cross_the_pipe() -> None:
    with Worker("triton_flash") as one:
        out = one.run(Case(Lq=3, Lk=5, D=4, Dv=4, dtype="bfloat16"), exact=True)
    assert out.findings == []
    assert out.exact is not None
    assert set(out.exact) == set(out.outputs) == {"o", "lse", "dq", "dk", "dv"}
    assert {x.dtype for x in out.exact.values()} == {torch.float64}


def test_restart_gives_a_new_process(right: Worker) -> None:
    right.run(SHORT)
    before = right._start().pid
    right.restart()
    right.run(SHORT)
    assert right._start().pid != before
    assert list(right.history) == [SHORT]


def test_child_leaves_when_its_parent_goes() -> None:
    one = Worker(faulty("hangs_long"))
    child = one._start()
    wire.send(child.requests, {"op": "run", "case": LONG.to_json(), "exact": False, "repeat": False})
    time.sleep(0.5)
    os.close(os.dup2(os.open(os.devnull, os.O_WRONLY), child.requests))
    child.requests = os.open(os.devnull, os.O_WRONLY)
    for _ in range(50):
        if not alive(child.pid):
            break
        time.sleep(0.1)
    assert not alive(child.pid)
    one.close()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"target": "no_such_name"}, TargetError, "known names: "),
        (
            {"target": f"{TARGETS}/broken.py:f"},
            TargetError,
            "ModuleNotFoundError: No module named 'module_that_is_absent'",
        ),
        ({"target": f"{TARGETS}/single.py:helper"}, ValueError, "must begin with the parameters"),
        ({"target": f"{TARGETS}/right.py:sdpa", "device": "cuda:99"}, DeviceAbsent, "device cuda:99 is not there"),
        ({"target": f"{TARGETS}/right.py:sdpa", "contract": "nonsense"}, ValueError, "nonsense"),
    ],
)
def test_what_stops_a_start_is_said_in_the_parent(
    arguments: dict[str, str], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Worker(**arguments)  # type: ignore[arg-type]


def test_import_error_carries_the_targets_traceback() -> None:
    with pytest.raises(TargetError) as caught:
        Worker(f"{TARGETS}/broken.py:f")
    assert "in setup" in caught.value.traceback


def test_death_during_the_import_is_the_targets(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="could not be imported: SIGABRT") as caught:
        Worker(written(tmp_path, "import os; print('last words', flush=True); os.abort()"))
    assert "last words" in caught.value.traceback


def test_child_that_cannot_start_is_a_fault_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(WorkerError, match="did not start"):
        Worker(f"{TARGETS}/right.py:sdpa")


def test_child_that_cannot_start_again_is_infrastructure(monkeypatch: pytest.MonkeyPatch) -> None:
    with Worker(f"{TARGETS}/right.py:sdpa") as one:
        one.restart()
        monkeypatch.setattr("sys.executable", "/bin/false")
        assert one.run(SHORT).status == "infrastructure"


def test_probe_runs_in_the_child() -> None:
    with Worker(faulty("ignores_causal")) as one:
        rows, findings = one.probe()
    assert rows == {"is_causal": "ignored", "scale": "changes the answer"}
    assert [f.key for f in findings] == ["ignored-keyword:is_causal"]


def pipe_of(data: bytes) -> int:
    end, start = os.pipe()
    os.write(start, data)
    os.close(start)
    return end


@pytest.mark.parametrize("dtype", wire.DTYPES.values())
def test_tensors_cross_the_wire_bit_for_bit(dtype: torch.dtype) -> None:
    x = torch.arange(6).reshape(2, 3).to(dtype).t()
    end, start = os.pipe()
    wire.send(start, {"a": [1]}, {"x": x, "none": x[:0], "scalar": x[0, 0]})
    message, tensors = wire.receive(end)
    assert message == {"a": [1]}
    assert all(torch.equal(tensors[n], want) for n, want in (("x", x), ("none", x[:0]), ("scalar", x[0, 0])))
    assert tensors["x"].dtype == dtype


def test_large_tensors_cross_a_pipe_piece_by_piece() -> None:
    x = torch.randn(1 << 18)
    end, start = os.pipe()
    threading.Thread(target=wire.send, args=(start, {}, {"x": x})).start()
    assert torch.equal(wire.receive(end, time.monotonic() + 10)[1]["x"], x)


def test_one_element_crosses_the_wire_whatever_its_stride() -> None:
    end, start = os.pipe()
    wire.send(start, {}, {"x": torch.ones(()).expand(1, 1, 1)[..., :1]})
    assert wire.receive(end)[1]["x"].tolist() == [[[1.0]]]


@pytest.mark.parametrize(("data", "error"), [(b"", wire.Closed), (b"fpf1", wire.Closed), (b"x" * 100, wire.Garbled)])
def test_what_is_no_message_is_refused(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        wire.receive(pipe_of(data))


def test_nothing_before_the_deadline_is_late() -> None:
    end, start = os.pipe()
    with pytest.raises(wire.Late):
        wire.receive(end, time.monotonic() + 0.05)
    os.close(start)


def test_writing_to_a_closed_pipe_says_so() -> None:
    end, start = os.pipe()
    os.close(end)
    with pytest.raises(wire.Closed):
        wire.send(start, {})


@pytest.mark.slow
def test_a_hang_is_shrunk_to_its_edge_with_few_waits():
    with Worker(faulty("hangs_long"), deadline=2.0) as worker:
        failure = hunt(Judge(worker), examples=12, policy=Policy(more=(0, 0), shrink_seconds=20.0)).failures[0]
        assert worker.deadline == 2.0 and worker.deaths < 15
    assert failure.key == "hang:call" and failure.case.but(seed=0) == Case(Lk=5, requires_grad="")
