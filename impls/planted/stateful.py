"""Planted bugs of state: what one call leaves behind for the next, or does to its inputs."""

from __future__ import annotations

from ...fuzz.case import Case
from ...fuzz.masks import Causal
from .row import FORWARD, Planted

REMEMBER = """SCALES = {}


def _remember(shape, default, scale):
    if scale is not None:
        SCALES[shape] = scale
    return SCALES.get(shape, default)


"""

PROBLEM = "@dataclass(frozen=True)\nclass Problem:"
KEEP = "KEPT = {}\n\n\n" + PROBLEM
HIDDEN = "hidden = None if mask is None or mask == Full() else ~mask.dense(B, Hq, Lq, k.shape[2], q.device)\n"
WIDE = "    wq, wk, wv, wbias = _wide(q),"
WIDE_TEXTBOOK = "    wq, wk, wv = q.to(wide), k.to(wide), v.to(wide)\n"
RETURN = "    return (o, lse) if return_lse else o\n"
APPLY = "    o, lse = _Blockwise.apply("

ROWS = (
    Planted(
        "stale_scale",
        "an explicit scale is remembered for its shape and used when a later call gives none",
        "graph caches keyed by shape alone",
        "an explicit scale, then a call of the same shape without one",
        "blockwise",
        (
            ("    scale = D**-0.5 if scale is None else scale\n", "    scale = _remember(tuple(q.shape), D**-0.5, scale)\n"),
            (
                "@dataclass(frozen=True)\nclass Problem:",
                REMEMBER + "@dataclass(frozen=True)\nclass Problem:",
            ),
        ),
        "value", "o", FORWARD.but(Lk=2, sequence="scale"),  # o, since not every target returns lse; one key has weight 1
        covers=("scale-cached",),
    ),
    Planted(
        "in_place",
        "q is multiplied by the scale in place; in float32 no conversion makes a copy first",
        "mlx PR 3121: an output or a scaled q in the buffer of an input",
        "float32 and a scale that is not 1",
        "blockwise",
        (
            ("from dataclasses import dataclass\n", "from dataclasses import dataclass, replace\n"),
            ("qi = p.grouped(wq[:, :, i])\n", "qi = p.grouped(wq[:, :, i].mul_(p.scale))\n"),
            ("s = _scores(p, qi, kj, wbias, i, j).s", "s = _scores(replace(p, scale=1.0), qi, kj, wbias, i, j).s"),
        ),
        "purity", "q", FORWARD.but(D=2),
    ),
    Planted(
        "kept_mask",
        "the dense mask is kept for its shape, whatever the mask",
        "mlx: the name of a cached kernel lacked do_causal",
        "two masks at one shape",
        "blockwise",
        ((HIDDEN, HIDDEN + "    hidden = KEPT.setdefault((B, Hq, Lq, k.shape[2]), hidden)\n"), (PROBLEM, KEEP)),
        "value", "o", FORWARD.but(Lk=2), before=(FORWARD.but(Lk=2, mask=Causal()),),
        covers=("mlx-kernel-name",),
    ),
    Planted(
        "kept_strides",
        "strides of q are kept for its shape and used for later tensors",
        "a graph captured for one layout, replayed on another",
        "two layouts at one shape",
        "blockwise",
        (
            (
                WIDE,
                "    q = q.as_strided(q.shape, KEPT.setdefault(q.shape, q.stride()), q.storage_offset())\n" + WIDE,
            ),
            (PROBLEM, KEEP),
        ),
        "nonfinite", "o", FORWARD.but(Lq=2), before=(FORWARD.but(Lq=2, layout_q="packed"),),
        covers=("graph-key-strides", "fa-layout-fuzz"),
    ),
    Planted(
        "kept_keys",
        "keys in float32 are kept for their address, which a later tensor may have too",
        "descriptors and casts cached by data_ptr",
        "two calls whose keys lie at one address",
        "blockwise",
        (
            ("_keys(k), _keys(v), None", "KEPT.setdefault((k.data_ptr(), k.shape), _keys(k)), _keys(v), None"),
            (PROBLEM, KEEP),
        ),
        "value", "o", FORWARD.but(dtype="float16", Lk=2, sequence="refill"),
    ),
    Planted(
        "kept_dropout",
        "the dropout mask is kept for its sizes, whatever the seed",
        "the host reads the seed before it is written, so an older one is used",
        "two seeds at one shape",
        "blockwise",
        (
            ("dropout_keep(self.seed,", "dropout_keep(KEPT.setdefault((self.B, self.Hq, self.Lq, self.Lk), self.seed),"),
            (PROBLEM, KEEP),
        ),
        "value", "o", FORWARD.but(Lk=2, dropout=0.5, seed=1), before=(FORWARD.but(Lk=2, dropout=0.5),),
        covers=("rocm-dropout-seed-race",),
    ),
    Planted(
        "first_call",
        "the first call at a shape adds to its accumulator twice",
        "an autotuner that runs a kernel which accumulates, without clearing between runs",
        "the first call at every shape",
        "blockwise",
        (
            (APPLY, "    o_scale = 1.0 if (q.shape, k.shape) in KEPT else 2.0\n    KEPT[q.shape, k.shape] = 1\n" + APPLY),
            (RETURN, "    o = o * o_scale\n" + RETURN),
            (PROBLEM, KEEP),
        ),
        "value", "o", FORWARD,
        covers=("autotune-masks-bugs",),
    ),
    Planted(
        "workspace",
        "the accumulator of dQ is a workspace that is not cleared between calls",
        "torch.empty for a buffer that atomics add to",
        "the second backward pass at a shape",
        "blockwise",
        (
            ("safe, delta, torch.zeros_like(wq))", "safe, delta, KEPT.setdefault(wq.shape, torch.zeros_like(wq)))"),
            (PROBLEM, KEEP),
        ),
        "repeat", "dq", Case(Lk=2, requires_grad="q"),
    ),
    Planted(
        "every_fourth",
        "every fourth call reads the scratch memory of another one",
        "a ring of buffers that is one too short",
        "four calls in a process",
        "blockwise",
        (
            (APPLY, "    KEPT[0] = KEPT.get(0, 0) + 1\n" + APPLY),
            (RETURN, "    o = o * 1.5 if KEPT[0] % 4 == 0 else o\n" + RETURN),
            (PROBLEM, KEEP),
        ),
        "value", "o", FORWARD, before=(FORWARD, FORWARD, FORWARD),
        covers=("uaf-splitkv",),
    ),
    Planted(
        "global_seed",
        "the generator of torch is seeded in every call",
        "dropout made reproducible at the cost of everybody else",
        "every call",
        "packed_loop",
        (("    starts_q, starts_k = cu", "    torch.manual_seed(0)\n    starts_q, starts_k = cu"),),
        "global-state", "random number generator", FORWARD,
    ),
    Planted(
        "do_in_place",
        "the incoming gradient is multiplied by the output where it lies",
        "a preprocessing step that reuses its input as a buffer",
        "float32, a backward pass",
        "blockwise",
        (("    delta = (wdo * o).sum(-1, keepdim=True)\n", "    delta = (wdo * o).sum(-1, keepdim=True)\n    wdo.mul_(o)\n"),),
        "purity", "do", Case(requires_grad="q"),
    ),
    Planted(
        "bias_in_place",
        "the mask is written into the bias",
        "masks and biases merged without a copy",
        "a bias of full size beside a mask",
        "blockwise",
        (
            (APPLY, "    if bias is not None and hidden is not None and bias.shape == hidden.shape:\n"
                    "        bias.data.masked_fill_(hidden, -1e4)\n" + APPLY),
        ),
        "purity", "bias", FORWARD.but(Lq=2, mask=Causal("bottom_right"), bias="normal"),
    ),
    Planted(
        "values_in_place",
        "NaN in v is replaced where it lies",
        "a cleaning step of a cache that writes to the cache",
        "NaN in v",
        "textbook",
        ((WIDE_TEXTBOOK, "    v.data.nan_to_num_()\n" + WIDE_TEXTBOOK),),
        "purity", "v", FORWARD.but(data="nonfinite", seed=1),
    ),
)  # fmt: skip
