import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from flashproof.oracles import interpreter


def load(name):
    spec = importlib.util.spec_from_file_location(f"kernels_{name}", Path(__file__).parent / "kernels" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kernels():
    interpreter.enable()
    yield load("memory")
    interpreter.disable()


def kinds(monitor):
    return {(v.kind, v.argument) for v in monitor.violations}


def random(*shape, dtype=torch.float32):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)


ALL = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.int64]


@pytest.mark.parametrize("dtype", ALL)
def test_a_masked_copy_is_clean_and_counted(kernels, dtype):
    a = random(37, dtype=dtype)
    with interpreter.monitored() as m:
        c = torch.empty(37, dtype=dtype)
        kernels.copy[(3,)](a, c, 37, 1, 16, True, True)
    assert torch.equal(a, c)
    assert not m.violations
    assert m.unwritten(c) is None
    assert m.by_arg()["copy", "A", "load"] == (37 * a.element_size(), 37)


@pytest.mark.parametrize("dtype", ALL)
def test_an_unmasked_load_of_the_tail_is_out_of_bounds(kernels, dtype):
    with interpreter.monitored() as m:
        kernels.copy[(3,)](random(37, dtype=dtype), torch.empty(37, dtype=dtype), 37, 1, 16, False, True)
    (v,) = m.violations
    assert (v.kind, v.argument, v.element, v.lanes, v.program) == ("oob-load", "A", 37, 11, (2, 0, 0))


def test_an_unmasked_store_of_the_tail_is_dropped_and_reported(kernels):
    memory = torch.zeros(64)
    with interpreter.monitored() as m:
        kernels.copy[(3,)](random(48), memory[:37], 48, 1, 16, True, False)
    assert kinds(m) == {("oob-store", "C")}
    assert not memory[37:].any()


def test_an_unmonitored_stray_store_harms_nothing_and_is_kept_by_the_guard(kernels):
    memory = torch.zeros(64)
    kernels.copy[(3,)](random(48), memory[:37], 48, 1, 16, True, False)
    assert not memory[37:].any()
    assert ("oob-store", "C") in kinds(interpreter.guard())


def test_unwritten_elements_of_a_result_are_named(kernels):
    with interpreter.monitored() as m:
        c = torch.empty(40)
        kernels.copy[(2,)](random(37), c, 37, 1, 16, True, True)
    assert m.unwritten(c).nonzero().ravel().tolist() == list(range(32, 40))
    (f,) = interpreter.findings(m, {"o": c})
    assert (f.tensor, f.index, f.message) == ("o", (32,), "8 of 40 elements were never written, the first at [32]")


def test_unwritten_elements_are_seen_through_views_copies_and_casts(kernels):
    with interpreter.monitored() as m:
        c = torch.empty(40)
        kernels.copy[(2,)](random(37), c, 37, 1, 16, True, True)
        copies = [c.view(2, 20).T, c.clone(), c.to(torch.bfloat16), c.view(2, 20).T.contiguous()]
    assert [int(m.unwritten(t).sum()) for t in copies] == [8, 8, 8, 8]


def test_a_load_between_the_rows_of_a_strided_view_is_reported(kernels):
    with interpreter.monitored() as m:
        kernels.copy[(1,)](random(64)[::2], torch.empty(16), 16, 1, 16, True, True)
    assert kinds(m) == {("gap-load", "A")}
    assert m.violations[0].lanes == 8


def test_a_load_before_the_view_is_out_of_bounds(kernels):
    with interpreter.monitored() as m:
        kernels.copy[(1,)](random(64)[8:], torch.empty(16), 16, -1, 16, True, True)
    assert ("oob-load", "A") in kinds(m)
    assert "1 element before the first" in str(interpreter.findings(m, {})[0])


def test_an_address_of_no_argument_is_wild(kernels):
    with interpreter.monitored() as m:
        kernels.copy[(1,)](random(64), torch.empty(16), 16, 2**40, 16, True, True)
    assert ("wild-load", "?") in kinds(m)


