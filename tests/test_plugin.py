"""`pytest --flashproof-target` fuzzes without a line of test code; `check` does it inside a test of one's own."""

import argparse
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings

import flashproof
from flashproof import CheckFailed, Refuse, cases, check
from flashproof.fuzz import plugin
from flashproof.fuzz.api import failure_class
from flashproof.fuzz.case import Case
from flashproof.fuzz.masks import Causal

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
"""


def pytest_run(folder, *arguments, **environment):
    """A run of pytest with the plugin in another folder."""
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{folder}"} | environment
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "flashproof.fuzz.plugin",
        "-q",
        "-rA",
        "--rootdir",
        str(folder),
        *arguments,
    ]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture
def folder(tmp_path):
    """A folder with targets, a test, and a conftest that has imported triton, in a run that Hypothesis takes for CI."""
    (tmp_path / "targets.py").write_text(textwrap.dedent(TARGETS))
    (tmp_path / "test_own.py").write_text("def test_own(): pass\n")
    (tmp_path / "conftest.py").write_text("import triton\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


@pytest.mark.slow
def test_a_target_is_an_item_beside_the_users_tests(folder):
    options = ("--flashproof-examples", "4", "--flashproof-contract", "may_leak")
    targets = [f"--flashproof-target=targets.py:{name}" for name in ("wrong", "right", "absent")]
    done = pytest_run(folder, *targets, *options, CI="1")
    assert done.returncode == 1, done.stdout
    for line in (
        "FAILED flashproof::targets.py:wrong",
        "PASSED flashproof::targets.py:right",
        "PASSED test_own.py::test_own",
    ):
        assert line in done.stdout
    assert "got attr='absent'" in done.stdout and "Traceback" not in done.stdout
    assert "flashproof replay failures/" in done.stdout and "plugin.py" not in done.stdout


ADAPTED = """
    import flashproof
    from targets import right

    @flashproof.target(layout="blhd", forward_only=True, masked_nonfinite="may_leak")
    def good(q, k, v, scale):
        return right(*(x.transpose(1, 2) for x in (q, k, v)), scale=scale).transpose(1, 2)

    @flashproof.target(layout="bhld", forward_only=True, masked_nonfinite="may_leak")
    def bad(q, k, v, scale):
        return right(*(x.transpose(1, 2) for x in (q, k, v)), scale=scale).transpose(1, 2)
"""


@pytest.mark.slow
def test_an_adapted_target_is_an_item_judged_in_the_layout_that_it_declares(folder):
    (folder / "adapted.py").write_text(textwrap.dedent(ADAPTED))
    targets = [f"--flashproof-target=adapted.py:{name}" for name in ("good", "bad")]
    done = pytest_run(folder, *targets, "--flashproof-examples", "6", CI="1")
    assert done.returncode == 1, done.stdout
    assert "PASSED flashproof::adapted.py:good" in done.stdout and "FAILED flashproof::adapted.py:bad" in done.stdout


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf", ""])
def test_a_wrong_time_or_number_is_a_usage_error(text):
    for rule in (plugin._seconds, plugin._count):
        with pytest.raises(argparse.ArgumentTypeError, match="must be"):
            rule(text)
    assert plugin._seconds("0.5") == 0.5 and plugin._count("3") == 3


def test_the_plugin_loads_neither_torch_nor_triton_nor_hypothesis():
    code = "import sys, flashproof.fuzz.plugin; print({'torch', 'triton', 'numpy', 'hypothesis'} & set(sys.modules))"
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_every_exported_name_is_there():
    assert all(getattr(flashproof, name) is not None for name in flashproof.__all__)
    with pytest.raises(AttributeError, match="check"):
        flashproof.absent  # noqa: B018 (the access is the test)


def right(query, key, value, is_causal=False, scale=None):
    import torch

    s = (query.double() @ key.double().mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return (s.softmax(-1) @ value.double()).to(query.dtype)


def wrong(query, key, value, is_causal=False, scale=None):
    return 1.5 * right(query, key, value, is_causal, scale)


def test_check_gives_the_verdict_of_a_right_callable():
    verdict = check(right, Case(Lk=5, D=3))
    assert verdict.status == "pass" and not verdict.failures


def test_check_raises_the_report_of_a_wrong_one():
    with pytest.raises(CheckFailed, match=r"exceeds limit .* got .* want ") as e:
        check(wrong, Case(Lk=5, D=3))
    assert isinstance(e.value, AssertionError) and "Lk = 5" in str(e.value)


def test_each_kind_of_finding_has_an_exception_of_its_own():
    assert failure_class("value:o") is failure_class("value:o") is not failure_class("value:dk")
    assert failure_class("value:dk").__name__ == "CheckFailed_value_dk"


def test_check_judges_again_what_has_changed():
    broken = []

    def target(query, key, value, is_causal=False):
        return (wrong if broken else right)(query, key, value, is_causal)

    assert check(target, Case(Lk=3)).status == "pass"
    broken.append(True)
    with pytest.raises(CheckFailed):
        check(target, Case(Lk=3))


def test_check_holds_to_the_contract_that_is_given():
    def halved(query, key, value, is_causal=False):
        return right(query, key, value, is_causal).half().to(query.dtype)

    case = Case(Lk=5, requires_grad="")
    with pytest.raises(CheckFailed):
        check(halved, case)
    assert check(halved, case, contract="ieee,out_u=2^-11").status == "pass"


def test_a_refusal_and_what_cannot_be_said_are_told_apart_from_a_pass():
    def refusing(query, key, value, is_causal=False):
        raise Refuse("no")

    assert check(refusing, Case()).status == "refused"
    assert check(right, Case(Lq=2, Lk=3, mask=Causal("bottom_right"))).status == "inexpressible"


def test_check_refuses_a_callable_of_other_parameters():
    with pytest.raises(ValueError, match="must begin with the parameters"):
        check(lambda tokens: tokens, Case())


@settings(max_examples=5, deadline=None, database=None, phases=[Phase.generate])
@given(cases(dtypes=["float32"], max_len=6))
def test_the_documented_test_runs(case):
    assert check(right, case, contract="may_leak").status in ("pass", "inexpressible")


@pytest.mark.slow
def test_an_adapted_target_is_an_item_like_any_other(folder):
    (folder / "adapted.py").write_text(
        "import flashproof, targets\n\n@flashproof.target()\ndef bad(q, k, v, scale):\n"
        "    return targets.wrong(q, k, v, scale=scale)\n"
    )
    done = pytest_run(folder, "--flashproof-target=adapted.py:bad", "--flashproof-examples", "4", CI="1")
    assert done.returncode == 1 and "FAILED flashproof::adapted.py:bad" in done.stdout, done.stdout
    assert "value" in done.stdout and list((folder / "failures").glob("*.json"))
