"""Planted bugs: each is one edit of a correct implementation, and the harness must find it and shrink it to the case stated here.

Most are bugs that attention kernels have had; `source` says which. `minimal` was worked out by hand from the edit, not from
what the shrinker gave. Each is registered as the target `planted_NAME`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..fuzz.case import Case
from ..fuzz.masks import Causal
from . import REGISTRY, blockwise, register, triton_flash  # noqa: F401 - they register what is broken here
from .planted_edits import Edit, edited, whole


@dataclass(frozen=True)
class Planted:
    """One bug: the module and what is replaced in it; what goes wrong and where it was seen; who catches it and how small."""

    name: str
    story: str
    source: str
    part: str
    edits: tuple[Edit, ...]
    oracle: str
    tensor: str
    minimal: Case

    @property
    def target(self) -> str:
        """The name it is registered under."""
        return f"planted_{self.name}"


FORWARD = Case(requires_grad="")
"""The smallest case: every size 1, no features, forward only."""

REMEMBER = """SCALES = {}


def _remember(shape, default, scale):
    if scale is not None:
        SCALES[shape] = scale
    return SCALES.get(shape, default)


"""
LOAD_ADD_STORE = """here = in_row[:, None] & in_j[None, :]
                tl.store(dbias_at, tl.load(dbias_at, mask=here, other=0.0) + ds, mask=here)"""
O_STORE = "acc.to(O.dtype.element_ty), mask=in_row[:, None] & in_dv)"

BLOCKWISE = (
    Planted(
        "last_tile",
        "the last, partial key tile is dropped when there is more than one",
        "xformers commit 3e4a1b4b: a bound computed from the wrong divisor lost the tail of a split",
        "blockwise",
        (("range(0, self.Lk, self.Bc)", "range(0, self.Lk - self.Lk % self.Bc if self.Lk > self.Bc else self.Lk, self.Bc)"),),
        "value", "o", FORWARD.but(Lk=17),
    ),
    Planted(
        "head_mapping",
        "query head h reads key head h % Hkv instead of h // G",
        "a repeat where a repeat_interleave was meant; the two agree for one key head and for G = 1",
        "blockwise",
        (
            (
                "x.reshape(self.B * self.Hkv, self.Hq // self.Hkv * x.shape[2], x.shape[3])",
                "x.unflatten(1, (self.Hq // self.Hkv, self.Hkv)).transpose(1, 2).flatten(2, 3).flatten(0, 1)",
            ),
            (
                "x.view(self.B, self.Hq, x.shape[1] * self.Hkv // self.Hq, x.shape[2])",
                "x.unflatten(1, (self.Hq // self.Hkv, -1)).unflatten(0, (self.B, self.Hkv)).transpose(1, 2).flatten(1, 2)",
            ),
        ),
        "value", "o", FORWARD.but(Hq=4, Hkv=2),
    ),
    Planted(
        "dropped_delta",
        "dS = P * dP without the row sums of dO * O",
        "FlashAttention, algorithm 4, line 19",
        "blockwise",
        (("delta = (wdo * o).sum(-1, keepdim=True)", "delta = torch.zeros_like(lse).unsqueeze(-1)"),),
        "value", "dq", Case(requires_grad="q"),
    ),
    Planted(
        "stale_scale",
        "an explicit scale is remembered for its shape and used when a later call gives none",
        "graph caches keyed by shape alone",
        "blockwise",
        (
            ("    scale = D**-0.5 if scale is None else scale\n", "    scale = _remember(tuple(q.shape), D**-0.5, scale)\n"),
            (
                "@dataclass(frozen=True)\nclass Problem:",
                REMEMBER + "@dataclass(frozen=True)\nclass Problem:",
            ),
        ),
        "value", "o", FORWARD.but(Lk=2, sequence="scale"),  # o, since not every target returns lse; one key has weight 1
    ),
    Planted(
        "softcap_derivative",
        "dS is not multiplied by 1 - tanh^2",
        "flash-attention PR 2402",
        "blockwise",
        (("ds = ds * (1 - tanh * tanh)", "ds = ds * 1"),),
        "value", "dq", Case(Lk=2, softcap=1.0, requires_grad="q"),
    ),
    Planted(
        "lse_base_2",
        "lse is returned as a binary logarithm",
        "kernels that work in powers of two and convert on one path only",
        "blockwise",
        (("        return o, lse\n\n    @staticmethod", "        return o, lse / math.log(2)\n\n    @staticmethod"),),
        "value", "lse", FORWARD,
    ),
    Planted(
        "dk_scale",
        "dK of the last key tile is not multiplied by the scale when there is more than one",
        "an epilogue written twice, for full tiles and for the tail",
        "blockwise",
        (("(dk * p.scale)", "(dk * torch.where(torch.arange(p.Lk)[:, None] < ((p.Lk - 1) // p.Bc * p.Bc or p.Lk), p.scale, 1.0))"),),
        "value", "dk", Case(Lk=17, D=2, requires_grad="k"),
    ),
    Planted(
        "in_place",
        "q is multiplied by the scale in place; in float32 no conversion makes a copy first",
        "mlx PR 3121: an output or a scaled q in the buffer of an input",
        "blockwise",
        (
            ("from dataclasses import dataclass\n", "from dataclasses import dataclass, replace\n"),
            ("qi = p.grouped(wq[:, :, i])\n", "qi = p.grouped(wq[:, :, i].mul_(p.scale))\n"),
            ("s = _scores(p, qi, kj, wbias, i, j).s", "s = _scores(replace(p, scale=1.0), qi, kj, wbias, i, j).s"),
        ),
        "purity", "q", FORWARD.but(D=2),
    ),
    Planted(
        "dead_row_nan",
        "exp(-inf - -inf) in a row that a tile masks out wholly",
        "pytorch issue 127055, candle issue 3438",
        "blockwise",
        (("m_safe = m_new.masked_fill(m_new == -math.inf, 0.0)", "m_safe = m_new"),),
        "dead-row", "o", FORWARD.but(Lq=2, mask=Causal("bottom_right")),
    ),
    Planted(
        "max_from_zero",
        "the running maximum starts at 0, so the weights of a row whose scores are all far below it underflow",
        "finite stand-ins for -inf as the first maximum",
        "blockwise",
        (("qi.shape[:2], 1), -math.inf)", "qi.shape[:2], 1), 0.0)"),),
        "value", "o", FORWARD.but(data="large"),
    ),
    Planted(
        "dropout_backward",
        "dP is not multiplied by the dropout mask",
        "FlashAttention, algorithm 4, line 17",
        "blockwise",
        (("dropped, dprob = prob * drop, dprob * drop", "dropped = prob * drop"),),
        "value", "dq", Case(dropout=0.5, requires_grad="q"),
    ),
    Planted(
        "lse_gradient",
        "the gradient that arrives through lse is ignored",
        "kernels that return lse for ring attention and never differentiate it",
        "blockwise",
        (("delta = delta - dlse.unsqueeze(-1)", "delta = delta - 0 * dlse.unsqueeze(-1)"),),
        "value", "dq", Case(lse_grad=True, requires_grad="q"),
    ),
    Planted(
        "gradient_subset",
        "gradients are computed only if k requires one",
        "pytorch PR 188302: lse not saved when only the mask requires a gradient",
        "blockwise",
        (("(g if need else None for", "(g if need and ctx.needs_input_grad[1] else None for"),),
        "grad", "dq", Case(requires_grad="q"),
    ),
)  # fmt: skip

TRITON = (
    Planted(
        "tail_mask",
        "keys beyond Lk take part in the softmax as zeros",
        "flash-attention commit a4f148b6, flashinfer issue 3717",
        "triton_scores",
        (("    keep = in_j\n", "    keep = j >= 0\n"),),
        "value", "o", FORWARD,
    ),
    Planted(
        "causal_off_by_one",
        "a query sees one key beyond the diagonal",
        "candle commits 25bcad290 and 97424289d are of this family",
        "triton_flash",
        (("cls(-OPEN, _diagonal(align, q, k), None", "cls(-OPEN, _diagonal(align, q, k) + 1, None"),),
        "value", "o", FORWARD.but(Lk=2, mask=Causal()),
    ),
    Planted(
        "causal_alignment",
        "the bottom-right diagonal is taken as the top-left one",
        "flash-attention changed its alignment in version 2.1",
        "triton_flash",
        (('return k.shape[2] - q.shape[2] if align == "bottom_right" else 0', "return 0"),),
        "value", "o", FORWARD.but(Lk=2, mask=Causal("bottom_right")),
    ),
    Planted(
        "causal_bound",
        "the loop over keys ends as if the diagonal were top-left; the mask itself is right",
        "sparkinfer issue 3",
        "triton_forward",
        (("tl.minimum(i0 + ROWS + band_high, Lk)", "tl.minimum(i0 + ROWS, Lk)"),),
        "value", "o", FORWARD.but(Lk=65, mask=Causal("bottom_right")),
    ),
    Planted(
        "do_strides",
        "dK and dV read dO with the strides of a contiguous tensor",
        "gradients of a sum or of a transpose are not contiguous",
        "triton_flash",
        (("do, *at[3], lse, delta, dk", "do, *o.stride(), lse, delta, dk"),),
        "memory", "DO", Case(Dv=2, layout_do="strided", requires_grad="q"),  # both kernels run whatever is asked for
    ),
    Planted(
        "dv_strides",
        "dV is written with the row stride of dK",
        "seen while these kernels were written",
        "triton_backward",
        (("DV + (first + at_j) * Dv", "DV + (first + at_j) * D"),),
        "value", "dv", Case(Lk=2, Dv=2, requires_grad="v"),
    ),
    Planted(
        "k_tail_load",
        "k is loaded beyond its last row; the values are masked later, so only memory shows it",
        "xformers commit 3e4a1b4b",
        "triton_forward",
        (("mask=in_d[:, None] & in_j[None, :], other=0.0", "mask=in_d[:, None], other=0.0"),),
        "memory", "K", FORWARD,
    ),
    Planted(
        "o_store",
        "o is stored beyond its last row",
        "a store mask that checks the width only",
        "triton_forward",
        ((O_STORE, O_STORE.replace("in_row[:, None] & ", "")),),
        "memory", "O", FORWARD,
    ),
    Planted(
        "early_return",
        "a program whose band holds no key leaves its rows of o unwritten",
        "flash-attention issue 2421: NaN where a sequence has no queries or keys",
        "triton_forward",
        ((O_STORE, O_STORE.replace("& in_dv", "& in_dv & (start < end)")),),
        "memory", "o", FORWARD.but(Lk=0),
    ),
    Planted(
        "bias_race",
        "programs add to a shared gradient of the bias by load, add and store",
        "an atomic addition replaced; right whenever programs run one after another",
        "triton_backward",
        (
            (
                'tl.atomic_add(dbias_at, ds, mask=in_row[:, None] & in_j[None, :], sem="relaxed")',
                LOAD_ADD_STORE,
            ),
        ),
        "memory", "DBIAS", Case(B=2, bias="normal", requires_grad="b"),
    ),
    Planted(
        "bias_workspace",
        "the workspace that a shared gradient of the bias is summed in is not cleared",
        "torch.empty where torch.zeros was meant",
        "triton_flash",
        (("bias.new_zeros(", "bias.new_empty("),),
        "memory", "DBIAS", Case(B=2, bias="normal", requires_grad="b"),
    ),
)  # fmt: skip

PLANTED: dict[str, Planted] = {p.name: p for p in (*BLOCKWISE, *TRITON)}


def _register(bug: Planted) -> None:
    clean = REGISTRY[whole(bug.part)]

    @functools.cache
    def faulty() -> Callable[..., Any]:
        return edited(bug.part, bug.edits, bug.name)

    @functools.wraps(clean.call)
    def attention(*args: Any, **kwargs: Any) -> Any:
        return faulty()(*args, **kwargs)

    declared = {n: getattr(clean, n) for n in ("dialect", "supports", "contract", "devices", "triton")}
    register(name=bug.target, summary=f"planted bug: {bug.story}", **declared)(attention)


for _bug in PLANTED.values():
    _register(_bug)
