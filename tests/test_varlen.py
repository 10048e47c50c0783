"""Packed cases: what they require, how the varlen and flex dialects say them, what the probe and a script make of them."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from flashproof.fuzz.case import Case, case_from_json
from flashproof.fuzz.corpus import Record
from flashproof.fuzz.dialects import Inexpressible, call, keywords, recognise
from flashproof.fuzz.execute import Runner
from flashproof.fuzz.judge import Judge
from flashproof.fuzz.masks import Causal, Packed, Random
from flashproof.fuzz.probe import probe_keywords
from flashproof.fuzz.repro import script
from flashproof.fuzz.tensors import build
from flashproof.impls.loading import load

TARGETS = Path(__file__).parent / "targets"
VARLEN, FLEX, NATIVE = (load(f"{TARGETS}/right.py:{n}").call for n in ("varlen", "flex", "native"))
PACKED = Case(Hq=4, Hkv=2, Lq=3, Lk=6, D=4, Dv=2, mask=Packed((0, 2, 1), (1, 2, 3), "bottom_right"))


def test_sizes_of_a_packed_case_are_the_sums():
    with pytest.raises(ValueError, match="must have B=1, Lq=3, Lk=6 as they add up, got B=1, Lq=4, Lk=6"):
        PACKED.but(Lq=4)
    assert case_from_json(PACKED.key) == PACKED


@pytest.mark.parametrize("layout", ["contiguous", "blhd", "packed", "expand", "strided", "transposed", "size1"])
@pytest.mark.parametrize("case", [PACKED, PACKED.but(B=2, mask=Causal("bottom_right")), Case(B=0, Lq=2, Lk=3)])
def test_packed_rows_answer_like_the_dense_mask(case, layout):
    laid = case.but(**{f"layout_{t}": layout for t in ("q", "k", "v", "do")}, lse_grad=case.B > 0)
    got, want = (call(recognise(fn), fn, build(laid)) for fn in (VARLEN, NATIVE))
    assert got.keys() == want.keys()
    for name in got:
        torch.testing.assert_close(got[name], want[name])


def test_cu_seqlens_bound_the_sequences():
    given = keywords(recognise(VARLEN), build(PACKED))
    assert given["cu_seqlens_q"].tolist() == [0, 0, 2, 3] and given["cu_seqlens_k"].tolist() == [0, 1, 3, 6]
    assert given["cu_seqlens_q"].dtype == torch.int32 and (given["max_seqlen_q"], given["max_seqlen_k"]) == (2, 3)


def test_causal_top_left_is_said_where_lengths_agree():
    binding = recognise(VARLEN)
    assert keywords(binding, build(Case(Lq=3, Lk=3, mask=Packed((1, 2), (1, 2), "top_left"))))["causal"]
    with pytest.raises(Inexpressible):
        keywords(binding, build(PACKED.but(mask=Packed((0, 2, 1), (1, 2, 3), "top_left"))))


def test_flex_takes_a_packed_mask_and_a_bias_with_a_gradient():
    case = PACKED.but(bias="normal", softcap=2.0, requires_grad="qkvb")
    got, want = (call(recognise(fn), fn, build(case)) for fn in (FLEX, NATIVE))
    for name in want:
        torch.testing.assert_close(got[name], want[name])


@pytest.mark.parametrize(
    ("place", "ignored"),
    [
        ("right.py:varlen", set()),
        ("wrong_varlen.py:one_sequence", {"cu_seqlens_q", "cu_seqlens_k"}),
        ("wrong_varlen.py:keys_by_the_lengths_of_q", {"cu_seqlens_k"}),
        ("right.py:flex", set()),
        ("wrong_flex.py:ignores_score_mod", {"score_mod"}),
        ("wrong_flex.py:ignores_block_mask", {"block_mask"}),
    ],
)
def test_an_ignored_boundary_or_function_is_a_finding(place, ignored):
    fn = load(f"{TARGETS}/{place}").call
    assert {f.tensor for f in probe_keywords(recognise(fn), fn)[1]} == ignored


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("wrong_varlen.py:stops_at_an_empty_sequence", Case(Lk=2, mask=Packed((0, 1), (1, 1)), requires_grad="")),
        (
            "wrong_varlen.py:dv_of_the_first_sequence_alone",
            Case(B=2, Hq=2, Hkv=2, layout_v="strided", requires_grad="v"),
        ),
        ("wrong_flex.py:first_batch_everywhere", Case(B=2, bias="normal", bias_axes="b", requires_grad="")),
        ("wrong_flex.py:partial_blocks_are_full", Case(Lq=3, Lk=4, D=2, Dv=2, mask=Random(seed=1))),
    ],
)
def test_a_script_shows_the_failure_in_less_than_ninety_lines(name, case, tmp_path):
    runner = Runner(f"{TARGETS}/{name}")
    found = tuple(Judge(runner, "").check(case).failures)
    text = script(Record(f"{TARGETS}/{name}", case, runner.binding.dialect, "cpu", findings=found), runner.binding)
    (tmp_path / "repro.py").write_text(text)
    done = subprocess.run([sys.executable, tmp_path / "repro.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "WRONG" in done.stdout, text + done.stderr
    assert text.count("\n") < 90 and "flashproof" not in text.replace(str(TARGETS), "")


def test_marks_of_the_dialects_decide():
    assert recognise(VARLEN).dialect == recognise(partial(VARLEN, causal=True)).dialect == "flash_attn_varlen"
    assert recognise(FLEX).dialect == "flex"
