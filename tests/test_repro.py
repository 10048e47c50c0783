"""A repro script runs without flashproof, shows the failure, exits 1 while the target is wrong and 0 once it is right."""

import ast
import os
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
import torch

from flashproof.fuzz.case import Case
from flashproof.fuzz.corpus import CorpusError, Record
from flashproof.fuzz.definition import answers, attention
from flashproof.fuzz.dialects import call, keywords, recognise
from flashproof.fuzz.masks import (
    Causal,
    Padding,
    Random,
)
from flashproof.fuzz.repro import script
from flashproof.fuzz.tensors import build
from flashproof.oracles.contract import contract_for
from flashproof.oracles.exact import Problem, Reference
from flashproof.oracles.finding import Finding
from flashproof.oracles.value import judge_values

TARGETS = """
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    def right(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        return sdpa(query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)

    def wrong(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        return 1.01 * right(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)

    def lse_wrong(query, key, value, attn_mask=None, is_causal=False, scale=None, return_lse=False):
        s = (query @ key.mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
        s = s if attn_mask is None else s + attn_mask if attn_mask.dtype != torch.bool else s.masked_fill(~attn_mask, -torch.inf)
        return right(query, key, value, attn_mask, 0.0, is_causal, scale), s.logsumexp(-1).float() + 0.125

    def heads_inside(q, k, v, softmax_scale=None, causal=False):
        return 1.01 * sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale=softmax_scale, is_causal=causal).transpose(1, 2)

    calls = 0

    def third_call_wrong(query, key, value, is_causal=False, scale=None):
        global calls
        calls += 1
        return sdpa(query, key, value, is_causal=is_causal, scale=scale) * (1.5 if calls == 3 else 1)

    kept = {}

    def by_address(query, key, value, is_causal=False, scale=None):
        key = kept.setdefault(key.data_ptr(), key.detach().clone()) + 0 * key
        return sdpa(query, key, value, is_causal=is_causal, scale=scale)

    def raising(query, key, value, attn_mask=None):
        raise RuntimeError("no kernel image")

    def dying(query, key, value, attn_mask=None):
        import os, signal
        os.kill(os.getpid(), signal.SIGSEGV)

    def drifting(query, key, value, attn_mask=None):
        global calls
        calls += 1
        return sdpa(query, key, value, attn_mask) + calls * 1e-3
"""
BLOCK = """
    import sys
    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "flashproof":
                raise ModuleNotFoundError(f"{name} is blocked in this process")
    sys.meta_path.insert(0, Blocked())
"""


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    """Scripts run here change the module path and the environment: not for the next test."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(os, "environ", os.environ.copy())
    yield
    sys.modules.pop("target_file", None)


@pytest.fixture
def place(tmp_path):
    """A folder with the targets, and a sitecustomize that forbids flashproof."""
    (tmp_path / "targets.py").write_text(textwrap.dedent(TARGETS))
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(BLOCK))
    return tmp_path


def load(place, attr):
    space = {}
    exec((place / "targets.py").read_text(), space)  # noqa: S102 (the targets above)
    return space[attr]


def found(fn, case, binding):
    """Findings of the value oracle on a callable."""
    inputs = build(case)
    return judge_values(inputs, call(binding, fn, inputs), contract_for("", case.dtype, "cpu"), generic=False).findings


def written(place, attr, case, findings=None, **changes):
    """The script of a failure of a target."""
    fn = load(place, attr)
    binding = recognise(fn, "sdpa" if attr in ("right", "wrong") else "")
    said = found(fn, case, binding) if findings is None else findings
    record = Record(
        f"{place}/targets.py:{attr}", case, binding.dialect, "cpu", "ieee", findings=tuple(said), found="2026-01-02"
    )
    return script(replace(record, **changes), binding)


def run(place, text):
    """Run a script in a process where flashproof cannot be imported."""
    path = place / "repro.py"
    path.write_text(text)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(place)}
    return subprocess.run(
        [sys.executable, str(path)], env=env, cwd=place, capture_output=True, text=True, timeout=100, check=False
    )


def ran(text):
    """Exit code of a script run here."""
    assert "flashproof" not in text and "numpy" not in text
    try:
        exec(compile(text, "repro.py", "exec"), {"__name__": "__main__"})  # noqa: S102 (the script under test)
    except SystemExit as e:
        return e.code
    return 0


HARD = Case(
    Hq=2, Lq=3, Lk=66, D=2, Dv=3, mask=Causal("bottom_right") & Random(60), mask_form="bool", layout_mask="strided",
    layout_q="blhd", layout_k="strided", layout_v="expand", layout_do="transposed", scale=-0.5,
)  # fmt: skip


@pytest.mark.parametrize(
    ("attr", "case"),
    [
        ("wrong", Case(Lk=9)),
        ("wrong", HARD),
        (
            "wrong",
            Case(
                Lq=70,
                Lk=70,
                D=8,
                Dv=8,
                dtype="bfloat16",
                mask=Causal(),
                bias="normal",
                mask_form="additive",
                requires_grad="qkvb",
            ),
        ),
        ("lse_wrong", Case(Lk=5, D=3, lse_grad=True)),
        ("heads_inside", Case(B=2, Hq=2, Hkv=2, Lq=4, Lk=4, D=2, Dv=2, mask=Causal())),
    ],
)
def test_a_script_shows_the_failure_in_under_90_lines(place, attr, case, capsys):
    text = written(place, attr, case)
    assert ran(text) == 1 and text.count("\n") < 90
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("WRONG", "got ", "want ", "limit "))


@pytest.mark.parametrize(
    "case", [HARD, HARD.but(mask=Random(50, 40)), Case(Lk=9, dtype="bfloat16")], ids=["hard", "dead rows", "plain"]
)
def test_a_script_exits_0_once_the_target_is_fixed(place, case, capsys):
    text = written(place, "wrong", case)
    assert ran(text.replace("module.wrong", "module.right")) == 0
    assert "WRONG" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_script_runs_where_flashproof_cannot_be_imported(place):
    done = run(place, written(place, "wrong", HARD))
    assert done.returncode == 1 and "WRONG" in done.stdout and not done.stderr


def test_a_failure_that_needs_earlier_calls_makes_them(place):
    case = Case(Lk=3)
    finding = found(load(place, "wrong"), case, recognise(load(place, "wrong")))
    text = written(place, "third_call_wrong", case, finding, preceding=(Case(Lk=5), Case(Lk=6)))
    assert text.count("call(") == 4, "the definition and three calls"
    assert ran(text) == 1
    assert ran(written(place, "third_call_wrong", case, finding)) == 0


def test_a_call_sequence_is_made_in_full(place):
    case = Case(Lk=3, sequence="scale")
    finding = found(load(place, "wrong"), case.but(sequence=""), recognise(load(place, "wrong")))
    text = written(place, "third_call_wrong", case, finding)
    assert "scale=0.5" in text and ran(text) == 1


def test_other_values_are_written_to_the_same_memory_first(place):
    case = Case(Lk=3, sequence="refill")
    finding = found(load(place, "wrong"), case.but(sequence=""), recognise(load(place, "wrong")))
    text = written(place, "by_address", case, finding)
    assert "other values at the same address" in text and ran(text) == 1
    assert ran(text.replace("module.by_address", "module.right")) == 0


def test_an_exception_of_the_target_ends_the_script(place):
    text = written(place, "raising", Case(), [Finding("exception", "RuntimeError", "RuntimeError: no kernel image")])
    with pytest.raises(RuntimeError, match="no kernel image"):
        ran(text)


@pytest.mark.slow
def test_a_crash_of_the_target_ends_the_script(place):
    assert (
        run(
            place, written(place, "dying", Case(), [Finding("crash", "SIGSEGV", "the process died: SIGSEGV")])
        ).returncode
        < 0
    )


def test_a_call_that_differs_from_the_one_before_is_shown(place, capsys):
    text = written(place, "drifting", Case(), [Finding("repeat", "o", "differs", (0, 0, 0, 0), 1e-3, 0.0, 1.0, 1.001)])
    assert ran(text) == 1 and "differs from call to call: o" in capsys.readouterr().out
    assert ran(text.replace("module.drifting", "module.right")) == 0


def test_a_hang_ends_after_a_while():
    record = Record("a:b", Case(), findings=(Finding("hang", "call", "no answer within 60 s"),))
    assert "faulthandler.dump_traceback_later(60, exit=True)" in script(
        record, recognise(lambda query, key, value, attn_mask=None: None)
    )


def test_what_needs_instruments_is_told_with_the_command_that_has_them():
    record = Record(
        "a:b", Case(), findings=(Finding("memory", "k_ptr", "reads past the end"),), environment={"interpreted": True}
    )
    text = script(record, recognise(lambda query, key, value, attn_mask=None: None))
    assert f"flashproof replay {record.name}" in text
    assert text.index("TRITON_INTERPRET") < text.index("import torch"), "set before triton can be imported"


def test_a_target_in_a_package_is_imported_by_its_name():
    record = Record("mine.kernels:Flash.apply", Case())
    text = script(record, recognise(lambda query, key, value, attn_mask=None: None))
    assert "from mine.kernels import Flash" in text and "target = Flash.apply" in text


@pytest.mark.parametrize("target", ["x.py:a b", "x.py:a;import os", "x.py"])
def test_a_target_that_is_no_name_is_refused(target):
    with pytest.raises(CorpusError, match=r"path/to/file\.py:attr"):
        script(Record(target, Case()), recognise(lambda query, key, value, attn_mask=None: None))


def test_text_in_a_record_cannot_become_code():
    evil = '"""\nraise SystemExit(7)\n"""\\'
    record = Record(
        "x.py:a",
        Case(),
        contract=evil,
        found=evil,
        findings=(Finding("value", "o", evil),),
        environment={"torch": evil},
    )
    tree = ast.parse(script(record, recognise(lambda query, key, value, attn_mask=None: None)))
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.Raise)]


PLAIN = (
    Case(Hq=4, Hkv=2, Lq=5, Lk=7, D=3, Dv=2, softcap=2.0, lse_grad=True),
    Case(Lq=4, Lk=6, mask=Random(50, 50), bias="normal", mask_form="additive", requires_grad="qkvb"),
    Case(Lq=4, Lk=6, mask=Causal(), mask_form="additive", mask_fill="min", data="large"),
    Case(Lq=3, Lk=0),
)


@pytest.mark.parametrize("case", PLAIN, ids=lambda c: c.key[:60])
def test_the_script_s_definition_is_the_oracle_s(case):
    inputs = build(case)
    got, want = answers(inputs, {"dq"}), Reference(Problem.of(inputs)).outputs()
    for name in got.keys() & want.keys():
        assert torch.allclose(got[name], want[name], rtol=1e-11, atol=1e-13, equal_nan=True), name


def test_an_answer_that_the_definition_cannot_give_is_written_as_a_number(place):
    case = Case(Lq=2, Lk=3, D=2, Dv=2, mask=Causal(), data="nonfinite_masked", seed=0)
    finding = Finding(
        "value",
        "o",
        "wrong",
        (0, 0, 0, 0),
        1.0,
        0.5,
        2.0,
        1.25,
        details={"worst": [{"index": [0, 0, 0, 0], "limit": 0.5, "want": 1.25}]},
    )
    assert "0.5, 1.25)" in written(place, "wrong", case, [finding])


def test_keywords_without_default_are_passed(place):
    def insisting(q, k, v, causal, softmax_scale):
        return None

    binding = recognise(insisting)
    case = Case(Lk=3)
    text = script(Record("a.py:b", case), binding)
    assert all(f"{n}={v!r}" in text for n, v in keywords(binding, build(case)).items()) and "causal=False" in text


def test_attention_gives_zeros_where_no_key_is_allowed():
    x = torch.ones(1, 1, 2, 2)
    dead = build(Case(Lq=2, Lk=2, D=2, Dv=2, mask=Padding((0,))))
    o, lse = attention(x, x, x, dead, None, None)
    assert not o.any() and bool((lse == -torch.inf).all())
