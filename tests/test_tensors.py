import pytest
import torch
from hypothesis import given

from flashproof.fuzz.case import LAYOUTS, Case
from flashproof.fuzz.layouts import PATTERNS, stored
from flashproof.fuzz.masks import And, Causal, Full, Padding, Random, Window
from flashproof.fuzz.strategies import cases
from flashproof.fuzz.tensors import MAX_ORACLE_BYTES, TORCH_DTYPES, build, dropout_keep, oracle_bytes, soft

SIZES = dict(B=2, Hq=6, Hkv=3, Lq=5, Lk=7, D=8, Dv=4)
TENSORS = ("q", "k", "v", "do")
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x):
    return x.contiguous().view(INTEGERS[x.element_size()])


def layouts(name, *tensors):
    return {f"layout_{t}": name for t in tensors or TENSORS}


def storage(inputs, name):
    return next(block for block in inputs.blocks if name in block.names)


def spoil(inputs, name, place):
    """Write one element of a tensor's storage, counted from the start of the tensor's part."""
    block = storage(inputs, name)
    block.storage[block.margin + place] ^= 1


# Layouts


@given(cases())
def test_every_tensor_has_its_shape_and_dtype(case):
    x = build(case)
    assert x.q.shape == (case.B, case.Hq, case.Lq, case.D) and x.k.shape == (case.B, case.Hkv, case.Lk, case.D)
    assert x.v.shape == (case.B, case.Hkv, case.Lk, case.Dv) and x.do.shape == (case.B, case.Hq, case.Lq, case.Dv)
    assert {t.dtype for t in (x.q, x.k, x.v, x.do)} == {TORCH_DTYPES[case.dtype]}


@given(cases(without=["nonfinite"]))
def test_a_layout_does_not_change_the_values(case):
    plain, drawn = build(case.but(**layouts("contiguous"))), build(case)
    for name in TENSORS:
        x = getattr(plain, name)
        if getattr(case, f"layout_{name}") == "expand":
            x = x[:1, :1].expand_as(x)
        assert torch.equal(bits(getattr(drawn, name)), bits(x))


@given(cases())
def test_building_twice_gives_the_same_bits_and_strides(case):
    for one, other in zip(build(case).blocks, build(case).blocks, strict=True):
        assert torch.equal(one.storage, other.storage) and one.layouts == other.layouts


@pytest.mark.parametrize(
    ("name", "strides"),
    [
        ("contiguous", (6 * 5 * 8, 5 * 8, 8, 1)),
        ("blhd", (5 * 6 * 8, 8, 6 * 8, 1)),
        ("packed", (5 * 18 * 8, 8, 18 * 8, 1)),
        ("chunk", (12 * 5 * 8, 5 * 8, 8, 1)),
        ("expand", (0, 0, 8, 1)),
        ("offset", (6 * 5 * 8, 5 * 8, 8, 1)),
        ("strided", (6 * 5 * 8 * 2, 5 * 8 * 2, 16, 2)),
        ("size1", (6 * 5 * 8, 5 * 8, 8, 1)),
        ("transposed", (6 * 8 * 5, 8 * 5, 1, 5)),
    ],
)
def test_strides_are_those_of_the_layout(name, strides):
    assert build(Case(**SIZES, layout_q=name)).q.stride() == strides


def test_every_layout_is_in_the_strides_test():
    marks = test_strides_are_those_of_the_layout.pytestmark[0]
    assert {row[0] for row in marks.args[1]} == set(LAYOUTS)


def test_size1_strides_are_odd_and_larger_than_the_tensor():
    q = build(Case(Hq=2, Lq=3, D=1, layout_q="size1")).q
    assert q.stride()[0] == q.stride()[3] == 3 * 6 + 7 and q.stride()[1:3] == (3, 1)


def test_offset_moves_the_start_by_one_element():
    at = [build(Case(**SIZES, layout_q=name)).q.storage_offset() for name in ("contiguous", "offset")]
    assert at[1] == at[0] + 1


def test_contiguous_tensors_are_aligned_as_torch_aligns_them():
    assert all(build(Case(dtype=dtype)).q.data_ptr() % 64 == 0 for dtype in TORCH_DTYPES)


