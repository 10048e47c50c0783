"""Adapted targets as the commands run them: misbehaviour told in one sentence, and a failure as a script."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from flashproof.__main__ import run
from flashproof.fuzz import hunting
from flashproof.fuzz.case import Case
from flashproof.fuzz.child import LOUD, Printed
from flashproof.fuzz.commands import Exit, Options
from flashproof.fuzz.corpus import save
from flashproof.fuzz.execute import Runner
from flashproof.fuzz.found import Policy
from flashproof.fuzz.judge import Judge
from flashproof.fuzz.masks import Document, Padding
from flashproof.fuzz.outcome import record
from flashproof.fuzz.session import opened

ROOT = Path(__file__).parents[1]
ATTEND = """
import sys
import torch, flashproof

def attend(q, k, v, scale, keep=None):
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    s = q.float() @ k.float().mT * scale
    s = s if keep is None else s.masked_fill(~keep, -torch.inf)
    dead = (s == -torch.inf).all(-1, keepdim=True)
    p = torch.softmax(s.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    return (p @ v.float()).to(q.dtype), torch.logsumexp(s, -1)
"""

MISBEHAVING = """
    @flashproof.target(lse="natural")
    def forgets(q, k, v, scale):
        return {"o": attend(q, k, v, scale)[0]}

    @flashproof.target(supports=flashproof.Region(dtypes=("float32",)))
    def overpromises(q, k, v, scale):
        if q.shape[1] != k.shape[1]:
            raise NotImplementedError("grouped heads")
        return attend(q, k, v, scale)[0]

    @flashproof.target
    def writes(q, k, v, scale):
        o = attend(q, k, v, scale)[0]
        k.data.mul_(2)
        return o

    @flashproof.target(supports=flashproof.Region(gqa=False))
    def view(q, k, v, scale):
        if q.shape[1] != k.shape[1]:
            raise flashproof.Refuse("grouped heads")
        return v.expand(v.shape) if k.shape[2] == 1 and q.shape[2] == 1 else attend(q, k, v, scale)[0]

    CALLS = []

    @flashproof.target
    def stateful(q, k, v, scale):
        CALLS.append(1)
        return attend(q, k, v, scale)[0] * (1 + (len(CALLS) > 3))

    KEPT = {}

    @flashproof.target
    def keyed(q, k, v, scale):
        return attend(q, k, v, KEPT.setdefault(q.shape, scale))[0]

    @flashproof.target
    def right(q, k, v, scale):
        return attend(q, k, v, scale)[0]
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "t.py").write_text(ATTEND + textwrap.dedent(MISBEHAVING))
    monkeypatch.chdir(tmp_path)
    return tmp_path


WORDS = ("--examples", "30", "--max-len", "8", "--contract", "may_leak")
QUICK = Policy(more=(1, 2), distinct=1, shrink_seconds=2.0, probes=60, again=1)


def told(here, name, *more):
    """The exit code and the text of a hunt in a process of its own."""
    words = ["fuzz", f"t.py:{name}", *WORDS, *more]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "flashproof", *words], cwd=here, env=env, capture_output=True, text=True, check=False
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("forgets", "lse: the target must return o, lse, got a dict of o"),
        ("overpromises", "grouped heads: refused a case inside the declared region"),
        ("writes", "k: input changed at [0, 0, 0, 0]"),
        ("view", "o: shares the storage of v: writing to one changes the other"),
        ("stateful", "the target keeps state between calls"),
    ],
)
def test_a_misbehaving_adapter_is_told_in_one_sentence_and_its_failure_is_kept(
    here, capsys, monkeypatch, name, sentence
):
    monkeypatch.setattr(hunting, "policy", lambda *_: QUICK)
    assert run(["fuzz", f"t.py:{name}", *WORDS]) == Exit.WRONG
    assert sentence in " ".join(capsys.readouterr().out.split())
    assert list((here / "failures").glob("*.json"))


def test_the_command_says_it_too(here):
    code, text = told(here, "forgets")
    assert code == Exit.WRONG and "FAIL: 1 distinct failure (exit 1)" in text


def test_a_cache_keyed_too_narrowly_shrinks_to_one_call_before_another(here):
    code, text = told(here, "keyed", "--examples", "400")
    assert code == Exit.WRONG
    assert "scale: changes nothing after a call of the same shape without it" in text and "is accepted" not in text
    assert "before float32, B = Hq = Lq = Lk = D = 1; scale" in text
    assert "in a new process only after the case above: the target keeps state between calls" in text


def test_a_declaration_that_is_wrong_is_a_usage_error(here, capsys):
    (here / "w.py").write_text("import flashproof\n@flashproof.target(layout='x')\ndef f(q, k, v): return q\n")
    assert run(["fuzz", "w.py:f", "--in-process"]) == Exit.USAGE
    said = capsys.readouterr().err
    assert "@flashproof.target on f: layout must be" in said and "Traceback" not in said


def test_a_file_with_one_adapted_target_needs_no_name(here, capsys):
    text = (here / "t.py").read_text()
    (here / "one.py").write_text(
        text.partition("@flashproof")[0] + text.rpartition("\n@flashproof.target")[2].join(["@flashproof.target", ""])
    )
    assert run(["inspect", "one.py", "--in-process", "--contract", "may_leak"]) == Exit.RIGHT
    assert "dialect   adapter; keywords scale" in capsys.readouterr().out
    assert run(["inspect", "t.py", "--in-process"]) == Exit.USAGE


