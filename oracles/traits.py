"""Named traits of an implementation's arithmetic: what a contract is fitted from.

A trait is what one line of a kernel does to its numbers, written as the contract items that declare it. `io` stands for the
dtype of q, k, v, so that one trait speaks of several dtypes; presets such as tf32 change float32 only.
"""

from __future__ import annotations

from dataclasses import dataclass

_TIGHTER = "none needed: this is tighter than the default"


@dataclass(frozen=True)
class Trait:
    """One deviation from the default contract: how to declare it, what it is, and the change of the code that removes it.

    Of one `group` a contract has at most one. A `policy` says what is answered where the definition leaves a choice: it
    shows in wrong elements only, never in the size of errors.
    """

    name: str
    declared: str
    words: str
    code_change: str
    group: str
    policy: bool = False


_TF32 = 'input_precision="ieee" in tl.dot; torch.backends.cuda.matmul.allow_tf32 = False'
_ACC = "accumulate dk and dv in float32 across query tiles"


def _formats(field: str, eta: str, words: str, change: str) -> tuple[Trait, ...]:
    """A stage stored in the dtype of q, k, v; in bfloat16 or float16 whatever that dtype is."""
    rows = (
        (field.removesuffix("_u"), "io", "io_eta", "the dtype of q, k, v"),
        (f"{field.removesuffix('_u')}_bf16", "2^-8", "2^-126", "bfloat16"),
        (f"{field.removesuffix('_u')}_fp16", "2^-11", "2^-25", "float16"),
    )
    return tuple(
        Trait(name, f"{field}={u}" + (f",{eta}={small}" if eta else ""), words.format(dtype), change, field)
        for name, u, small, dtype in rows
    )


