"""One run in this process: status, findings, call sequences, repetition, exact runs."""

from pathlib import Path

import pytest
import torch

from flashproof.fuzz.case import Case
from flashproof.fuzz.execute import DeviceAbsent, Execution, Runner, present, region_from_json, region_to_json
from flashproof.fuzz.masks import Causal, Padding
from flashproof.fuzz.region import Region
from flashproof.impls import Implementation
from flashproof.impls.loading import TargetError

TARGETS = Path(__file__).parent / "targets"
SMALL = Case(B=2, Hq=2, Hkv=2, Lq=3, Lk=5, D=4, Dv=2)


def runner(name: str, **options: str) -> Runner:
    return Runner(f"{TARGETS}/{name}", **options)


def run(name: str, case: Case = SMALL, **how: bool) -> Execution:
    return runner(f"faulty.py:{name}").run(case, **how)


def keys(execution: Execution) -> list[str]:
    return [f.key for f in execution.findings]


def test_right_target_runs_without_findings() -> None:
    out = runner("right.py:sdpa").run(SMALL, repeat=True)
    assert (out.status, out.findings, set(out.outputs)) == ("ok", [], {"o", "dq", "dk", "dv"})


def test_info_says_what_was_understood() -> None:
    info = runner("right.py:flash").info
    assert (info["dialect"], info["returns_lse"], info["device"], info["supports"]) == ("flash_attn", True, "cpu", None)
    assert info["bound"] == ["dropout_p", "softmax_scale", "causal", "window_size", "softcap", "return_lse"]
    assert info["environment"]["torch"] == torch.__version__


@pytest.mark.parametrize("region", [None, Region(), Region(dtypes=("float16",), head_dims=(64, 128), softcap=False)])
def test_region_survives_json(region: Region | None) -> None:
    assert region_from_json(region_to_json(region)) == region


def test_region_declared_by_the_target_is_in_the_info() -> None:
    declared = Implementation("mine", lambda q, k, v, is_causal=False: q, supports=Region(gqa=False), contract="tf32")
    info = Runner(declared).info
    assert region_from_json(info["supports"]) == Region(gqa=False)
    assert info["contract"] == "tf32"


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("raises", "raised", "RuntimeError: no kernel image"),
        ("leaves", "raised", "SystemExit: 3"),
        ("refuses_long", "refused", "NotImplementedError: more than 4 keys"),
    ],
)
def test_what_a_target_raises_is_told_apart(name: str, status: str, message: str) -> None:
    out = run(name)
    assert (out.status, out.message, out.outputs) == (status, message, {})


def test_traceback_is_the_targets_own() -> None:
    text = run("raises").traceback
    assert "faulty.py" in text
    assert "execute.py" not in text


def test_inexpressible_case_is_told_apart() -> None:
    assert run("raises", SMALL.but(softcap=1.0)).status == "inexpressible"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("writes_input", ["purity:k"]),
        ("writes_past_input", ["guard:q"]),
        ("changes_state", ["global-state:float32 matmul precision", "global-state:random number generator"]),
        ("returns_none", ["type:o"]),
        ("detached", ["grad:o"]),
        ("drops_key_gradient", ["grad:dk"]),
    ],
)
def test_each_fault_is_found_once(name: str, expected: list[str]) -> None:
    assert keys(run(name)) == expected


def test_uninitialised_memory_shows_as_nan() -> None:
    assert bool(run("uninitialised").outputs["o"].isnan().all())


def test_a_call_that_answers_differently_is_found_by_repeating_it() -> None:
    assert keys(run("alternates")) == []
    assert "repeat:o" in keys(run("alternates", repeat=True))


def test_a_call_sequence_finds_what_the_call_between_left_behind() -> None:
    case = SMALL.but(Lk=6)
    assert keys(run("caches_scale", case)) == []
    assert "sequence:o" in keys(run("caches_scale", case.but(Lk=7, sequence="scale")))


def test_a_call_sequence_judges_the_last_call() -> None:
    plain, after = (runner("right.py:sdpa").run(c) for c in (SMALL, SMALL.but(sequence="mask")))
    assert torch.equal(plain.outputs["o"], after.outputs["o"])


@pytest.mark.parametrize("sequence", ["repeat", "scale", "mask", "layout", "values", "refill"])
def test_every_call_sequence_is_clean_on_a_right_target(sequence: str) -> None:
    assert runner("right.py:sdpa").run(SMALL.but(sequence=sequence, mask=Causal())).findings == []


def test_other_values_in_the_same_memory_show_a_cache_by_address() -> None:
    kept: dict[int, torch.Tensor] = {}

    def fn(query, key, value, attn_mask=None):  # type: ignore[no-untyped-def]
        return (query @ kept.setdefault(key.data_ptr(), key.detach().clone()).mT).softmax(-1) @ value

    runner, case = Runner(fn), Case(Lk=3, requires_grad="")
    right = runner.run(case)
    kept.clear()
    stale = runner.run(case.but(sequence="refill"))
    assert stale.status == "ok" and stale.findings == []
    assert not torch.equal(stale.outputs["o"], right.outputs["o"])


def test_a_refused_call_between_disturbs_nothing() -> None:
    def fn(q, k, v, is_causal=False):  # type: ignore[no-untyped-def]
        if not is_causal:
            raise NotImplementedError
        return q * 1.0

    case = Case(mask=Causal(), sequence="mask", requires_grad="")
    assert Runner(fn).run(case).status == "ok"


def test_an_output_buffer_that_is_used_again_is_read_before_the_next_call() -> None:
    buffer = torch.zeros(1, 1, 1, 1)

    def fn(q, k, v, is_causal=False, scale=None):  # type: ignore[no-untyped-def]
        return buffer.add_(1.0)

    assert keys(Runner(fn).run(Case(sequence="repeat", requires_grad=""))) == ["sequence:o"]


def test_error_of_the_harness_is_not_blamed_on_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("ours")

    one = runner("right.py:sdpa")
    monkeypatch.setattr("flashproof.fuzz.execute.build", broken)
    with pytest.raises(ValueError, match="ours"):
        one.run(SMALL)


def test_forward_only_target_is_not_differentiated() -> None:
    out = runner("faulty.py:detached", contract="forward_only=true").run(SMALL)
    assert (out.findings, set(out.outputs)) == ([], {"o"})


def test_dropout_may_draw_random_numbers_and_repeats() -> None:
    out = runner("right.py:sdpa").run(SMALL.but(dropout=0.5), repeat=True)
    assert (out.status, out.findings) == ("ok", [])


def test_execution_survives_json() -> None:
    out = run("writes_input")
    again = Execution.from_json(out.to_json(), out.outputs, out.exact)
    assert again == out


@pytest.mark.parametrize(
    ("device", "error"),
    [("cuda:999", DeviceAbsent), ("tpu", ValueError), ("cpu:1", ValueError), ("cuda:x", ValueError)],
)
def test_device_that_is_not_there(device: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=device):
        present(device)


def test_target_for_another_device_is_refused() -> None:
    with pytest.raises(TargetError, match="must run on one of cuda, got device=cpu"):
        Runner(Implementation("gpu_only", lambda q, k, v, causal=False: q, devices=("cuda",)))


def test_dense_masks_keep_their_guards() -> None:
    def fn(q, k, v, attn_mask=None):  # type: ignore[no-untyped-def]
        attn_mask.logical_not_()
        return q * 1.0

    out = Runner(fn).run(Case(Lk=3, mask=Padding((2,)), requires_grad=""))
    assert keys(out) == ["purity:mask"]