def test_what_is_printed_is_counted_and_cut_short(tmp_path):
    with open(tmp_path / "log", "a+b") as file:
        printed = Printed(file.fileno())
        file.write(b"hello " * 1000)
        file.flush()
        assert printed().startswith("hello") and printed.bytes == 6000
        file.write(b"x" * (LOUD + 1))
        file.flush()
        printed.trim()
        assert (tmp_path / "log").stat().st_size == 0
        file.write(b"end")
        file.flush()
        assert printed().startswith("xxx") and printed.bytes == LOUD + 4


def test_a_target_that_prints_without_end_is_right_and_told_of(here, capsys):
    with open(here / "t.py", "a") as f:
        f.write(
            "\n\n@flashproof.target\ndef loud(q, k, v, scale):\n    print('x' * (20 << 20))\n    return attend(q, k, v, scale)[0]\n"
        )
    assert run(["fuzz", "t.py:loud", *WORDS, "--examples", "2"]) == Exit.RIGHT
    assert "printed output (2)" in capsys.readouterr().out


REPRO = """
    def back(do, q, k, v, o, lse, dq, dk, dv, scale):
        with torch.enable_grad():
            x = [t.detach().transpose(1, 2).requires_grad_() for t in (q, k, v)]
            grads = torch.autograd.grad(attend(*x, scale)[0], x, do.transpose(1, 2))
        for held, g in zip((dq, dk, dv), grads):
            held.copy_(WRONG * g.transpose(1, 2))

    @flashproof.target(layout="blhd", lse="log2", lse_shape="blh", bwd=back, out=("o", "lse", "dq", "dk", "dv"))
    def buffers(q, k, v, scale, o, lse):
        a, b = attend(*(x.transpose(1, 2) for x in (q, k, v)), scale)
        o.copy_(a.transpose(1, 2))
        lse.copy_(WRONG * b.transpose(1, 2) / 0.6931471805599453)

    @flashproof.target(layout="packed", factory=lambda D, dtype: torch.tensor(WRONG, dtype=dtype), lse="natural")
    def packed(q, k, v, scale, cu_seqlens_q, cu_seqlens_k, made):
        out = []
        for i in range(len(cu_seqlens_q) - 1):
            rows, keys = slice(*cu_seqlens_q[i : i + 2].tolist()), slice(*cu_seqlens_k[i : i + 2].tolist())
            out.append(attend(*(x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])), scale))
        return made * torch.cat([o[0].transpose(0, 1) for o, _ in out]), torch.cat([x[0] for _, x in out], 1)
"""


TWICE = """
import os, sys, torch
path, script, *texts = sys.argv[1:]
for text in texts:  # a process that imports torch once and forks
    with open(path, "w") as file:
        file.write(text)
    if not (pid := os.fork()):
        exec(script, {"__name__": "__main__"})
        sys.exit(0)
    print("exit code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("buffers", Case(B=2, Hq=2, Lq=3, Lk=4, D=2, Dv=2, Hkv=2)),
        ("packed", Case(B=2, Hq=2, Hkv=1, Lq=3, Lk=4, D=2, Dv=2)),
        ("packed", Case(B=2, Hq=2, Hkv=1, Lq=3, Lk=4, D=2, Dv=2, mask=Padding((2, 1)))),
        ("packed", Case(Hq=2, Hkv=1, Lq=3, Lk=4, D=2, Dv=2, mask=Document((2, 1)), lse_grad=True)),
    ],
)
def test_a_script_calls_the_function_under_the_decorator_without_flashproof(here, name, case, capsys):
    text = ATTEND + textwrap.dedent(REPRO)
    (here / "r.py").write_text(text.replace("WRONG", "1.01"))
    verdict = Judge(Runner("r.py:" + name)).check(case, thorough=True)
    with opened("r.py:" + name, Options(in_process=True)) as session:
        path = save(record(session, case, verdict.failures), here)
    assert run(["repro", str(path)]) == Exit.RIGHT
    script = capsys.readouterr().out
    assert script.count("\n") < 90
    words = [str(here / "r.py"), script, text.replace("WRONG", "1.01"), text.replace("WRONG", "1.0")]
    done = subprocess.run(
        [sys.executable, "-c", TWICE, *words],
        cwd="/",
        env={"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    wrong, _, right = done.stdout.partition("exit code 1\n")
    assert "WRONG" in wrong and right.endswith("exit code 0\n"), done.stdout + done.stderr


def test_a_failure_of_a_file_given_alone_has_a_script_too(here, capsys):
    (here / "alone.py").write_text(
        ATTEND + "\n@flashproof.target\ndef wrong(q, k, v, scale): return attend(q, k, v, scale)[0] + 1\n"
    )
    with opened("alone.py", Options(in_process=True)) as session:
        verdict = session.judge.check(Case(requires_grad=""), thorough=True)
        path = save(record(session, verdict.case, verdict.failures), here)
    old = here / "old.json"  # as a version wrote it that did not keep the name
    old.write_text(path.read_text().replace('"attr": "wrong"', '"attr": ""'))
    for saved in (path, old):
        assert run(["repro", str(saved)]) == Exit.RIGHT
        assert "target = module.wrong" in capsys.readouterr().out
    assert old.read_text() != path.read_text()


def test_a_backward_function_that_leaves_one_out_is_told_which(here):
    (here / "two.py").write_text(
        ATTEND
        + "\n@flashproof.target(bwd=lambda do, q, k, v: (q, k))\ndef two(q, k, v, scale): return attend(q, k, v, scale)[0]\n"
    )
    (found,) = Judge(Runner("two.py")).check(Case(Hkv=1, requires_grad="v")).failures
    assert found.key == "type:dv" and found.message.endswith("dv is missing")
