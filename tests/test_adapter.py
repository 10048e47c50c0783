"""`flashproof.target`: what may be declared, what is handed over, and what an adapted target that misbehaves is told."""

import os
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest
import torch

import flashproof
from flashproof.__main__ import run
from flashproof.fuzz import hunting
from flashproof.fuzz.case import Case
from flashproof.fuzz.child import LOUD, Printed
from flashproof.fuzz.commands import Exit, Options
from flashproof.fuzz.corpus import save
from flashproof.fuzz.dialects import Inexpressible, keywords
from flashproof.fuzz.engine import hunt
from flashproof.fuzz.execute import Runner
from flashproof.fuzz.found import Policy
from flashproof.fuzz.judge import Judge
from flashproof.fuzz.masks import Causal, Document, Padding, Random, Window
from flashproof.fuzz.outcome import record
from flashproof.fuzz.sequences import documents, pack, unpack
from flashproof.fuzz.session import opened
from flashproof.fuzz.tensors import build

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
exec(ATTEND)  # the definition that targets in files have too
attend = globals()["attend"]


def status(target, case, thorough=False):
    """The status of one verdict and the keys of what fails."""
    verdict = Judge(Runner(target, contract=target.contract or "may_leak")).check(case, thorough)
    return verdict.status, set(verdict.keys)


SMALL = Case(B=2, Hq=2, Hkv=1, Lq=3, Lk=5, D=4, Dv=4)


@pytest.mark.parametrize(
    ("declared", "fn", "said"),
    [
        ({"layout": "bhl"}, lambda q, k, v: q, "layout must be the letters b, h, l, d"),
        ({}, lambda q, k, value: q, "the parameter value has no meaning"),
        ({}, lambda q, k: q, "must take q, k and v by these names"),
        ({}, lambda *a: a, "takes=('q', 'k', 'v', ...)"),
        ({}, lambda q, k, v, causal: q, "align must say where the diagonal lies"),
        ({"align": "left"}, lambda q, k, v, causal: q, "align must be one of top_left, bottom_right"),
        ({"lse": "base 2"}, lambda q, k, v: q, "lse must be one of natural, log2"),
        ({"lse": "log2", "lse_shape": "bl"}, lambda q, k, v: q, "lse_shape must be one of bhl"),
        ({"returns": ("lse",)}, lambda q, k, v: q, "returns must name o"),
        ({"returns": "o"}, lambda q, k, v: q, "did you mean ('o',)?"),
        ({"bwd": lambda q, k, v: q}, lambda q, k, v: q, "bwd must take do"),
        ({"out": ("o",)}, lambda q, k, v, o: q, "autograd cannot follow"),
        ({"out": ("o",), "forward_only": True}, lambda q, k, v: q, "out hands o to the parameter o"),
        ({"factory": lambda heads: 0}, lambda q, k, v, made: q, "may take B, Hq"),
        ({"factory": {"m": dict}}, lambda q, k, v: q, "is passed as m, but it takes"),
        ({"layout": "packed"}, lambda q, k, v: q, "needs a parameter cu_seqlens_q"),
        ({}, lambda q, k, v, cu_seqlens: q, "needs layout='packed'"),
        ({"supports": {"softcap": True}}, lambda q, k, v: q, "declares softcap, but it takes no parameter softcap"),
        ({"supports": {"dtype": "float32"}}, lambda q, k, v: q, "supports must hold names of dtypes"),
        ({"supports": {"dtypes": ("fp16",)}}, lambda q, k, v: q, "got 'fp16'"),
        ({"contract": "fast"}, lambda q, k, v: q, "contract must name a preset"),
        ({"dead_rows": "zeros"}, lambda q, k, v: q, "must be one of zero, nan"),
        ({"deterministic": ("dx",)}, lambda q, k, v: q, "got 'dx'"),
        ({"refuses": (Exception,)}, lambda q, k, v: q, "mean a refusal and nothing else"),
        ({"refuses": (torch.OutOfMemoryError,)}, lambda q, k, v: q, "mean a refusal and nothing else"),
        ({"devices": ("tpu",)}, lambda q, k, v: q, "devices must hold names of cpu, cuda"),
    ],
)
def test_a_declaration_that_cannot_be_right_is_told_in_one_sentence(declared, fn, said):
    with pytest.raises(ValueError, match=r"^@flashproof.target on ") as e:
        flashproof.target(**declared)(fn)
    assert said in str(e.value) and "\n" not in str(e.value)


