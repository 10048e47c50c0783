"""Stored tensors come back bit for bit in their own strides, are what a target is judged on, and a bad file is one sentence."""

import json

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

import flashproof
from flashproof.__main__ import run
from flashproof.fuzz import stored
from flashproof.fuzz.case import Case
from flashproof.fuzz.corpus import CorpusError, load_all
from flashproof.fuzz.execute import Runner
from flashproof.fuzz.judge import Judge
from flashproof.fuzz.layouts import layout
from flashproof.fuzz.masks import Causal, Random
from flashproof.fuzz.tensors import build


def captured(folder, *args, **kwargs):
    """The record of one call of scaled_dot_product_attention with its tensors."""
    with flashproof.capture(folder, tensors=True, quiet=True):
        o = F.scaled_dot_product_attention(*args, **kwargs)
        if o.requires_grad:
            o.backward(torch.randn(o.shape).transpose(-1, -2).contiguous().transpose(-1, -2))
    ((path, record),) = load_all(folder)
    return path, record


def qkv(B=2, H=3, L=9, D=4, **kwargs):
    return [torch.randn(B, L, H, D, **kwargs).transpose(1, 2) for _ in range(3)]


def test_values_and_strides_come_back_within_guards(tmp_path):
    q, k, v = qkv(requires_grad=True)
    _, record = captured(tmp_path, q, k[:, :, ::2], v[:, :1, ::2].expand(-1, 3, -1, -1))
    made = stored.inputs(record.case, record.tensors)
    assert torch.equal(made.q, q)
    assert torch.equal(made.k, k[:, :, ::2])
    assert torch.equal(made.v, v[:, :1, ::2].expand(-1, 3, -1, -1))
    assert (made.q.stride(), made.k.stride(), made.v.stride(1)) == (q.stride(), k[:, :, ::2].stride(), 0)
    assert made.do.stride()[-2:] == (1, 9)
    assert not made.damage()
    made.k.untyped_storage()[0] = 1
    assert made.damage()[0][2].startswith("guard overwritten")


def test_a_mask_that_no_kind_says_is_what_was_given(tmp_path):
    mask = torch.rand(2, 1, 9, 9) > 0.5
    _, record = captured(tmp_path, *qkv(), attn_mask=mask)
    assert isinstance(record.case.mask, Random)
    made = stored.inputs(record.case, record.tensors)
    assert torch.equal(made.keep, mask)
    assert torch.equal(made.attn_mask(), mask)


@pytest.mark.parametrize("least", [-torch.inf, torch.finfo(torch.float32).min])
def test_a_bias_under_a_mask_is_what_was_given(tmp_path, least):
    dense = torch.randn(1, 3, 9, 9).masked_fill(~Causal().dense(1, 1, 9, 9), least)
    _, record = captured(tmp_path, *qkv(), attn_mask=dense)
    assert (record.case.mask, record.case.mask_form, record.case.bias) == (Causal(), "additive", "normal")
    assert torch.equal(stored.inputs(record.case, record.tensors).attn_mask(), dense)


def test_a_target_is_judged_on_the_stored_values(tmp_path):
    def blind_above_1000(query, key, value):
        return F.scaled_dot_product_attention(query, key, torch.where(value == 1234.5, 0.0, value))

    q, k, v = (x.contiguous() for x in qkv())
    v[1, 2, 3, 1] = 1234.5
    _, record = captured(tmp_path, q, k, v)
    judge = Judge(Runner(blind_above_1000, dialect="sdpa"), contract="torch-cpu-math")
    assert judge.check(record.case).status == "pass"
    assert judge.check_stored(record.case, record.tensors).keys == ("value:o",)
    right = Judge(Runner("textbook"))
    assert right.check_stored(record.case, record.tensors).status == "pass"


def test_one_layout_is_made_again_for_every_kind_of_strides():
    for name in ("contiguous", "blhd", "chunk", "strided", "transposed", "expand"):
        strides = layout(name, (2, 3, 5, 4)).strides
        assert stored.restrided((2, 3, 5, 4), strides).strides == strides, name
    assert stored.restrided((1, 1, 5, 4), (0, 0, 1, 1)) is None, "elements that share memory"
    assert stored.restrided((1, 1, 5, 4), (0, 0, 4000, 1)) is None, "elements too far apart"


def test_two_masks_of_one_density_have_two_files(tmp_path):
    q, k, v = qkv()
    mask = torch.rand(9, 9) > 0.5
    with flashproof.capture(tmp_path, quiet=True):
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask.flip(0))
    assert len(load_all(tmp_path)) == 2
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


def test_tensors_over_the_limit_are_not_stored_and_that_is_noted(tmp_path):
    with flashproof.capture(tmp_path, tensors=True, max_bytes=100, quiet=True):
        F.scaled_dot_product_attention(*qkv())
    ((_, record),) = load_all(tmp_path)
    assert record.tensors is None
    assert any("not stored" in note for note in record.captured["notes"])


def test_the_stored_part_of_a_large_call_has_the_reduced_sizes(tmp_path):
    q, k, v = (torch.randn(4, 8, 700, 8) for _ in range(3))
    _, record = captured(tmp_path, q, k, v)
    made = stored.inputs(record.case, record.tensors)
    assert record.case.Lq < 700
    assert torch.equal(made.q, q[: record.case.B, : record.case.Hq, : record.case.Lq])


def broken(path, record, how):
    """The file of tensors, broken."""
    match how:
        case "gone":
            record.tensors.unlink()
        case "garbage":
            record.tensors.write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
        case "shape":
            record.tensors.write_bytes(stored.packed({"q": torch.zeros(1, 1, 1, 1)}))
        case "elsewhere":
            data = json.loads(path.read_text())
            data["captured"]["tensors"] = "../x.safetensors"
            path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("gone", "no such file"),
        ("garbage", "must be a safetensors file"),
        ("shape", "must hold q as"),
        ("elsewhere", "the name of a file in the same folder"),
    ],
)
def test_a_bad_file_of_tensors_is_one_sentence_and_a_usage_error(tmp_path, capsys, how, said):
    path, record = captured(tmp_path, *qkv())
    broken(path, record, how)
    assert run(["replay", str(path), "--target", "textbook"]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert error.count("\n") == 0
    if how != "elsewhere":
        with pytest.raises(CorpusError, match=said):
            stored.inputs(record.case, record.tensors)


def test_stored_values_are_not_judged_by_the_statistical_tier(tmp_path):
    _, record = captured(tmp_path, *qkv(L=64))
    assert stored.inputs(record.case, record.tensors).stored
    assert not build(Case()).stored