def test_packed_tensors_share_one_storage_as_slices_of_the_heads():
    x = build(Case(**{**SIZES, "Lq": 7, "Dv": 8}, **layouts("packed")))
    start = x.q.data_ptr()
    assert {t.stride() for t in (x.q, x.k, x.v)} == {(7 * 12 * 8, 8, 12 * 8, 1)}
    assert [(t.data_ptr() - start) // 4 for t in (x.k, x.v)] == [6 * 8, 9 * 8]


def test_packed_keys_and_values_share_without_the_queries_where_lengths_differ():
    x = build(Case(**{**SIZES, "Dv": 8}, **layouts("packed")))
    assert [block.names for block in x.blocks] == [("q",), ("k", "v"), ("do",)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("empty", ["B", "Lq", "Lk"])
def test_empty_sizes_build_in_every_layout(layout, empty):
    case = Case(**{**SIZES, empty: 0}, **layouts(layout), layout_mask=layout, mask=Causal(), mask_form="additive")
    inputs = build(case)
    assert inputs.attn_mask().numel() in (0, 5 * 7) and inputs.damage() == []


def test_a_layout_counts_the_elements_it_spans():
    layout = stored((2, 3, 5, 7), "blhd", heads=9, head=6)
    assert layout.span == 2 * 5 * 9 * 7 and layout.offset == 6 * 7


# Guards


@pytest.mark.parametrize("dtype", [*TORCH_DTYPES.values(), torch.bool])
def test_poison_is_no_number(dtype):
    integer, pattern = PATTERNS[dtype]
    value = torch.full((1,), pattern, dtype=integer).view(dtype)
    assert value.isnan().all() if dtype != torch.bool else value.view(torch.uint8).item() not in (0, 1)


@given(cases())
def test_nothing_is_damaged_before_a_call(case):
    inputs = build(case)
    inputs.attn_mask()
    assert inputs.damage() == []


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TENSORS)
def test_one_changed_bit_of_an_input_is_found_with_its_index(name, layout, dtype):
    inputs = build(Case(**SIZES, dtype=dtype, **layouts(layout)))
    x = getattr(inputs, name)
    index = (0, 0, 3, 2) if layout == "expand" else (1, 2, 3, 2)
    x.view(INTEGERS[x.element_size()])[index] ^= 1
    tensor, at, what = inputs.damage()[0]
    assert (tensor, at, what) == (name, index, "input changed") and len(inputs.damage()) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_write_before_the_start_is_found_with_its_distance(layout):
    inputs = build(Case(**SIZES, layout_q=layout))
    spoil(inputs, "q", -3)
    assert inputs.damage() == [("q", (), "guard overwritten, 3 elements before the start")]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_write_past_the_end_is_found_with_its_distance(layout):
    inputs = build(Case(**SIZES, layout_q=layout))
    spoil(inputs, "q", storage(inputs, "q").layouts[0].span + 4)
    assert inputs.damage() == [("q", (), "guard overwritten, 5 elements past the end")]


@pytest.mark.parametrize(("layout", "place"), [("packed", 0), ("chunk", 0), ("strided", 1), ("offset", 0)])
def test_a_write_into_a_gap_is_found(layout, place):
    inputs = build(Case(**SIZES, layout_q=layout))
    spoil(inputs, "q", place)
    assert inputs.damage() == [("q", (), f"guard overwritten, in the gap at element {place}")]


def test_writing_the_same_poison_elsewhere_as_nan_is_found():
    inputs = build(Case(**SIZES))
    block = storage(inputs, "v")
    block.storage.view(block.dtype)[0] = torch.nan
    assert inputs.damage() == [("v", (), f"guard overwritten, {block.margin} elements before the start")]


def test_packed_tensors_have_no_gap_between_them():
    inputs = build(Case(**{**SIZES, "Lq": 7, "Dv": 8}, **layouts("packed")))
    spoil(inputs, "q", 6 * 8)
    assert inputs.damage() == [("k", (0, 0, 0, 0), "input changed")]


@pytest.mark.parametrize("name", TENSORS)
def test_reading_beside_a_tensor_gives_nan(name):
    inputs = build(Case(**SIZES))
    block = storage(inputs, name)
    values = block.storage.view(block.dtype)
    assert values[: block.margin].isnan().all() and values[-block.margin :].isnan().all() and block.margin >= 256


@pytest.mark.parametrize("layout", ["contiguous", "expand", "strided"])
def test_masks_and_biases_are_guarded_too(layout):
    inputs = build(Case(**SIZES, mask=Padding((3, 2)), mask_form="bool", lse_grad=True, layout_mask=layout))
    inputs.attn_mask()
    spoil(inputs, "mask", -1)
    spoil(inputs, "dlse", -1)
    assert sorted(d[0] for d in inputs.damage()) == ["dlse", "mask"]
    inputs = build(Case(**SIZES, bias="normal", layout_mask=layout))
    spoil(inputs, "bias", 0)
    assert inputs.damage() == [("bias", (0, 0, 0, 0), "input changed")]


def test_without_guards_there_are_no_margins_but_changes_are_found():
    inputs = build(Case(**SIZES), guards=False)
    inputs.k[1, 1, 1, 1] += 1
    assert {block.margin for block in inputs.blocks} == {0} and inputs.damage() == [
        ("k", (1, 1, 1, 1), "input changed")
    ]


@pytest.mark.gpu
def test_a_write_on_a_gpu_is_found():
    inputs = build(Case(**SIZES, dtype="bfloat16", mask=Causal(), mask_form="additive"), "cuda")
    assert inputs.attn_mask().is_cuda and inputs.damage() == []
    spoil(inputs, "do", -2)
    assert inputs.damage() == [("do", (), "guard overwritten, 2 elements before the start")]


@pytest.mark.gpu
@given(cases())
def test_a_gpu_gets_the_same_bits_and_strides(case):
    here, there = build(case), build(case, "cuda")
    here.attn_mask(), there.attn_mask()
    for one, other in zip(here.blocks, there.blocks, strict=True):
        assert torch.equal(one.storage, other.storage.cpu()) and one.layouts == other.layouts
    if case.dropout:
        assert torch.equal(here.dropout_keep, there.dropout_keep.cpu())


# Masks and biases


def test_no_mask_and_no_bias_is_nothing_at_all():
    inputs = build(Case(**SIZES))
    assert inputs.keep is None and inputs.bias is None and inputs.attn_mask() is None


def test_a_boolean_mask_is_handed_over_as_it_is():
    inputs = build(Case(**SIZES, mask=Causal(), mask_form="bool"))
    assert torch.equal(inputs.attn_mask(), Causal().dense(2, 6, 5, 7))


def test_a_causal_flag_can_be_left_to_the_caller():
    inputs = build(Case(**SIZES, mask=Causal("bottom_right")))
    assert inputs.attn_mask(causal_apart=True) is None and inputs.attn_mask().dtype == torch.bool


@pytest.mark.parametrize("mask", [And(Causal(), Padding((3, 2))), Random(50)])
def test_a_mask_that_is_no_flag_is_never_left_out(mask):
    assert build(Case(**SIZES, mask=mask)).attn_mask(causal_apart=True) is not None


def test_a_dense_causal_mask_is_never_left_out():
    assert build(Case(**SIZES, mask=Causal(), mask_form="bool")).attn_mask(causal_apart=True) is not None


def test_mask_axes_name_the_axes_at_full_size_beyond_those_needed():
    inputs = build(Case(**SIZES, mask=Padding((3, 2)), mask_form="bool", mask_axes="hk"))
    assert inputs.attn_mask().shape == (2, 6, 1, 7)


def test_a_full_dense_mask_has_the_axes_it_is_given():
    assert build(Case(**SIZES, mask_form="bool", mask_axes="q")).attn_mask().shape == (1, 1, 5, 1)
    zeros = build(Case(**SIZES, mask_form="additive", mask_axes="bk")).attn_mask()
    assert zeros.shape == (2, 1, 1, 7) and (zeros == 0).all()


def test_an_additive_mask_holds_minus_infinity_and_zero():
    mask = build(Case(**SIZES, mask=Causal(), mask_form="additive", dtype="float16")).attn_mask()
    allowed = Causal().dense(2, 6, 5, 7)
    assert mask.dtype == torch.float16 and (mask[allowed] == 0).all() and (mask[~allowed] == -torch.inf).all()


@pytest.mark.parametrize(("fill", "value"), [("min", torch.finfo(torch.bfloat16).min), ("-1e4", -9984.0)])
def test_a_soft_fill_lies_in_the_bias_and_forbids_nothing(fill, value):
    inputs = build(Case(**SIZES, mask=Causal(), mask_form="additive", mask_fill=fill, dtype="bfloat16"))
    allowed = Causal().dense(2, 6, 5, 7)
    assert inputs.keep is None and inputs.attn_mask() is inputs.bias
    assert (inputs.bias[allowed] == 0).all() and (inputs.bias[~allowed] == value).all()


def test_a_soft_fill_is_exact_whatever_the_bias():
    inputs = build(
        Case(**SIZES, mask=Causal(), mask_form="additive", mask_fill="min", dtype="float16", bias="negative")
    )
    assert (inputs.bias[~Causal().dense(2, 6, 5, 7)] == torch.finfo(torch.float16).min).all()


def test_a_bias_has_the_axes_it_is_given():
    for axes in ("", "k", "bh", "bhqk"):
        shape = tuple(n if a in axes else 1 for a, n in zip("bhqk", (2, 6, 5, 7), strict=True))
        assert build(Case(**SIZES, bias="normal", bias_axes=axes)).bias.shape == shape


def test_with_a_mask_the_bias_has_the_shape_that_is_handed_over():
    inputs = build(Case(**SIZES, bias="normal", bias_axes="h", mask=Padding((3, 2)), mask_form="bool"))
    merged = inputs.attn_mask()
    assert inputs.bias.shape == merged.shape == (2, 6, 1, 7)
    assert torch.equal(merged, torch.where(inputs.keep, inputs.bias, -torch.inf)) and inputs.bias.isfinite().all()


@given(cases())
def test_the_handed_tensor_has_the_shape_of_the_bias_and_is_additive_with_one(case):
    inputs = build(case)
    handed = inputs.attn_mask()
    if inputs.bias is not None:
        assert handed.shape == inputs.bias.shape and handed.dtype == inputs.q.dtype
    assert (handed is None) == (inputs.bias is None and inputs.keep is None)
    assert inputs.keep is None or not soft(case)


@given(cases())
def test_keep_is_the_mask_of_the_case(case):
    keep = build(case).keep
    if keep is not None:
        shape = (case.B, case.Hq, case.Lq, case.Lk)
        assert torch.equal(keep.expand(shape), case.mask.dense(*shape).expand(shape))


@given(cases(features=["mask", "bias", "layouts", "gqa", "lq"]))
def test_a_mask_layout_does_not_change_the_values(case):
    drawn, plain = build(case).attn_mask(), build(case.but(layout_mask="contiguous")).attn_mask()
    assert (drawn is None) == (plain is None)
    assert drawn is None or torch.equal(drawn, plain.expand_as(drawn))


def test_an_expanded_mask_repeats_itself_over_batch_and_heads():
    mask = build(Case(**SIZES, mask=Window(1, 1), mask_form="bool", layout_mask="expand")).attn_mask()
    assert mask.shape == (2, 6, 5, 7) and mask.stride() == (0, 0, 7, 1)


def test_bias_kinds_are_of_their_sizes():
    normal, large, negative = (build(Case(**SIZES, bias=kind)).bias for kind in ("normal", "large", "negative"))
    assert torch.equal(large, 64 * normal) and torch.equal(negative, -8 * normal.abs())


def test_a_full_mask_of_flags_is_no_mask():
    assert build(Case(**SIZES, mask=Full(), mask_axes="bh")).attn_mask() is None


# Dropout, the gradient of lse, memory


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_its_share(p):
    share = 1 - dropout_keep(3, 2, 2, 100, 100, p).double().mean().item()
    assert abs(share - p) < 6 * (p * (1 - p) / 40_000) ** 0.5


def test_a_tile_of_the_dropout_mask_is_a_slice_of_it():
    whole = dropout_keep(5, 2, 4, 20, 30, 0.3)
    assert torch.equal(dropout_keep(5, 1, 2, 7, 9, 0.3, first=(1, 2, 5, 11)), whole[1:2, 2:4, 5:12, 11:20])


def test_dropout_without_a_chance_drops_nothing():
    assert dropout_keep(0, 1, 1, 50, 50, 0.0).all()


def test_inputs_hold_the_dropout_mask_and_the_gradient_of_lse_when_asked():
    inputs = build(Case(**SIZES, dropout=0.5, lse_grad=True, dtype="bfloat16"))
    assert (
        inputs.dropout_keep.shape == (2, 6, 5, 7)
        and inputs.dlse.shape == (2, 6, 5)
        and inputs.dlse.dtype == torch.float32
    )
    plain = build(Case(**SIZES))
    assert plain.dropout_keep is None and plain.dlse is None


def test_the_bytes_held_count_every_storage_twice():
    inputs = build(Case(**SIZES), guards=False)
    assert inputs.nbytes == 2 * 4 * (2 * 6 * 5 * 8 + 2 * 3 * 7 * 8 + 2 * 3 * 7 * 4 + 2 * 6 * 5 * 4)


@given(cases(max_len=5000))
def test_no_drawn_case_needs_more_than_the_stated_memory(case):
    assert oracle_bytes(case) <= MAX_ORACLE_BYTES