def test_a_decorated_function_is_still_callable():
    assert flashproof.target(lambda q, k, v: q + k + v)(1, k=2, v=3) == 6


@pytest.mark.parametrize("layout", ["bhld", "blhd", "lbhd", "hbld"])
@pytest.mark.parametrize("shape", ["bhl", "blh", "hlb"])
@pytest.mark.parametrize("base", ["natural", "log2"])
def test_every_layout_and_form_of_lse_is_read_back(layout, shape, base):
    def fn(q, k, v, scale):
        q, k, v = (x.permute([layout.index(a) for a in "bhld"]) for x in (q, k, v))
        o, lse = attend(q, k, v, scale)
        lse = lse / 0.6931471805599453 if base == "log2" else lse
        return o.permute(["bhld".index(a) for a in layout]), lse.permute(["bhl".index(a) for a in shape])

    target = flashproof.target(fn, layout=layout, lse=base, lse_shape=shape)
    assert status(target, SMALL.but(lse_grad=True)) == ("pass", set())
    wrong = flashproof.target(fn, layout=layout, lse="log2" if base == "natural" else "natural", lse_shape=shape)
    assert status(wrong, SMALL.but(requires_grad=""))[1] == {"value:lse"}


def seen(case, **declared):
    """What a function that takes everything is given."""

    def fn(q, k, v, scale, causal, window, mask, bias, softcap, dropout, dropout_seed):
        """Takes all."""

    return keywords(Runner(flashproof.target(fn, align="bottom_right", **declared)).binding, build(case))


def test_masks_are_said_by_flags_where_they_say_all_of_it():
    assert seen(SMALL.but(mask=Causal("bottom_right")))["causal"] is True
    assert seen(SMALL.but(mask=Window(2, 0, "bottom_right")))["window"] == (2, 0)
    dense = seen(SMALL.but(mask=Causal("top_left")))
    assert dense["causal"] is False and dense["mask"].dtype == torch.bool
    assert torch.equal(dense["mask"].squeeze(), torch.ones(3, 5, dtype=torch.bool).tril())
    both = seen(SMALL.but(mask=Causal("bottom_right"), bias="normal"))
    assert both["causal"] is True and both["bias"] is not None


def test_values_are_the_numbers_of_the_case():
    given = seen(SMALL.but(scale=None, softcap=2.0, seed=7))
    assert (given["scale"], given["softcap"], given["dropout"], given["dropout_seed"]) == (0.5, 2.0, 0.0, 7)


@pytest.mark.parametrize(
    "changes",
    [{"scale": 2.0}, {"softcap": 1.0}, {"dropout": 0.5}, {"bias": "normal"}, {"mask": Random(50)}, {"lse_grad": True}],
)
def test_what_a_function_does_not_take_is_inexpressible(changes):
    target = flashproof.target(lambda q, k, v: q)
    with pytest.raises(Inexpressible):
        keywords(Runner(target).binding, build(SMALL.but(**changes)))


def lengths_of(case):
    def fn(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_k, causal):
        """Takes lengths."""

    runner = Runner(flashproof.target(fn, layout="packed", align="bottom_right"))
    given = keywords(runner.binding, build(case))
    return (
        given["cu_seqlens_q"].tolist(),
        given["cu_seqlens_k"].tolist(),
        given["max_seqlen_k"],
        tuple(given["k"].shape),
    )


