"""`flashproof.target`: what may be declared, what is handed over, and what an adapted target that misbehaves is told."""

import pytest
import torch

import flashproof
from flashproof.fuzz.case import Case
from flashproof.fuzz.dialects import Inexpressible, keywords
from flashproof.fuzz.execute import Runner
from flashproof.fuzz.judge import Judge
from flashproof.fuzz.masks import Causal, Document, Padding, Random, Window
from flashproof.fuzz.sequences import documents, pack, unpack
from flashproof.fuzz.tensors import build


def attend(q, k, v, scale):
    """(o, lse) by definition."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    s = q.float() @ k.float().mT * scale
    return (torch.softmax(s, -1) @ v.float()).to(q.dtype), torch.logsumexp(s, -1)


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
    right = flashproof.target(attend, lse="natural", bwd=gradients)
    assert status(right, SMALL.but(lse_grad=True)) == ("pass", set())

    def wrong(do, q, k, v, o, lse, scale):
        dq, dk, dv = gradients(do, q, k, v, o, lse, None, scale)
        return {"dq": dq, "dk": 1.1 * dk, "dv": dv}

    target = flashproof.target(attend, lse="natural", bwd=wrong)
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
    with pytest.raises(flashproof.CheckFailed, match=r"o: error .* exceeds limit"):
        flashproof.check(wrong, SMALL)


def test_a_wrong_answer_outside_the_declared_region_says_so():
    fn = flashproof.target(lambda q, k, v, scale: 2 * attend(q, k, v, scale)[0], supports={"gqa": False})
    verdict = Judge(Runner(fn)).check(SMALL)
    assert [str(f) for f in verdict.findings if f.severity == "warning" and f.oracle == "refusal"] == [
        "case: lies outside the declared region (grouped heads): a target must refuse such a case or answer it rightly"
    ]