def test_a_load_of_the_wrong_width_is_reported(kernels):
    with interpreter.monitored() as m:
        kernels.wrong_width[(1,)](random(4), torch.empty(4))
    assert ("size-load", "A") in kinds(m)


def test_masked_lanes_without_other_are_nan(kernels):
    with interpreter.monitored():
        c = torch.zeros(48)
        kernels.copy[(3,)](random(37), c, 37, 1, 16, True, False)
    assert c[37:].isnan().all()
    assert not c[:37].isnan().any()


def test_masked_integer_lanes_without_other_are_one(kernels):
    with interpreter.monitored():
        c = torch.zeros(48, dtype=torch.int32)
        kernels.copy[(3,)](torch.zeros(37, dtype=torch.int32), c, 37, 1, 16, True, False)
    assert c[37:].eq(1).all()


def test_tensor_descriptors_are_followed_to_their_tensor(kernels):
    from triton.tools.tensor_descriptor import TensorDescriptor

    a = random(37, 24)
    with interpreter.monitored() as m:
        c, d = torch.empty(37, 24), torch.empty(37, 24)
        kernels.device_descriptor[(1,)](a, c, 37, 24, 16, 32)
        host = [TensorDescriptor.from_tensor(t, [16, 32]) for t in (a, d)]
        kernels.host_descriptor[(1,)](*host, 37, 16)
    assert not m.violations
    assert torch.equal(c, a * 2)
    assert torch.equal(d, a * 2)
    assert (
        m.by_arg()["device_descriptor", "A", "load"]
        == m.by_arg()["host_descriptor", "a", "load"]
        == (37 * 24 * 4, 37 * 24)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_atomics_of_several_programs_do_not_race(kernels, dtype):
    c = torch.zeros(1, dtype=dtype)
    with interpreter.monitored() as m:
        kernels.add_one[(4,)](c, True)
    assert not m.violations
    assert c.item() == 4
    assert m.by_arg()["add_one", "C", "atomic"] == (4 * c.element_size(), 4)


def test_plain_read_modify_write_by_several_programs_races(kernels):
    with interpreter.monitored() as m:
        kernels.add_one[(4,)](torch.zeros(1), False)
    assert {k for k, _ in kinds(m)} == {"race-load-after-write", "race-store-after-write", "race-store-after-read"}


def test_a_race_that_is_meant_can_be_declared(kernels):
    with interpreter.monitored(race_ok=frozenset({"C"})) as m:
        kernels.add_one[(4,)](torch.zeros(1), False)
    assert not m.violations


def test_a_race_under_a_lock_is_a_warning(kernels):
    c = torch.zeros(1)
    with interpreter.monitored() as m:
        kernels.add_under_lock[(4,)](c, torch.zeros(1, dtype=torch.int32))
    found = interpreter.findings(m, {"c": c})
    assert c.item() == 4
    assert {f.severity for f in found} == {"warning"}


@pytest.mark.parametrize("order", [None, "reverse", np.random.default_rng(0)])
def test_a_hand_over_between_programs_races_in_any_order(kernels, order):
    with interpreter.monitored(order=order) as m:
        kernels.hand_over[(2,)](torch.zeros(1), torch.zeros(1))
    assert {k for k, _ in kinds(m)} & {"race-load-after-write", "race-store-after-read"}


def test_programs_run_in_the_order_that_was_asked_for(kernels):
    b = {}
    for order in (None, "reverse"):
        b[order] = torch.zeros(1)
        with interpreter.monitored(order=order):
            kernels.hand_over[(2,)](torch.zeros(1), b[order])
    assert (b[None].item(), b["reverse"].item()) == (1, 0)


def test_a_read_between_the_writes_of_others_races_with_the_later_one(kernels):
    with interpreter.monitored() as m:
        kernels.read_between_writes[(3,)](torch.zeros(2), torch.zeros(1))
    assert kinds(m) == {("race-store-after-read", "A")}


def test_overlapping_arguments_of_one_storage_race(kernels):
    t = torch.zeros(64)
    with interpreter.monitored() as m:
        kernels.copy[(2,)](t[:32], t[16:48], 32, 1, 16, True, True)
    assert any(k.startswith("race") for k, _ in kinds(m))


def test_separate_parts_of_one_storage_do_not_race(kernels):
    t = random(64)
    with interpreter.monitored() as m:
        kernels.copy[(2,)](t[:32], t[32:], 32, 1, 16, True, True)
    assert not m.violations
    assert torch.equal(t[:32], t[32:])


@pytest.mark.parametrize("same", [True, False])
def test_two_lanes_that_store_different_values_race(kernels, same):
    with interpreter.monitored() as m:
        kernels.store_lanes[(1,)](torch.zeros(4), same)
    assert kinds(m) == (set() if same else {("race-lanes", "C")})


def test_what_torch_writes_is_initialised(kernels):
    with interpreter.monitored() as m:
        a, b, c = torch.empty(16), torch.empty(32), torch.empty(16)
        a.zero_()
        b[:16].fill_(1.0)
        torch.add(a, 1.0, out=c)
        kernels.copy[(1,)](a, torch.empty(16), 16, 1, 16, True, True)
        kernels.copy[(1,)](c, torch.empty(16), 16, 1, 16, True, True)
        assert not m.violations
        kernels.copy[(2,)](b, torch.empty(32), 32, 1, 16, True, True)
    assert kinds(m) == {("uninitialised-load", "A")}
    assert m.violations[0].program == (1, 0, 0)


@pytest.mark.usefixtures("kernels")
def test_an_output_that_torch_wrote_is_not_unwritten():
    with interpreter.monitored() as m:
        a, b, c = torch.empty(4), torch.empty(4), torch.empty(4)
        a.fill_(1.0)
        b[:3] = 1.0
        torch.add(a, a, out=c)
    assert m.unwritten(a) is None
    assert m.unwritten(c) is None
    assert m.unwritten(b).tolist() == [False, False, False, True]


def test_what_numpy_writes_is_initialised(kernels):
    with interpreter.monitored() as m:
        a = torch.empty(16)
        a.numpy()[:] = 1.0
        kernels.copy[(1,)](a, torch.empty(16), 16, 1, 16, True, True)
    assert not m.violations


def test_a_transposed_in_place_empty_stays_uninitialised(kernels):
    with interpreter.monitored() as m:
        a = torch.empty(4, 4)
        a.t_()
        kernels.copy[(1,)](a, torch.empty(16), 16, 1, 16, True, True)
    assert kinds(m) == {("uninitialised-load", "A")}


@pytest.mark.parametrize(("n", "severity"), [(10, "warning"), (12, "fail")])
def test_uninitialised_lanes_that_where_drops_are_a_warning(kernels, n, severity):
    with interpreter.monitored() as m:
        a = torch.empty(16)
        a[:10].fill_(1.0)
        c = torch.empty(16)
        kernels.drop_tail[(1,)](a, c, n, 16)
    (f,) = interpreter.findings(m, {"c": c})
    assert f.severity == severity


def test_an_uninitialised_read_is_judged_as_the_caller_says(kernels):
    with interpreter.monitored() as m:
        kernels.drop_tail[(1,)](torch.empty(16), torch.empty(16), 0, 16)
    assert [interpreter.findings(m, {}, harmed=h)[0].severity for h in (False, True)] == ["warning", "fail"]


def test_an_uninitialised_integer_read_always_fails(kernels):
    with interpreter.monitored() as m:
        c = torch.empty(16, dtype=torch.int32)
        kernels.copy[(1,)](torch.empty(16, dtype=torch.int32), c, 16, 1, 16, True, True)
    assert interpreter.findings(m, {"c": c})[0].severity == "fail"


def test_an_overflowed_offset_that_is_used_is_reported(kernels):
    with interpreter.monitored() as m:
        kernels.wrapped_offset[(1,)](random(8), torch.empty(8), 2**30, True)
    (v,) = m.violations
    assert (v.kind, v.argument, v.lanes) == ("overflow-load", "A", 1)


def test_an_overflowed_offset_of_a_masked_lane_is_not_reported(kernels):
    with interpreter.monitored() as m:
        kernels.wrapped_offset[(1,)](random(8), torch.empty(8), 2**30, False)
    assert not m.violations


def test_a_hash_that_wraps_before_it_becomes_an_index_is_not_reported(kernels):
    with interpreter.monitored() as m:
        kernels.hashed_index[(1,)](random(8), torch.empty(8), 2**30 + 77)
    assert not m.violations


def test_a_resized_storage_is_followed(kernels):
    a = torch.arange(16.0)
    with interpreter.monitored() as m:
        c = torch.empty(16)
        kernels.copy[(1,)](a, c, 16, 1, 16, True, True)
        c.resize_(4096)
        c.zero_()
        kernels.copy[(256,)](torch.ones(4096), c, 4096, 1, 16, True, True)
    assert not m.violations
    assert c.eq(1).all()


def test_the_guard_keeps_no_tensor_alive(kernels):
    a, c = torch.zeros(16), torch.empty(16)
    kernels.copy[(1,)](a, c, 16, 1, 16, True, True)
    assert not interpreter.guard().shadows


def test_empty_tensors_and_grids_are_clean(kernels):
    with interpreter.monitored() as m:
        kernels.copy[(0,)](torch.empty(0), torch.empty(0), 0, 1, 16, True, True)
        kernels.copy[(1,)](torch.empty(0), torch.empty(0), 0, 1, 16, True, True)
    assert not m.violations


def test_a_violation_names_the_line_of_the_device_function(kernels):
    with interpreter.monitored() as m:
        kernels.in_device_function[(1,)](random(8), torch.empty(16), 16)
    (v,) = m.violations
    assert Path(v.file).name == "memory.py"
    assert "return tl.load(P)" in Path(v.file).read_text().splitlines()[v.line - 1]


def test_a_finding_says_kernel_line_argument_element_program_and_lanes(kernels):
    with interpreter.monitored() as m:
        kernels.copy[(3,)](random(37), torch.empty(37), 37, 1, 16, False, True)
    (f,) = interpreter.findings(m, {})
    assert (f.oracle, f.tensor, f.severity, f.key) == ("memory", "A", "fail", "memory:A")
    assert f.details["lanes"] == 11
    line = f.details["line"]
    assert f.message == (
        f"out-of-bounds load, in copy at memory.py:{line}, 1 element past the last, program (2, 0, 0) (11 lanes)"
    )


def test_findings_of_one_kind_and_argument_are_merged(kernels):
    with interpreter.monitored() as m:
        for _ in range(5):
            kernels.copy[(3,)](random(37), torch.empty(37), 37, 1, 16, False, True)
    (f,) = interpreter.findings(m, {})
    assert (f.details["lanes"], f.details["accesses"]) == (55, 5)


def test_hooks_are_taken_away_when_the_block_raises(kernels):
    import triton.runtime.interpreter as interp

    def state():
        builder = vars(interp.InterpreterBuilder)
        return interp._interpreter.stack[:], interp._implicit_cvt, interp._get_np_dtype, dict(builder)

    before = state()
    for mode in (interpreter.monitored, interpreter.exact):
        with pytest.raises(ZeroDivisionError), mode():
            raise ZeroDivisionError
    assert state() == before


def test_disable_puts_triton_back():
    import triton.runtime.interpreter as interp

    interpreter.disable()
    before = interp._interpreter, interp._implicit_cvt, vars(interp.GridExecutor)["__call__"], interp._get_np_dtype
    interpreter.enable()
    interpreter.disable()
    after = interp._interpreter, interp._implicit_cvt, vars(interp.GridExecutor)["__call__"], interp._get_np_dtype
    assert before == after
