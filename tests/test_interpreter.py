import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

from flashproof.oracles import interpreter  # noqa: E402, without Triton there is nothing to import

KERNELS = Path(__file__).parent / "kernels"
VERSION = tuple(int(n) for n in triton.__version__.split(".")[:2])


def load(name):
    spec = importlib.util.spec_from_file_location(f"kernels_{name}", KERNELS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kernels():
    interpreter.enable()
    yield load("memory")
    interpreter.disable()


def run(script, *args):
    """Standard output of a script in a fresh Python, where nothing has imported Triton yet."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    result = subprocess.run(
        [sys.executable, "-c", script, str(KERNELS), *args],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


# bfloat16


@pytest.mark.parametrize("factor", [1.0, 1e-38, 3e38])
def test_bfloat16_is_rounded_as_torch_rounds_it(kernels, factor):
    a = random(64) * factor
    c = torch.empty(64, dtype=torch.bfloat16)
    kernels.cast[(1,)](a, c, 64)
    assert torch.equal(c, a.to(torch.bfloat16))


def test_bfloat16_is_truncated_when_the_kernel_asks_for_it(kernels):
    a = random(64)
    c = torch.empty(64, dtype=torch.bfloat16)
    kernels.truncate[(1,)](a, c, 64)
    assert torch.equal(c.view(torch.int16), (a.view(torch.int32) >> 16).to(torch.int16))


def test_bfloat16_arithmetic_gives_the_bits_torch_gives(kernels):
    a, b = random(64, dtype=torch.bfloat16), random(128, dtype=torch.bfloat16)[64:]
    c = torch.empty(6, 64, dtype=torch.bfloat16)
    kernels.elementwise[(1,)](a, b, c, 64)
    assert torch.equal(c, torch.stack([a + b, a * b, a - b, torch.maximum(a, b), a.abs(), a * 3]))


def test_a_bfloat16_product_is_summed_in_float32(kernels):
    a, b = random(16, 16, dtype=torch.bfloat16), random(32, 16, dtype=torch.bfloat16)[16:]
    c = torch.empty(16, 16)
    kernels.matmul[(1,)](a, b, c)
    assert (c - a.double() @ b.double()).abs().max() < 1e-5


# the fast path

_ALL_RESULTS = """
import sys, importlib.util, numpy, torch, warnings
warnings.simplefilter("ignore")
def load(name):
    spec = importlib.util.spec_from_file_location(name, f"{sys.argv[1]}/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
if sys.argv[2] == "ours":
    from flashproof.oracles import interpreter
    interpreter.install()
    interpreter.enable()
else:
    import os
    os.environ["TRITON_INTERPRET"] = "1"
memory, attention = load("memory"), load("attention")
import triton.language as tl
out = {}
for name, F in (("float32", tl.float32), ("float16", tl.float16)):
    dtype = getattr(torch, name)
    def random(*shape):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    o = torch.zeros(640 + 256)
    memory.arithmetic[(1,)](random(16, 8), random(16).abs() + 0.5, o, F)
    out[f"{name}-arithmetic"] = o
    for causal in (False, True):
        q, k, v, do = (random(1, 1, n, 8) for n in (17, 20, 20, 17))
        o, lse = attention.forward(q, k, v, causal)
        out[f"{name}-{causal}-o"] = o
        out[f"{name}-{causal}-lse"] = lse[:, :17].clone()
        for i, g in enumerate(attention.backward(q, k, v, o, lse, do, causal)):
            out[f"{name}-{causal}-{i}"] = g
numpy.savez(sys.argv[3], **{k: t.numpy() for k, t in out.items()})
"""


@pytest.mark.slow
def test_the_fast_path_changes_no_bit_of_fp32_and_fp16_results(tmp_path):
    for who in ("ours", "stock"):
        run(_ALL_RESULTS, who, str(tmp_path / who))
    ours, stock = (np.load(tmp_path / f"{who}.npz") for who in ("ours", "stock"))
    assert sorted(ours) == sorted(stock)
    assert [n for n in stock if ours[n].tobytes() != stock[n].tobytes()] == []


def test_integers_of_two_widths_are_multiplied_in_the_wider_one(kernels):
    rows, stride = torch.tensor([1, -(2**20), 2**30, 7], dtype=torch.int32), torch.tensor([2**20 + 1])
    c = torch.empty(4, 4, dtype=torch.int64)
    with interpreter.monitored() as monitor:
        kernels.offsets[(1,)](rows, stride, c, 4)
    assert torch.equal(c, rows.long()[:, None] * stride + torch.arange(4))
    assert interpreter.findings(monitor, {}) == []


def test_a_constant_keeps_the_sign_of_zero(kernels):
    c = torch.ones(2)
    kernels.zeros[(1,)](c, -0.0)
    kernels.zeros[(1,)](c, 0.0)
    assert c.tolist() == [0.0, 0.0]


def test_constants_of_the_exact_mode_do_not_leak_out(kernels):
    a = random(256)
    with interpreter.exact():
        kernels.add_tenth[(1,)](a.clone(), 256)
    c = a.clone()
    kernels.add_tenth[(1,)](c, 256)
    assert torch.equal(c, a + torch.tensor(0.1))  # 0.1 of float32


@pytest.mark.slow
def test_the_monitor_does_not_load_the_compiler():
    script = "import sys, torch; from flashproof.oracles.interpreter import exact\n"
    script += "with exact(): torch.ones(2).sum()\nprint('torch._dynamo' in sys.modules)"
    assert run(script).strip() == "False"


# how kernels come to be interpreted

_IMPORTED_BEFORE = """
import sys, importlib.util, torch, triton
spec = importlib.util.spec_from_file_location("kernels", f"{sys.argv[1]}/memory.py")
kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
assert type(kernels.copy).__name__ == "JITFunction", type(kernels.copy)
from flashproof.oracles import interpreter
interpreter.enable()
a, c = torch.arange(37.0), torch.empty(37)
with interpreter.monitored() as monitor:
    kernels.copy[(3,)](a, c, 37, 1, 16, True, True)
    kernels.in_device_function[(1,)](a, torch.empty(16), 16)
    kernels.tuned[lambda meta: (triton.cdiv(37, meta["N"]),)](a, torch.empty(37), 37)
    r = torch.empty(8)
    kernels.reductions[(1,)](a, r)
print(torch.equal(a, c), r[:4].tolist(), monitor.violations)
"""


@pytest.mark.slow
def test_kernels_decorated_before_enable_are_interpreted():
    assert run(_IMPORTED_BEFORE).strip() == "True [28.0, 28.0, 7.0, 4.0] []"


def test_an_autotuned_kernel_runs_with_its_first_configuration(kernels):
    a, c = random(37), torch.empty(37)
    kernels.tuned[lambda meta: (triton.cdiv(37, meta["N"]),)](a, c, 37)
    assert torch.equal(c, a * 16)


def test_heuristics_are_followed(kernels):
    a, c = random(32), torch.empty(32)
    with interpreter.monitored() as m:
        kernels.tuned[(2,)](a, c, 32)
    assert torch.equal(c, a * 16)
    assert not m.violations


def test_an_autotuned_kernel_runs_with_the_first_configuration_its_pruning_leaves(kernels):
    c = torch.empty(4)
    kernels.pruned[(1,)](c, 4)
    assert c.eq(32).all()


def test_a_pruning_that_asks_for_a_gpu_is_passed_over(kernels):
    c = torch.empty(4)
    kernels.pruned_by_device[(1,)](c, 4)
    assert c.eq(16).all()


def test_the_hook_of_a_configuration_runs(kernels):
    c, d = torch.empty(4), torch.zeros(4)
    kernels.hooked[(1,)](c, d, 4)
    assert d.eq(1).all()


def test_a_kernel_defined_in_a_function_sees_its_variables(kernels):
    c = torch.ones(1)
    kernels.closure(5)[(1,)](c)
    assert c.item() == 6


def test_arguments_in_tuples_are_guarded(kernels):
    with interpreter.monitored() as m:
        kernels.in_tuple[(1,)]((random(8), torch.empty(16)), 16)
    assert {(v.kind, v.argument) for v in m.violations} == {("oob-load", "pair")}


# what the interpreter cannot do


def test_inline_assembly_is_named_in_the_error(kernels):
    with pytest.raises(
        NotImplementedError, match=r"kernel inline_assembly uses inline assembly .* can only run on a GPU"
    ):
        kernels.inline_assembly[(1,)](torch.ones(1))


def test_block_pointers_work_or_are_named_in_the_error(kernels):
    a, c = random(20), torch.empty(32)
    if VERSION >= (3, 9):
        with pytest.raises(NotImplementedError, match="kernel block_pointer uses block pointers"):
            kernels.block_pointer[(1,)](a, c, 32)
        return
    with (
        interpreter.monitored() as m,
        pytest.warns(UserWarning, match="deprecated") if VERSION >= (3, 7) else interpreter.monitored(),
    ):
        kernels.block_pointer[(1,)](a, c, 32)
    assert torch.equal(c[:20], a)
    assert not c[20:].any()
    assert not m.violations


def test_libdevice_functions_that_numpy_has_work(kernels):
    a, c = random(16), torch.empty(16)
    kernels.libdevice_tanh[(1,)](a, c)
    torch.testing.assert_close(c, torch.tanh(a) + torch.atan2(a, torch.tensor(2.0)), rtol=1e-6, atol=1e-6)


def test_libdevice_functions_that_numpy_lacks_are_named_in_the_error(kernels):
    with pytest.raises(NotImplementedError, match=r"kernel libdevice_bessel uses .*libdevice\.j0"):
        kernels.libdevice_bessel[(1,)](torch.ones(1))


def test_an_error_in_a_kernel_names_the_kernel(kernels):
    from triton.runtime.errors import InterpreterError

    with pytest.raises(InterpreterError, match=r"in kernel wrong_shape: "):
        kernels.wrong_shape[(1,)](torch.ones(16))
