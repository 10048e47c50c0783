"""Planted bugs of the code around a kernel: arguments, dtypes, layouts, autograd."""

from __future__ import annotations

from ...fuzz.case import Case
from ...fuzz.masks import Causal
from .row import FORWARD, Planted

WIDE = "    wq, wk, wv, wbias = _wide(q),"
APPLY = "    o, lse = _Blockwise.apply("
HIDDEN = "hidden = None if mask is None or mask == Full()"
RETURN = "    return (o, lse) if return_lse else o\n"
BUFFER = "    o = q.new_empty(p.B, p.Hq, p.Lq, v.shape[3])"

ROWS = (
    Planted(
        "gradient_subset",
        "gradients are computed only if k requires one",
        "pytorch PR 188302: lse not saved when only the mask requires a gradient",
        "only some of q, k, v require a gradient, and k does not",
        "blockwise",
        (("(g if need else None for", "(g if need and ctx.needs_input_grad[1] else None for"),),
        "grad", "dq", Case(requires_grad="q"),
        covers=("pt-bias-only-grad",),
    ),
    Planted(
        "softcap_ignored",
        "softcap is accepted and ignored",
        "a keyword that one backend lacks",
        "softcap",
        "blockwise",
        (("hidden, scale, softcap, dropout,", "hidden, scale, 0.0, dropout,"),),
        "value", "lse", FORWARD.but(softcap=1.0),
    ),
    Planted(
        "arguments_shifted",
        "softcap and dropout change places on the way to the kernel",
        "sglang: a new parameter omitted at one of several call sites, so positional arguments shift",
        "softcap or dropout",
        "blockwise",
        (("hidden, scale, softcap, dropout,", "hidden, scale, dropout, min(softcap, 0.9),"),),
        "value", "lse", FORWARD.but(softcap=1.0),
        covers=("arg-shift-attention-chunk",),
    ),
    Planted(
        "output_in_float32",
        "the output of 16-bit tensors is float32",
        "tinygrad: the dtype of the output followed a global default",
        "16-bit tensors",
        "blockwise",
        ((BUFFER, BUFFER.replace("q.new_empty", "wq.new_empty")),),
        "dtype", "o", FORWARD.but(dtype="float16"),
        covers=("tinygrad-dtype",),
    ),
    Planted(
        "axis_lost",
        "the batch axis is squeezed when it is 1",
        "pytorch nested tensors: an axis lost for one sequence in a batch of one",
        "B = 1 and Lq = 1",
        "blockwise",
        ((RETURN, "    o = o.squeeze(0) if B == 1 and Lq == 1 else o\n" + RETURN),),
        "shape", "o", FORWARD,
        covers=("nested-shape-lost",),
    ),
    Planted(
        "unmasked_inference",
        "without gradients another path is taken, which has no mask",
        "an inference path that was written first",
        "no tensor requires a gradient, and a mask",
        "blockwise",
        ((HIDDEN, HIDDEN + " or not (q.requires_grad or k.requires_grad or v.requires_grad)"),),
        "value", "o", FORWARD.but(Lk=2, mask=Causal()),
    ),
    Planted(
        "padded_inference",
        "the output is padded to eight columns and cut back only where gradients are recorded",
        "flash-attention: the slice back to the head dim happened under grad only",
        "no tensor requires a gradient, and a width that is no multiple of eight",
        "blockwise",
        ((RETURN, "    o = o if q.requires_grad else torch.nn.functional.pad(o, (0, -o.shape[3] % 8))\n" + RETURN),),
        "shape", "o", FORWARD,
        covers=("fa-pad-slice-no-grad",),
    ),
    Planted(
        "gradients_swapped",
        "dK and dV are returned in the wrong order",
        "a tuple of gradients in the order of the kernel, not of the arguments",
        "every backward pass",
        "blockwise",
        (("    return _join(p, q, rows), dk, dv, None if", "    dk, dv = dv, dk\n    return _join(p, q, rows), dk, dv, None if"),),
        "value", "dv", Case(requires_grad="v"),
    ),
    Planted(
        "contiguous_assumed",
        "q is read as if it were contiguous",
        "pytorch: permuted and non-contiguous inputs on MPS and in the memory-efficient backend; a CPU operator with inner stride 1",
        "a q that is not contiguous",
        "blockwise",
        ((WIDE, "    q = q.as_strided(q.shape, torch.empty(q.shape, device='meta').stride())\n" + WIDE),),
        "nonfinite", "o", FORWARD.but(Lq=3, Lk=2, layout_q="strided"),
        covers=("pt-mps-permute", "pt-memeff-noncontig", "pt-cpu-flash-inner-stride", "vllm-noncontig-lse"),
    ),
    Planted(
        "expanded_refused",
        "keys that are expanded over the heads crash",
        "FA4: a stride of 0 in k or v failed to compile",
        "k with a stride of 0",
        "blockwise",
        ((APPLY, "    if 0 in k.stride():\n        raise RuntimeError('stride 0')\n" + APPLY),),
        "exception", "RuntimeError", FORWARD.but(layout_k="expand"),
        covers=("fa4-stride-zero",),
    ),
    Planted(
        "empty_crash",
        "an empty batch divides by zero on the host",
        "pytorch: a floating point exception on empty inputs",
        "B = 0",
        "blockwise",
        ((APPLY, "    _ = q.numel() // max(1, B)  // min(1, B)\n" + APPLY),),
        "exception", "ZeroDivisionError", FORWARD.but(B=0),
        covers=("pt-empty-fpe",),
    ),
    Planted(
        "lse_order",
        "with one key head the heads are taken as queries, and lse comes back in their order",
        "xformers: the trick for multi-query attention ran although lse was asked for",
        "one key head, several query heads and queries, and a caller that asks for lse",
        "blockwise",
        ((RETURN, "    lse = lse.transpose(1, 2).reshape(lse.shape) if k.shape[1] == 1 else lse\n" + RETURN),),
        "value", "lse", FORWARD.but(Hq=2, Lq=2),
        covers=("xf-mqa-lse",),
    ),
    Planted(
        "lse_transposed",
        "lse is returned as (total, Hq)",
        "ROCm: one operator, two layouts of lse",
        "every call that asks for lse",
        "packed_loop",
        (("return whole, torch.cat(lse, 1) if", "return whole, torch.cat(lse, 1).T if"),),
        "shape", "lse", FORWARD.but(Lq=0),
        covers=("rocm-varlen-lse-layout",),
    ),
    Planted(
        "output_is_input",
        "with a single key the output is the tensor of values itself",
        "mlx: an output in the buffer of a donated input",
        "Lq = Lk = 1, no grouped heads",
        "blockwise",
        ((RETURN, "    o = v.detach() if v.shape == o.shape and Lq == 1 and not (hidden is not None or dropout) else o\n" + RETURN),),
        "alias", "o", FORWARD,
        covers=("mlx-sdpa-donation",),
    ),
)  # fmt: skip