TRAITS: tuple[Trait, ...] = (
    Trait(
        "ds_scaled", "ds_scaled=true", "dS multiplied by the scale before its cast",
        "multiply the accumulated dq and dk by the scale", "ds_scaled",
    ),
    Trait(
        "p_in_ds", "p_in_ds_u=io,p_in_ds_eta=io_eta", "dS made from the rounded P",
        "use the float32 P in dS = P * (dP - delta)", "p_in_ds",
    ),
    Trait(
        "l_rounded", "l_from_rounded_p=true", "the normaliser summed from the rounded P", "sum P before its cast", "l",
    ),
    *_formats("q_u", "", "q multiplied by the scale and then rounded to {}", "multiply the float32 scores by the scale, not q"),
    *_formats("s_u", "s_eta", "scores stored in {}", "keep the scores in float32 until the softmax"),
    *_formats("dp_u", "dp_eta", "dP stored in {}", "keep dP in float32: its cancellation with delta amplifies the rounding"),
    *_formats("lse_u", "", "lse stored in {}", "allocate lse as float32"),
    Trait("p_bf16", "p_u=2^-8,p_eta=2^-126", "P cast to bfloat16", "cast P to the dtype of v, no narrower", "p_u"),
    Trait("p_fp8", "p_u=2^-4,p_eta=2^-10", "P cast to e4m3", "cast P to the dtype of v, no narrower", "p_u"),
    Trait("ds_bf16", "ds_u=2^-8,ds_eta=2^-126", "dS cast to bfloat16", "cast dS to the dtype of k, no narrower", "ds_u"),
    *(
        Trait(
            f"dkv_acc_{n}", f"dkv_acc_u=io,acc_eta=io_eta,q_tile={n}",
            f"dk and dv accumulated in the dtype of q, k, v over tiles of {n} queries", _ACC, "dkv_acc",
        )
        for n in (16, 32, 64, 128)
    ),
    Trait(
        "dq_acc", "dq_acc_u=io,acc_eta=io_eta", "dq accumulated in the dtype of q, k, v across key tiles",
        "accumulate dq in float32 across key tiles", "dq_acc",
    ),
    Trait("lowp", "lowp", "every intermediate stored in the dtype of q, k, v", "keep scores, dP and P for dS in float32", "lowp"),
    Trait("tf32", "tf32", "float32 operands of dots rounded to TF32", _TF32, "dot_u"),
    Trait("tf32_rz", "tf32_rz", "float32 operands of dots truncated to TF32", _TF32, "dot_u"),
    Trait("tf32x3", "tf32x3", "float32 dots by three TF32 dots", _TF32, "dot_u"),
    Trait("bf16x3", "bf16x3", "float32 dots by three bfloat16 dots", 'input_precision="ieee" in tl.dot', "dot_u"),
    Trait("bf16", "bf16", "float32 operands of dots rounded to bfloat16", "keep the operands of the dots in float32", "dot_u"),
    Trait("hopper", "hopper", "a truncating accumulator of 25 bits (tensor cores)", "none: it is the hardware's", "acc"),
    Trait(
        "acc_13_bits", "acc_u=2^-14,acc_k=3", "an accumulator of 13 bits (the FP8 mode of Hopper)",
        "promote the accumulator to float32 between blocks", "acc",
    ),
    Trait(
        "exp_1e-5", "exp_u=1e-5", "an exponential with relative error 1e-5",
        "use exp2 of the hardware or a longer polynomial", "exp_u",
    ),
    Trait(
        "exp_cubic", "exp_u=1e-4", "an exponential with relative error 1e-4 (a cubic polynomial)",
        "use exp2 of the hardware or a longer polynomial", "exp_u",
    ),
    Trait("exp_half", "exp_u=2^-10", "an exponential in half precision", "compute the exponential in float32", "exp_u"),
    Trait(
        "constants", "constant_u=2^-17", "a constant written short (log2(e), ln(2), the scale)",
        "write the constant to nine digits", "constant_u",
    ),
    Trait(
        "may_leak", "masked_nonfinite=may_leak", "NaN or Inf in keys that every row masks out reaches the output",
        "mask v, or skip those keys", "masked_nonfinite", policy=True,
    ),
    *(
        Trait(
            f"dead_rows_{word}", f"dead_rows={word}", f"rows with no allowed key give {what}", "write zeros there", "dead_rows",
            policy=True,
        )
        for word, what in (("nan", "NaN"), ("mean", "the mean of v"), ("any", "something else than zeros"))
    ),
    *(
        Trait(
            f"dead_lse_{word}", f"dead_lse={word}", f"lse of rows with no allowed key is {what}", "write -inf there", "dead_lse",
            policy=True,
        )
        for word, what in (("+inf", "+inf"), ("any", "something else than -inf"))
    ),
    Trait(
        "nan_vanishes", "nonfinite=ignore", "a NaN among the allowed keys may vanish", "let NaN through the maximum", "nonfinite",
        policy=True,
    ),
    Trait(
        "nan_spreads", "nonfinite=any", "a NaN in one row may reach other rows", "keep the rows apart", "nonfinite", policy=True
    ),
)  # fmt: skip
"""In the order in which equally good ones are preferred."""

ALLOWANCES: tuple[Trait, ...] = (
    Trait("gqa_float32", "gqa_u=0,gqa_eta=0", "the query heads of a group summed in float32", _TIGHTER, "gqa"),
    Trait(
        "dbias_float32",
        "dbias_u=0,dbias_eta=0",
        "dS summed in float32 over the axes that the bias broadcasts",
        _TIGHTER,
        "dbias",
    ),
)
"""Without the roundings of sums that the default contract allows everybody. They hide others, so a fit weighs both."""

INSIDE: tuple[Trait, ...] = (
    Trait(
        "float32_inside",
        "p_u=0,p_eta=2^-126,ds_u=0,ds_eta=2^-126",
        "P and dS kept in float32 for the dots",
        _TIGHTER,
        "inside",
    ),
    Trait("p_float32", "p_u=0,p_eta=2^-126", "P kept in float32 for the dots", _TIGHTER, "inside"),
    Trait("ds_float32", "ds_u=0,ds_eta=2^-126", "dS kept in float32 for the dots", _TIGHTER, "inside"),
)
"""Without the casts of P and dS, the most first."""
