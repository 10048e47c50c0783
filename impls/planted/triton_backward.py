"""Planted bugs of the backward Triton kernels and of their launch."""

from __future__ import annotations

from ...fuzz.case import Case
from ...fuzz.masks import Causal
from .row import Planted

LOAD_ADD_STORE = """here = in_row[:, None] & in_j[None, :]
                tl.store(dbias_at, tl.load(dbias_at, mask=here, other=0.0) + ds, mask=here)"""
DQ_STORE = "    tl.store(DQ + line[:, None] * D + d[None, :], (dq * scale)"

ROWS = (
    Planted(
        "do_strides",
        "dK and dV read dO with the strides of a contiguous tensor",
        "gradients of a sum or of a transpose are not contiguous",
        "a gradient of the output that is not contiguous",
        "triton_flash",
        (("do, *at[3], lse, delta, dk", "do, *o.stride(), lse, delta, dk"),),
        "memory", "DO", Case(Dv=2, layout_do="strided", requires_grad="q"),  # both kernels run whatever is asked for
        covers=("aiter-do-strides", "fla-conv-dy"),
    ),
    Planted(
        "dv_strides",
        "dV is written with the row stride of dK",
        "seen while these kernels were written",
        "Dv other than D",
        "triton_backward",
        (("DV + (first + at_j) * Dv", "DV + (first + at_j) * D"),),
        "value", "dv", Case(Lk=2, Dv=2, requires_grad="v"),
        covers=("fa2-dv-like-k",),
    ),
    Planted(
        "bias_race",
        "programs add to a shared gradient of the bias by load, add and store",
        "an atomic addition replaced; right whenever programs run one after another",
        "the gradient of a bias that several heads or batches share, programs running at once",
        "triton_backward",
        (
            (
                'tl.atomic_add(dbias_at, ds, mask=in_row[:, None] & in_j[None, :], sem="relaxed")',
                LOAD_ADD_STORE,
            ),
        ),
        "memory", "DBIAS", Case(B=2, bias="normal", requires_grad="b"),
        covers=("fla-nv-split",),
    ),
    Planted(
        "bias_workspace",
        "the workspace that a shared gradient of the bias is summed in is not cleared",
        "torch.empty where torch.zeros was meant",
        "the gradient of a bias that several heads or batches share",
        "triton_flash",
        (("bias.new_zeros(", "bias.new_empty("),),
        "memory", "DBIAS", Case(B=2, bias="normal", requires_grad="b"),
    ),
    Planted(
        "dk_rows_beyond",
        "rows of queries that do not exist get a weight in dV",
        "FlashAttention in Triton: K padded with zeros makes masking unnecessary, but exp(0 - lse) is not 0",
        "a length of queries that does not fill the tile",
        "triton_backward",
        (('lse = tl.load(LSE + line, mask=in_row, other=float("inf"))', "lse = tl.load(LSE + line, mask=in_row, other=0.0)"),
         ("do = tl.load(do_at, mask=in_row[:, None] & in_dv, other=0.0)", "do = tl.load(do_at, mask=in_row[:, None] & in_dv, other=1.0)")),
        "value", "dv", Case(requires_grad="v"),
        covers=("fa2-bwd-tail-unmasked",),
    ),
    Planted(
        "dq_atomics",
        "dQ is added into a buffer that was not cleared",
        "torch.empty for a tensor that is accumulated into",
        "every backward pass",
        "triton_backward",
        ((DQ_STORE, DQ_STORE.replace("tl.store(", "dq += tl.load(").replace(", (dq * scale)", ", mask=in_q, other=0.0)\n") + DQ_STORE),),
        "memory", "DQ", Case(requires_grad="q"),
    ),
    Planted(
        "delta_unwritten",
        "delta is stored for the first head of a tile only, and read for all",
        "FA4: no wait for the preprocessing kernel",
        "several query heads for a key head",
        "triton_backward",
        (("tl.store(DELTA + line, delta, mask=in_row)", "tl.store(DELTA + line, delta, mask=in_row & (g == 0))"),),
        "memory", "DELTA", Case(Hq=2, requires_grad="k"),
        covers=("fa4-missing-pdl-wait", "tilelang-lse-padding"),
    ),
    Planted(
        "dk_of_first_heads",
        "dK and dV of a group take the first tile of heads only",
        "a loop over the group that ends too early",
        "more query heads in a group than a tile holds",
        "triton_backward",
        (("for g0 in tl.range(0, G, BLOCK_M // ROWS):", "for g0 in tl.range(0, 1, BLOCK_M // ROWS):"),),
        "value", "dv", Case(Hq=5, Lq=9, requires_grad="v"),
    ),
    Planted(
        "dlse_row",
        "the gradient of lse is read at the row of another head",
        "strides of one tensor used for another",
        "several query heads and a loss that uses lse",
        "triton_backward",
        (("delta -= tl.load(DLSE + line, mask=in_row, other=0.0)", "delta -= tl.load(DLSE + b * Hq * Lq + i, mask=in_row, other=0.0)"),),
        "value", "dq", Case(Hq=2, Hkv=2, lse_grad=True, requires_grad="q"),
    ),
    Planted(
        "causal_query_start",
        "dK and dV begin one query tile late under a causal mask",
        "the mirror image of a loop bound",
        "causal, more than one query tile",
        "triton_backward",
        (("start = tl.maximum(j0 - band_high, 0) // ROWS * ROWS", "start = (tl.maximum(j0 - band_high, 0) + ROWS - 1) // ROWS * ROWS"),),
        "value", "dv", Case(Lq=2, mask=Causal("bottom_right"), requires_grad="v"),
    ),
    Planted(
        "softcap_missing_dk",
        "dK lacks the derivative of the cap; dQ has it",
        "flash-attention PR 2402, in one of two kernels",
        "softcap",
        "triton_backward",
        (("            if HAS_SOFTCAP:\n                ds = ds * (1.0 - t * t)\n            dk", "            dk"),),
        "value", "dk", Case(Lk=2, softcap=1.0, requires_grad="k"),
    ),
    Planted(
        "dk_store",
        "dK is stored beyond its last row",
        "a store mask that checks the width only",
        "a length of keys that does not fill the tile",
        "triton_backward",
        (("(dk * scale).to(DK.dtype.element_ty), mask=in_j & in_d)", "(dk * scale).to(DK.dtype.element_ty), mask=in_d)"),),
        "memory", "DK", Case(requires_grad="q"),
    ),
    Planted(
        "dead_row_lse",
        "lse of -inf is subtracted from scores of -inf",
        "NaN gradients of rows without keys",
        "a row with no allowed key",
        "triton_backward",
        (('            lse = tl.where(lse == float("-inf"), 0.0, lse)\n            delta', "            delta"),),
        "nonfinite", "dv", Case(Lq=2, mask=Causal("bottom_right"), requires_grad="v"),
    ),
)  # fmt: skip