def test_sequences_are_the_batch_its_padding_or_its_documents():
    assert lengths_of(SMALL) == ([0, 3, 6], [0, 5, 10], 5, (10, 1, 4))
    assert lengths_of(SMALL.but(mask=Padding((2, 0)))) == ([0, 3, 6], [0, 2, 2], 2, (2, 1, 4))
    assert lengths_of(SMALL.but(B=1, mask=Document((2, 2)))) == ([0, 2, 3, 3], [0, 2, 4, 5], 2, (5, 1, 4))
    with pytest.raises(Inexpressible):
        lengths_of(SMALL.but(mask=Random(50)))


def test_packing_is_undone():
    x = torch.arange(24.0).reshape(2, 3, 4, 1)
    assert torch.equal(unpack(pack(x), 2, 4), x)
    rows = torch.tensor([0, 1, 4])
    assert torch.equal(unpack(pack(x, rows), 2, 4, rows)[:, 0, :, 0], torch.tensor([[0.0, 1, 0, 0], [12, 0, 0, 0]]))
    assert documents((2, 9), 5) == (2, 3, 0)


def gradients(do, q, k, v, o, lse, dlse, scale):
    with torch.enable_grad():
        x = [t.detach().requires_grad_() for t in (q, k, v)]
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        return torch.autograd.grad(attend(*x, scale), x, (do, dlse))


def test_a_separate_backward_is_judged_through_o_and_lse():
    right = flashproof.target(lambda q, k, v, scale: attend(q, k, v, scale), lse="natural", bwd=gradients)
    assert status(right, SMALL.but(lse_grad=True)) == ("pass", set())

    def wrong(do, q, k, v, o, lse, scale):
        dq, dk, dv = gradients(do, q, k, v, o, lse, None, scale)
        return {"dq": dq, "dk": 1.1 * dk, "dv": dv}

    target = flashproof.target(lambda q, k, v, scale: attend(q, k, v, scale), lse="natural", bwd=wrong)
    assert status(target, SMALL)[1] == {"value:dk"}


def test_what_the_forward_function_saves_reaches_the_backward_function():
    def fn(q, k, v, scale):
        o, lse = attend(q, k, v, scale)
        return {"o": o, "lse": lse, "saved": 2.0}

    def bwd(do, q, k, v, o, lse, scale, saved):
        return [saved / 2 * g for g in gradients(do, q, k, v, o, lse, None, scale)]

    assert status(flashproof.target(fn, lse="natural", bwd=bwd), SMALL) == ("pass", set())
    assert status(flashproof.target(fn, lse="natural"), SMALL)[1] == {"type:saved"}


@pytest.mark.parametrize(
    ("write", "found"),
    [
        (lambda o, x: o.copy_(x), set()),
        (lambda o, x: o[..., :-1].copy_(x[..., :-1]), {"buffer:o", "value:o"}),
        (lambda o, x: o.add_(x), {"buffer:o", "value:o"}),
        (lambda o, x: o.copy_(torch.where(o.isnan(), x, o)), {"buffer:o", "value:o"}),
    ],
)
def test_what_a_buffer_held_must_not_show(write, found):
    def fn(q, k, v, scale, out):
        write(out, attend(q, k, v, scale)[0])

    target = flashproof.target(fn, out={"o": "out"}, forward_only=True, contract="may_leak")
    assert status(target, SMALL)[1] == found


def test_a_factory_is_asked_once_for_the_same_sizes_and_leaves_the_generator_alone():
    asked = []

    def make(D, dtype):
        asked.append((D, dtype))
        return torch.rand(1)

    target = flashproof.target(lambda q, k, v, scale, made: attend(q, k, v, scale)[0], factory=make)
    judge = Judge(Runner(target, contract="may_leak"))
    for case in (SMALL, SMALL.but(Lq=4), SMALL.but(D=8)):
        assert not judge.check(case).failures
    assert asked == [(4, torch.float32), (8, torch.float32)]


