"""What a script writes out is the case's tensors, bit for bit, in the case's layouts, and its masks."""

import base64
import zlib
from statistics import NormalDist

import pytest
import torch

from flashproof.fuzz.case import DATA, GRADS, LAYOUTS, Case
from flashproof.fuzz.corpus import Record
from flashproof.fuzz.dialects import recognise
from flashproof.fuzz.hashing import STREAMS, number
from flashproof.fuzz.literals import Writer, formula, normal, place, unpack
from flashproof.fuzz.masks import (
    KINDS,
    And,
    BlockSparse,
    Causal,
    Document,
    Full,
    Not,
    Or,
    Packed,
    Padding,
    Prefix,
    Random,
    Strided,
    Window,
)
from flashproof.fuzz.repro import Script
from flashproof.fuzz.tensors import build
from flashproof.fuzz.values import Place


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("data", DATA)
def test_written_values_are_the_case_s_values_bit_for_bit(data, dtype):
    case = Case(
        B=2, Hq=2, Hkv=1, Lq=5, Lk=9, D=4, Dv=3, data=data, dtype=dtype, grad=GRADS[len(data) % len(GRADS)], seed=3
    )
    inputs = build(case, guards=False)
    for spare in (256, 0):
        writer = Writer(spare)
        names = {n: writer.define(n, getattr(inputs, n), case, n) for n in ("q", "k", "v", "do")}
        space = evaluated(writer)
        for tensor, name in names.items():
            want = getattr(inputs, tensor)
            same = torch.equal(space[name].nan_to_num(1e4), want.nan_to_num(1e4)) and torch.equal(
                space[name].isnan(), want.isnan()
            )
            assert same and space[name].dtype == want.dtype, (spare, tensor)


def evaluated(writer):
    """The variables that a writer's lines define."""
    space = {
        "torch": torch,
        "normal": normal,
        "unpack": unpack,
        "place": place,
        "base64": base64,
        "zlib": zlib,
        "NormalDist": NormalDist,
    }
    exec("\n".join(writer.lines), space)  # noqa: S102 (the lines under test)
    return space


@pytest.mark.parametrize("tensor", ["q", "k", "v", "do", "bias"])
def test_the_inlined_generator_is_the_generator(tensor):
    shape = (2, 3, 37, 8)
    want = Place.of(5, tensor, "float32", shape).normal()
    assert (normal(number(5, STREAMS[tensor]), shape).numpy() == want).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_reproduced_with_its_strides(layout):
    case = Case(
        B=2, Hq=2, Hkv=2, Lq=3, Lk=3, D=2, Dv=2, layout_q=layout, layout_k=layout, layout_v=layout, layout_do=layout
    )
    inputs, made = (
        build(case, guards=False),
        Script(Record("a:b", case), recognise(lambda query, key, value: None, "sdpa")),
    )
    for n in ("q", "k", "v", "do"):
        want, name = getattr(inputs, n), made.tensor(n, getattr(inputs, n), case, n)
        got = evaluated(made.writer)[name]
        assert (
            torch.equal(got, want) and got.stride() == want.stride() and got.storage_offset() == want.storage_offset()
        )


MASKS = (
    Full(), Causal(), Causal("bottom_right"), Window(1, 0), Window(-1, 2, "bottom_right"), Window(), Padding((2, 0, 9)),
    Document((2, 1, 4)), Prefix(2), Prefix(1, "bottom_right"), Strided(3), And(Causal(), Padding((3,))),
    Or(Window(0, 0), Prefix(1)), Not(Causal()),
)  # fmt: skip


@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("sizes", [(3, 5), (5, 3), (4, 4), (1, 1), (0, 3)])
def test_a_mask_s_formula_is_the_mask(mask, sizes):
    case = Case(B=3, Lq=sizes[0], Lk=sizes[1], mask=mask, mask_form="bool")
    writer = Writer()
    text = formula(mask, case)
    writer.index(text, case)
    space = evaluated(writer)
    got = eval(text, space)  # noqa: S307 (the formula under test)
    want = mask.dense(3, 1, *sizes)
    assert torch.equal(got.expand(3, 1, *sizes), want.expand(3, 1, *sizes))


PACKED = (
    Packed((1, 2), (3, 0)), Packed((0, 3), (0, 3), "top_left"), Packed((2, 1), (1, 2), "bottom_right", 0, -1),
    Packed((2, 1), (0, 3), "", -1, 1),
)  # fmt: skip


@pytest.mark.parametrize("mask", PACKED, ids=repr)
def test_the_formula_of_packed_sequences_is_the_mask(mask):
    case = Case(Lq=3, Lk=3, mask=mask)
    assert torch.equal(eval(formula(mask, case), {"torch": torch}), mask.dense(1, 1, 3, 3)[0, 0])  # noqa: S307 (the formula under test)


def test_every_mask_has_a_formula_or_is_written_as_numbers():
    written_as_numbers = {BlockSparse.kind, Random.kind}
    assert {type(m).kind for m in (*MASKS, *PACKED)} | written_as_numbers == set(KINDS)
    assert formula(And(Causal(), Random()), Case()) == ""
