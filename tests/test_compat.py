import subprocess
import sys

import pytest

from flashproof.compat import IncompatibleVersions, check, installed, problem


@pytest.mark.parametrize(
    "versions",
    [
        {},
        {"torch": "2.13.0+cpu", "triton": "3.7.1", "numpy": "2.4.6"},
        {"torch": "2.11.0", "triton": "3.6.0", "numpy": "2.3.5"},
        {"torch": "2.14.1", "triton": "3.9.0+git123", "numpy": "2.4.0rc1"},
        {"torch": "2.13.0", "numpy": "2.4.6"},
    ],
)
def test_versions_that_work_together_are_accepted(versions):
    assert problem(versions) is None


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({"triton": "3.6.0", "numpy": "2.4.0"}, ["numpy 2.4.0 with triton 3.6.0", "'numpy<2.4'", "'triton>=3.7'"]),
        ({"triton": "3.6.0", "numpy": "2.4.0rc1"}, ["numpy 2.4.0rc1 with triton 3.6.0"]),
        ({"triton": "3.5.1", "numpy": "2.3.5"}, ["triton 3.5.1", "'triton>=3.6'"]),
        ({"torch": "2.9.1"}, ["torch 2.9.1", "'torch>=2.11'"]),
    ],
)
def test_versions_that_cannot_work_are_refused_with_the_remedy(versions, words):
    sentence = problem(versions)
    assert sentence is not None
    assert [w for w in words if w not in sentence] == []
    assert "\n" not in sentence


def test_what_breaks_only_the_interpreter_is_accepted_where_kernels_can_be_compiled():
    broken = {"triton": "3.6.0", "numpy": "2.4.0"}
    assert problem(broken, gpu=True) is None
    assert problem(broken | {"torch": "2.9.1"}, gpu=True) is not None


def test_check_raises_what_problem_says(monkeypatch):
    monkeypatch.setattr("flashproof.compat.installed", lambda *_: {"triton": "3.6.0", "numpy": "2.4.0"})
    with pytest.raises(IncompatibleVersions, match="Remedy"):
        check(gpu=False)


def test_a_distribution_that_is_not_installed_is_absent():
    assert set(installed("numpy", "no-such-distribution-as-this")) == {"numpy"}


def test_importing_flashproof_refuses_such_versions_and_loads_neither_torch_nor_triton():
    script = (
        "import sys; from importlib import metadata; real = metadata.version\n"
        "from pathlib import Path; there = Path.exists\n"
        "Path.exists = lambda p: not str(p).startswith('/dev') and there(p)\n"
        "import flashproof; print('torch' in sys.modules, 'triton' in sys.modules)\n"
        "[sys.modules.pop(n) for n in list(sys.modules) if n.startswith('flashproof')]\n"
        "metadata.version = lambda name: {'numpy': '2.4.0', 'triton': '3.6.0'}.get(name) or real(name)\n"
        "import flashproof"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["False", "False"]
    assert "IncompatibleVersions: flashproof cannot work on numpy 2.4.0 with triton 3.6.0" in result.stderr
