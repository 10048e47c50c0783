"""What a capture records of real steps, that it changes nothing, and what it says of what it cannot record."""

import itertools
import sys
import types

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from safetensors.torch import load_file
from torch import nn

import flashproof
from flashproof.__main__ import run
from flashproof.fuzz.corpus import load_all
from flashproof.fuzz.masks import Causal, Document, Padding
from flashproof.fuzz.patched import CaptureError


def attention(q, k, v, *, scale=None, strange=None):
    return F.scaled_dot_product_attention(q, k, v, scale=scale)


SDPA = (F.scaled_dot_product_attention,)


def cases(folder):
    return [r.case for _, r in load_all(folder)]


def tensors(*shape, n=3, **kwargs):
    return [torch.randn(*shape, **kwargs) for _ in range(n)]


def encoder_step():
    """Gradients of two steps of a transformer layer, causal and padded, from the same seed."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 32, batch_first=True, dropout=0.1)
    x, padding = torch.randn(2, 20, 32), torch.arange(20)[None] >= torch.tensor([[20], [13]])
    mask = nn.Transformer.generate_square_subsequent_mask(20)
    layer(x, src_mask=mask, is_causal=True).square().mean().backward()
    layer(x, src_key_padding_mask=padding).square().mean().backward()
    return [p.grad for p in layer.parameters()], torch.get_rng_state()


def test_a_training_step_of_a_transformer_layer_is_recorded_and_left_alone(capture, folder):
    plain, state = encoder_step()
    with capture():
        seen, state_seen = encoder_step()
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    assert torch.equal(state, state_seen)
    found = {c.mask: c for c in cases(folder)}
    assert set(found) == {Causal(), Padding((20, 13))}
    for case in found.values():
        assert (case.B, case.Hq, case.Lq, case.D, case.dropout, case.requires_grad) == (2, 4, 20, 8, 0.1, "qkv")
    assert found[Padding((20, 13))].mask_form == "additive"


class GroupedBlock(nn.Module):
    """Attention with grouped heads and a cache of keys and values."""

    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x, cache=None):
        B, L, _ = x.shape
        q = self.q(x).view(B, L, 4, 8).transpose(1, 2)
        k, v = self.kv(x).view(B, L, 2, 2, 8).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = (torch.cat([a, b], 2) for a, b in zip(cache, (k, v), strict=True)) if cache else (k, v)
            cache[:] = k, v
        o = F.scaled_dot_product_attention(q, k, v, is_causal=L > 1, enable_gqa=True)
        return o.transpose(1, 2).reshape(B, L, 32)


def test_grouped_heads_layouts_and_the_gradients_layout_are_recorded(capture, folder):
    with capture():
        GroupedBlock()(torch.randn(2, 9, 32)).square().sum().backward()
    (case,) = cases(folder)
    assert (case.Hq, case.Hkv, case.layout_q, case.layout_k, case.layout_do) == (4, 2, "blhd", "packed", "blhd")


def test_decoding_is_recorded_for_the_first_lengths_and_then_for_fewer(capture, folder):
    cache, block = [], GroupedBlock()
    with torch.no_grad(), capture() as log:
        block(torch.randn(1, 5, 32), cache)
        for _ in range(70):
            block(torch.randn(1, 1, 32), cache)
    decoded = sorted(c.Lk for c in cases(folder) if c.Lq == 1)
    assert decoded == [*range(6, 22), 37, 69]
    assert all(c.requires_grad == "" for c in cases(folder))
    assert sum(r.count for r in log.recorded.values()) + log.skipped.total() == 71


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, causal=False):
    """Sequences end to end, (T, H, D)."""
    ends = cu_seqlens_q.tolist()
    rows = [slice(a, b) for a, b in itertools.pairwise(ends)]
    parts = [
        F.scaled_dot_product_attention(*(x[None, r].transpose(1, 2) for x in (q, k, v)), is_causal=causal) for r in rows
    ]
    return torch.cat([p[0].transpose(0, 1) for p in parts])


def test_packed_sequences_are_recorded_with_their_lengths(capture, folder):
    q, k, v = tensors(12, 2, 4)
    ends = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    with capture([varlen]):
        varlen(q, k, v, ends, ends, 6, 6, causal=True)
        varlen(q, k, v, ends, torch.tensor([0, 6, 7, 12]), 6, 6)
    dense = (Document((5, 1, 6)) & Causal()).dense(1, 2, 12, 12)
    (found,) = (c for c in cases(folder) if torch.equal(c.mask.dense(1, 2, 12, 12), dense))
    assert (found.B, found.Hq, found.Lq, found.D) == (1, 2, 12, 4)


def test_a_mask_that_changes_between_calls_of_one_structure_is_looked_at_again(capture, folder):
    q, k, v = tensors(2, 1, 8, 4)
    with capture() as log:
        for n in (8, 3, 3, 3, 5):
            F.scaled_dot_product_attention(q, k, v, attn_mask=(torch.arange(8) < n)[None, None, None])
    assert {c.mask.lengths for c in cases(folder) if c.mask.kind == "padding"} == {(3,)}
    assert sum(r.count for r in log.recorded.values()) == 5, (
        "the second and the fourth call are looked at, every one is counted"
    )


def test_what_is_captured_replays_right_on_a_right_target_and_wrong_on_a_wrong_one(capture, folder, capsys):
    with capture(tensors=True):
        encoder_step()
        GroupedBlock()(torch.randn(2, 70, 32)).square().sum().backward()
        F.scaled_dot_product_attention(*tensors(1, 1, 40, 8), attn_mask=torch.rand(40, 40) > 0.5)
    assert run(["replay", str(folder), "--target", "blockwise"]) == 0
    assert "4 cases, 0 wrong, 4 right" in capsys.readouterr().out
    assert run(["replay", str(folder), "--target", "planted_head_mapping", "--save-tensors"]) == 1
    (answer,) = folder.glob("*.answer.safetensors")
    saved = load_file(answer)
    wrong = (saved["o.got"].double() - saved["o.want"]).abs() > saved["o.limit"]
    assert wrong[:, 1:3].any()
    assert not wrong[:, 0].any(), "query head 0 reads key head 0 all the same"


def test_the_gate_replays_what_was_captured(capture, folder, tmp_path, capsys):
    with capture():
        GroupedBlock()(torch.randn(2, 70, 32)).square().sum().backward()
    options = ["--corpus", str(folder), "--examples", "3", "--min-cases", "1", "--save", str(tmp_path / "failures")]
    assert run(["gate", "planted_head_mapping", *options]) == 1
    assert f"{next(folder.glob('*.json'))}: o:" in capsys.readouterr().out


def test_captured_counts_add_up_over_captures(capture, folder):
    q, k, v = tensors(1, 1, 3, 4)
    for _ in range(2):
        with capture():
            for _ in range(3):
                F.scaled_dot_product_attention(q, k, v)
    ((_, record),) = load_all(folder)
    assert record.captured["count"] == 6
    assert record.findings == ()


def test_a_large_call_is_recorded_by_its_sizes_and_by_a_smaller_case(capture, folder):
    q, k, v = tensors(8, 16, 1030, 8)
    with torch.no_grad(), capture():
        F.scaled_dot_product_attention(q, k, v)
    ((_, record),) = load_all(folder)
    assert (record.captured["called"]["B"], record.captured["called"]["Lq"]) == (8, 1030)
    assert (record.case.D, record.case.Lq % 128) == (8, 6)
    assert record.case.B * record.case.Hq * record.case.Lq < 8 * 16 * 1030


def test_values_are_told_by_statistics_and_the_nearest_regime(capture, folder):
    q, k, v = tensors(1, 1, 50, 8)
    with capture():
        F.scaled_dot_product_attention(q, k, v + 100)
        F.scaled_dot_product_attention(q[:, :, :9], torch.full_like(k, torch.nan), v)
    assert {c.data for c in cases(folder)} == {"offset", "nonfinite"}
    statistics = [r.captured["statistics"]["v"]["mean"] for _, r in load_all(folder)]
    assert any(99 < m < 101 for m in statistics)


holder = types.ModuleType("test_capture_holder")
holder.by_another_name = attention
sys.modules["test_capture_holder"] = holder


def test_a_callable_is_replaced_wherever_a_module_holds_it_and_put_back_after_an_exception(capture, folder):
    q, k, v = tensors(1, 1, 3, 4)
    held = holder.by_another_name
    with pytest.raises(ZeroDivisionError), capture([held], dialect="sdpa"):  # noqa: PT012 (an exception after two calls)
        assert holder.by_another_name is not held
        holder.by_another_name(q, k, v)
        attention(q, k, v, scale=0.25)
        raise ZeroDivisionError
    assert holder.by_another_name is held
    assert sorted(c.scale or 0 for c in cases(folder)) == [0, 0.25]


def test_a_target_that_raises_raises_as_before(capture):
    q, k, v = tensors(1, 1, 3, 4)
    with pytest.raises(RuntimeError), capture():
        F.scaled_dot_product_attention(q, k[..., :2], v)
    assert F.scaled_dot_product_attention is SDPA[0]


def test_wrapped_callables_are_recorded_by_open_captures_only(capture, folder):
    local = flashproof.capture.wrap(lambda q, k, v, scale=None: attention(q, k, v, scale=scale), "mine", "sdpa")
    q, k, v = tensors(1, 1, 3, 4)
    local(q, k, v)
    with capture([]) as log:
        local(q, k, v)
        local(q, k, v)
    local(q, k, v)
    assert [r.count for r in log.recorded.values()] == [2]
    assert [r.target for _, r in load_all(folder)] == ["mine"]


def test_nested_captures_both_record(capture, tmp_path, folder):
    q, k, v = tensors(1, 1, 3, 4)
    with capture() as outer:
        with flashproof.capture(tmp_path / "inner", quiet=True) as inner:
            F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q, k, v)
    assert F.scaled_dot_product_attention is SDPA[0]
    assert [[r.count for r in log.recorded.values()] for log in (outer, inner)] == [[2], [1]]
    assert not (outer.notes or inner.notes)


def test_two_captures_cannot_share_a_folder(capture):
    with capture(), pytest.raises(CaptureError, match="one capture at a time"), capture():
        pass
    assert F.scaled_dot_product_attention is SDPA[0]


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["torch.nn.functional:scaled_dot_product_atention"], "did you mean scaled_dot_product_attention"),
        (["nowhere_at_all:attention"], "failed to import"),
        (["attention"], "package.module:attr"),
        ([3], "a callable, got int"),
        ([lambda q, k, v: q], "must be held by a module"),
        ([attention], "state one with dialect="),
        ([nn.Identity()], "must be a function to be replaced"),
        (["json:dumps"], "cannot be recorded: the callable must begin with"),
        ("torch:add", "targets must be a list"),
    ],
)
def test_a_target_that_cannot_be_recorded_is_told_before_anything_runs(targets, said, tmp_path):
    with pytest.raises(CaptureError, match=said), flashproof.capture(tmp_path, targets):
        pytest.fail("must not begin")
    assert F.scaled_dot_product_attention is SDPA[0]


def test_a_folder_that_cannot_be_written_is_told_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CaptureError, match="must be a folder that can be written"),
        flashproof.capture(tmp_path / "file"),
    ):
        pytest.fail("must not begin")


def test_a_call_that_cannot_be_expressed_is_counted_and_told(capture, folder):
    q, k, v = tensors(1, 1, 3, 4)
    with capture([attention], dialect="sdpa") as log:
        for _ in range(3):
            attention(q, k, v, strange=[1])
        attention(q, k, v)
    assert "3 calls cannot be expressed: the argument strange of" in log.summary()
    assert "3 calls cannot be expressed" in (folder / "summary.txt").read_text()
    assert len(cases(folder)) == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_tensors_without_numbers_of_their_own_are_told_and_hide_no_plain_call(capture, folder):
    q, k, v = tensors(2, 1, 3, 4)
    nested = torch.nested.nested_tensor([torch.randn(1, 3, 4), torch.randn(1, 2, 4)])
    with capture() as log:
        F.scaled_dot_product_attention(nested, nested, nested)
        torch.func.vmap(F.scaled_dot_product_attention)(q[None], k[None], v[None])
        F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(*(x.to("meta") for x in (q, k, v)))
    assert "1 calls cannot be expressed: q must be a plain strided tensor with values, got nested" in log.summary()
    assert log.inexpressible.total() == 3
    assert not log.notes
    assert len(cases(folder)) == 1


def test_a_call_under_autocast_is_another_structure(capture, folder):
    q, k, v = tensors(1, 1, 3, 4)
    with capture():
        F.scaled_dot_product_attention(q, k, v)
        with torch.autocast("cpu", torch.bfloat16):
            F.scaled_dot_product_attention(q, k, v)
    assert {c.dtype for c in cases(folder)} == {"float32", "bfloat16"}


def test_no_more_structures_than_the_limit_are_recorded(capture, folder):
    with capture(limit=3) as log:
        for d in range(1, 8):
            F.scaled_dot_product_attention(*tensors(1, 1, 2, d))
    assert len(cases(folder)) == 3
    assert "4 calls not recorded: more than 3 structures" in log.summary()


def test_autocast_is_told_as_the_dtype_that_the_kernel_sees(capture, folder):
    q, k, v = tensors(1, 1, 3, 4)
    with capture(), torch.autocast("cpu", torch.bfloat16):
        F.scaled_dot_product_attention(q, k, v)
    ((_, record),) = load_all(folder)
    assert record.case.dtype == "bfloat16"
    assert "autocast" in record.captured["notes"][0]


def test_the_summary_is_printed_at_exit(tmp_path, capsys):
    with flashproof.capture(tmp_path / "x"):
        F.scaled_dot_product_attention(*tensors(1, 1, 3, 4))
    assert "1 calls in 1 structures recorded in" in capsys.readouterr().err
