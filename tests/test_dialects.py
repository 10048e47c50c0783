"""Which dialect a signature is, what each keyword says, and what comes back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashproof.fuzz.case import Case
from flashproof.fuzz.dialects import Binding, Inexpressible, answer, call, expressible, keywords, recognise
from flashproof.fuzz.masks import Causal, Padding, Window
from flashproof.fuzz.tensors import build
from flashproof.impls.loading import load

TARGETS = Path(__file__).parent / "targets"
RIGHT = {name: load(f"{TARGETS}/right.py:{name}").call for name in ("sdpa", "flash", "native")}
FAULTY = str(TARGETS / "faulty.py")
SDPA, FLASH, NATIVE = (recognise(RIGHT[name]) for name in ("sdpa", "flash", "native"))
SMALL = Case(B=2, Hq=4, Hkv=2, Lq=3, Lk=5, D=4, Dv=2)
SQUARE = SMALL.but(Lq=5)


def said(binding: Binding, case: Case) -> dict[str, Any]:
    return {n: ("dense" if isinstance(x, Tensor) else x) for n, x in keywords(binding, build(case)).items()}


@pytest.mark.parametrize(
    ("fn", "dialect"),
    [
        (lambda q, k, v, is_causal=False: 0, "sdpa"),
        (lambda query, key, value, attn_mask=None: 0, "sdpa"),
        (lambda Q, K, V, enable_gqa=False: 0, "sdpa"),
        (lambda q, k, v, dropout_p=0.0, scale=None: 0, "sdpa"),
        (lambda q, k, v, mask=None, is_causal=False: 0, "sdpa"),
        (lambda q, k, v, causal=False: 0, "flash_attn"),
        (lambda q, k, v, softmax_scale=None, deterministic=False: 0, "flash_attn"),
        (lambda q, k, v, window_size=(-1, -1): 0, "flash_attn"),
        (lambda q, k, v, *, mask=None: 0, "native"),
        (lambda q, k, v, bias=None: 0, "native"),
        (lambda q, k, v, return_lse=False: 0, "native"),
    ],
)
def test_parameter_names_decide_the_dialect(fn: Any, dialect: str) -> None:
    assert recognise(fn).dialect == dialect


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda q, k, v: 0, "several dialects: sdpa .*; flash_attn .*--dialect"),
        (lambda q, k, v, scale=None: 0, "several dialects"),
        (lambda q, k, v, mask=None: 0, "sdpa .*tensor masks; native .*Mask objects"),
        (lambda q, k, v, is_causal=False, causal=False: 0, "sdpa .*; flash_attn"),
        (lambda x, y, z: 0, r"must begin with the parameters q or query, .* got \(x, y, z\)"),
        (lambda *args, **kwargs: 0, "does not tell its parameters; state one of --dialect sdpa"),
        (torch.nn.functional.scaled_dot_product_attention, "does not tell its parameters"),
        (lambda q, k, v, workspace, is_causal=False: 0, "workspace has no default"),
    ],
)
def test_a_signature_that_does_not_decide_names_the_candidates(fn: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        recognise(fn)


def test_unknown_dialect_lists_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match="one of sdpa, flash_attn, flash_attn_varlen, flex, native, adapter, got dialect='x'"
    ):
        recognise(lambda q, k, v: 0, "x")


def test_forced_dialect_binds_the_standard_keywords_of_a_builtin() -> None:
    binding = recognise(torch.nn.functional.scaled_dot_product_attention, "sdpa")
    assert binding.bound == ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    assert "softcap" in binding.unbound


def test_only_keywords_of_the_signature_are_bound() -> None:
    binding = recognise(lambda q, k, v, is_causal=False, other=1: 0)
    assert binding.bound == ("is_causal",)
    assert not binding.returns_lse


def test_forced_dialect_accepts_other_names_of_its_keywords() -> None:
    binding = recognise(lambda q, k, v, causal, sm_scale: 0, "sdpa")
    assert said(binding, SQUARE.but(Hkv=4)) == {"causal": False, "sm_scale": 0.5}


def test_default_scale_and_idle_keywords_are_omitted() -> None:
    assert said(SDPA, SMALL.but(Hkv=4)) == {}


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (SMALL.but(mask=Causal()), {"is_causal": True, "enable_gqa": True}),
        (SMALL.but(mask=Causal("bottom_right")), {"attn_mask": "dense", "enable_gqa": True}),
        (SQUARE.but(mask=Causal("bottom_right")), {"is_causal": True, "enable_gqa": True}),
        (SMALL.but(mask=Causal() & Padding((2,))), {"attn_mask": "dense", "enable_gqa": True}),
        (SMALL.but(mask=Causal(), bias="normal"), {"attn_mask": "dense", "enable_gqa": True}),
        (SMALL.but(mask=Causal(), mask_form="bool"), {"attn_mask": "dense", "enable_gqa": True}),
        (SMALL.but(scale=0.0, dropout=0.5), {"scale": 0.0, "dropout_p": 0.5, "enable_gqa": True}),
    ],
)
def test_sdpa_says_flags_where_it_can_and_dense_masks_elsewhere(case: Case, expected: dict[str, Any]) -> None:
    assert said(SDPA, case) == expected


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (SMALL.but(mask=Causal("bottom_right")), {"causal": True}),
        (SQUARE.but(mask=Causal()), {"causal": True}),
        (SMALL.but(mask=Window(2, 1, "bottom_right")), {"window_size": (2, 1)}),
        (
            SMALL.but(mask=Causal("bottom_right") & Window(2, -1, "bottom_right")),
            {"causal": True, "window_size": (2, -1)},
        ),
        (SMALL.but(softcap=0.5, scale=2.0), {"softcap": 0.5, "softmax_scale": 2.0}),
    ],
)
def test_flash_attn_says_causal_and_windows_bottom_right(case: Case, expected: dict[str, Any]) -> None:
    assert said(FLASH, case) == {**expected, "return_lse": True}


def test_window_says_causal_where_there_is_no_causal_keyword() -> None:
    binding = recognise(lambda q, k, v, window_size=(-1, -1): 0)
    assert said(binding, SMALL.but(mask=Causal("bottom_right"))) == {"window_size": (-1, 0)}


@pytest.mark.parametrize(
    ("binding", "case", "words"),
    [
        (FLASH, SMALL.but(mask=Causal()), "cannot say this mask"),
        (FLASH, SMALL.but(mask=Padding((2,))), "cannot say this mask"),
        (FLASH, SQUARE.but(mask=Causal(), mask_form="bool"), "cannot say this mask"),
        (FLASH, SMALL.but(bias="normal"), "cannot say this mask"),
        (SDPA, SMALL.but(softcap=1.0), "softcap"),
        (SDPA, SMALL.but(lse_grad=True), "returns no lse"),
        (recognise(lambda q, k, v, is_causal=False: 0), SMALL, "enable_gqa"),
        (recognise(lambda q, k, v, is_causal=False: 0), SMALL.but(Hkv=4, scale=2.0), "scale"),
        (recognise(lambda q, k, v, bias=None: 0), SMALL.but(mask=Causal()), "mask"),
        (NATIVE, SMALL.but(dropout=0.5), "dropout"),
    ],
)
def test_what_cannot_be_said_is_inexpressible(binding: Binding, case: Case, words: str) -> None:
    with pytest.raises(Inexpressible, match=words):
        keywords(binding, build(case))


def test_native_gets_the_mask_object_and_the_bias() -> None:
    case = SMALL.but(mask=Padding((2,)), bias="normal")
    assert said(NATIVE, case) == {"mask": Padding((2,)), "bias": "dense", "return_lse": True}


@pytest.mark.parametrize("name", ["sdpa", "flash", "native"])
def test_outputs_and_gradients_come_back_with_heads_outside(name: str) -> None:
    outputs = call(recognise(RIGHT[name]), RIGHT[name], build(SMALL))
    shapes = {n: tuple(x.shape) for n, x in outputs.items()}
    assert shapes.pop("lse", (2, 4, 3)) == (2, 4, 3)
    assert shapes == {"o": (2, 4, 3, 2), "dq": (2, 4, 3, 4), "dk": (2, 2, 5, 4), "dv": (2, 2, 5, 2)}


def test_every_dialect_gives_the_same_answer() -> None:
    case = SMALL.but(mask=Causal("bottom_right"), scale=0.7)
    answers = [call(recognise(fn), fn, build(case)) for fn in RIGHT.values()]
    for name in ("o", "dq", "dk", "dv"):
        for other in answers[1:]:
            torch.testing.assert_close(answers[0][name], other[name])


def test_leaves_keep_the_drawn_layout() -> None:
    seen: list[tuple[int, ...]] = []

    def fn(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        seen.append(q.stride())
        return q * 1.0

    inputs = build(Case(Lq=3, Hq=2, Hkv=2, D=4, Dv=4, layout_q="transposed"))
    call(recognise(fn), fn, inputs)
    assert seen == [inputs.q.transpose(1, 2).stride()]


def test_gradient_of_the_output_arrives_in_the_drawn_layout() -> None:
    seen: list[Tensor] = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor) -> Tensor:
            return 2 * q

        @staticmethod
        def backward(ctx: Any, do: Tensor) -> Tensor:
            seen.append(do)
            return 2 * do

    inputs = build(Case(Lq=3, Hq=2, Hkv=2, D=4, Dv=4, layout_do="transposed"))
    outputs = call(
        recognise(lambda q, k, v, is_causal=False: 0), lambda q, k, v: Double.apply(q) + 0 * (k.sum() + v.sum()), inputs
    )
    assert seen[0].stride() == inputs.do.stride()
    assert seen[0].data_ptr() == inputs.do.data_ptr()
    assert torch.equal(outputs["dq"], 2 * inputs.do)


def test_no_gradient_means_no_grad_mode() -> None:
    modes: list[bool] = []

    def fn(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        modes.append(torch.is_grad_enabled())
        return q * 1.0

    for wanted in ("", "k", "qkv"):
        answer(recognise(fn), fn, build(Case(requires_grad=wanted)))
    assert modes == [False, True, True]


def test_subset_of_gradients() -> None:
    assert set(call(SDPA, RIGHT["sdpa"], build(SMALL.but(requires_grad="v")))) == {"o", "dv"}


def test_gradient_of_the_additive_mask_has_the_shape_of_the_bias() -> None:
    for name in ("sdpa", "native"):
        inputs = build(SMALL.but(bias="normal", bias_axes="hk", mask=Causal(), requires_grad="qb"))
        outputs = call(recognise(RIGHT[name]), RIGHT[name], inputs)
        assert inputs.bias is not None
        assert outputs["dbias"].shape == inputs.bias.shape


def test_gradient_through_lse_is_taken() -> None:
    case = SMALL.but(requires_grad="v", lse_grad=True)
    plain, more = (
        call(NATIVE, RIGHT["native"], build(c.but(requires_grad="qv"))) for c in (case.but(lse_grad=False), case)
    )
    assert torch.equal(plain["dv"], more["dv"])
    assert not torch.equal(plain["dq"], more["dq"])


def test_lse_without_grad_fn_cannot_carry_a_gradient() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, *, mask: Any = None, return_lse: bool = False) -> Any:
        o, lse = RIGHT["native"](q, k, v, return_lse=True)
        return o, lse.detach()

    with pytest.raises(Inexpressible, match="lse has no grad_fn"):
        answer(recognise(fn), fn, build(SMALL.but(lse_grad=True)))


@pytest.mark.parametrize(
    ("name", "case", "finding"),
    [
        ("returns_none", Case(), "o: the target must return a Tensor, got NoneType"),
        ("returns_pair", Case(), "o: the target must return a Tensor, got (Tensor, NoneType)"),
        ("returns_wrong_shape", Case(Hq=2, Hkv=2), "o: shape must be (1, 2, 1, 1), got (1, 1, 2)"),
        ("returns_double", Case(), "o: dtype must be float32, got float64"),
        ("returns_input", Case(), "o: shares the storage of v: writing to one changes the other"),
        ("detached", Case(), "o: has no grad_fn, so nothing can be differentiated; declare forward_only if meant"),
        ("drops_key_gradient", Case(), "dk: is None though the input requires a gradient"),
    ],
)
def test_form_of_the_answer_is_checked(name: str, case: Case, finding: str) -> None:
    fn = load(f"{FAULTY}:{name}").call
    assert str(answer(recognise(fn), fn, build(case)).findings[0]) == finding


@pytest.mark.parametrize("case", [Case(Lk=0), Case(Lq=0, Lk=3), Case(B=0, Lq=2, Lk=3)])
def test_gradients_that_autograd_leaves_out_of_an_empty_problem_are_zero(case: Case) -> None:
    fn = load(f"{FAULTY}:detached").call
    got = answer(recognise(fn), fn, build(case))
    assert got.findings == []
    assert all(
        not got.outputs[f"d{n}"].any() and got.outputs[f"d{n}"].shape == getattr(build(case), n).shape for n in "qkv"
    )


def test_right_answers_have_no_findings() -> None:
    for fn in RIGHT.values():
        assert answer(recognise(fn), fn, build(SMALL)).findings == []


def test_expressible_region_leaves_out_what_no_keyword_says() -> None:
    region = expressible(FLASH)
    assert region.masks == ("none", "causal_bottom_right", "window")
    assert (region.softcap, region.bias, region.lse_grad, region.gqa) == (True, False, True, True)
    assert not expressible(recognise(lambda q, k, v, is_causal=False: 0)).gqa