def test_a_declared_exception_is_a_refusal_but_running_out_of_memory_is_none():
    class Unserved(RuntimeError):
        """Of a library."""

    def fn(q, k, v, scale):
        raise Unserved if q.shape[2] == 3 else torch.OutOfMemoryError("no memory")

    target = flashproof.target(fn, refuses=(RuntimeError,))
    assert status(target, SMALL) == ("refused", set())
    assert status(target, SMALL.but(Lq=4)) == ("fail", {"exception:OutOfMemoryError"})


def test_check_takes_a_decorated_function():
    right = flashproof.target(lambda q, k, v, scale: attend(q, k, v, scale)[0])
    assert flashproof.check(right, SMALL).status == "pass"
    wrong = flashproof.target(lambda q, k, v, scale: 2 * attend(q, k, v, scale)[0])
    with pytest.raises(flashproof.CheckFailed, match="o: error .* exceeds limit"):
        flashproof.check(wrong, SMALL)


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


def told(here, name):
    """The exit code and the text of a hunt in a process of its own."""
    words = ["fuzz", f"t.py:{name}", *WORDS]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "flashproof", *words], cwd=here, env=env, capture_output=True, text=True
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("forgets", "lse: the target must return o, lse, got a dict of o"),
        ("overpromises", "call: refused a case inside the declared region: NotImplementedError: grouped heads"),
        ("writes", "k: input changed at [0, 0, 0, 0]"),
        ("view", "o: shares the storage of v: writing to one changes the other"),
        ("stateful", "the target keeps state between calls"),
    ],
)
def test_a_misbehaving_adapter_is_told_in_one_sentence_and_its_failure_is_kept(
    here, capsys, monkeypatch, name, sentence
):
    monkeypatch.setattr(hunting, "hunt", partial(hunt, policy=QUICK))
    assert run(["fuzz", f"t.py:{name}", *WORDS]) == Exit.WRONG
    assert sentence in " ".join(capsys.readouterr().out.split())
    assert list((here / "failures").glob("*.json"))


def test_the_command_says_it_too(here):
    code, text = told(here, "forgets")
    assert code == Exit.WRONG and "FAIL: 1 distinct failure (exit 1)" in text


def test_a_declaration_that_is_wrong_is_a_usage_error(here, capsys):
    (here / "w.py").write_text("import flashproof\n@flashproof.target(layout='x')\ndef f(q, k, v): return q\n")
    assert run(["fuzz", "w.py:f", "--in-process"]) == Exit.USAGE
    assert "@flashproof.target on f: layout must be" in capsys.readouterr().err


def test_a_file_with_one_adapted_target_needs_no_name(here, capsys):
    text = (here / "t.py").read_text()
    (here / "one.py").write_text(
        text.partition("@flashproof")[0] + text.rpartition("\n@flashproof.target")[2].join(["@flashproof.target", ""])
    )
    assert run(["inspect", "one.py", "--in-process", "--contract", "may_leak"]) == Exit.RIGHT
    assert "dialect   adapter; keywords scale" in capsys.readouterr().out
    assert run(["inspect", "t.py", "--in-process"]) == Exit.USAGE


def test_a_wrong_answer_outside_the_declared_region_says_so():
    fn = flashproof.target(lambda q, k, v, scale: 2 * attend(q, k, v, scale)[0], supports={"gqa": False})
    verdict = Judge(Runner(fn)).check(SMALL)
    assert [str(f) for f in verdict.findings if f.severity == "warning" and f.oracle == "refusal"] == [
        "case: lies outside the declared region (grouped heads): a target must refuse such a case or answer it rightly"
    ]


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
    for factor, code in (("1.01", 1), ("1.0", 0)):
        (here / "r.py").write_text(text.replace("WRONG", factor))
        done = subprocess.run([sys.executable, "-c", script], cwd="/", env={}, capture_output=True, text=True)
        assert done.returncode == code and (code == 0 or "WRONG" in done.stdout), done.stdout + done.stderr
