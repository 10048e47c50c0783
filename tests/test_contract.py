"""Contracts as they are declared: presets, fields, defaults and their errors."""

from __future__ import annotations

import pytest

from flashproof.oracles.contract import PRESETS, UNIT, Contract, contract_for

DTYPES = ("float32", "float16", "bfloat16", "float64")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_declares_a_contract_for_every_dtype(name: str, dtype: str) -> None:
    assert contract_for(name, dtype, "cuda").spec == name


def test_float32_means_ieee_on_every_device() -> None:
    assert contract_for("", "float32", "cuda") == contract_for("", "float32", "cpu")
    assert contract_for("", "float32", "cuda").dot_u == 0.0


def test_sixteen_bit_dtypes_accumulate_as_tensor_cores_on_a_gpu() -> None:
    assert contract_for("", "bfloat16", "cuda:1").acc_k == 3.0
    assert contract_for("", "bfloat16", "cpu").acc_k == 1.0


def test_items_apply_from_left_to_right() -> None:
    c = contract_for("tf32,kv_tile=64,gqa_u=io,dot_u=2^-12", "float32")
    assert (c.dot_u, c.p_u, c.kv_tile, c.gqa_u) == (2.0**-12, 2.0**-11, 64, 2.0**-24)


def test_io_is_the_unit_of_the_dtype() -> None:
    assert contract_for("dq_acc_u=io", "bfloat16").dq_acc_u == UNIT["bfloat16"]


def test_words_and_flags_are_read() -> None:
    c = contract_for("ds_scaled=true,delta=p.dp,dead_lse=+inf,deterministic=o+lse,masked_nonfinite=may_leak")
    assert (c.ds_scaled, c.delta, c.dead_lse, c.deterministic) == (True, "p.dp", "+inf", ("o", "lse"))
    assert c.masked_nonfinite == "may_leak"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("tf23", "must name a preset (default, ieee, tf32"),
        ("kv_tle=3", "must be one of acc_eta"),
        ("exp_u=tiny", "must be a number >= 0, io or io_eta, got exp_u=tiny"),
        ("exp_u=-1", "must be a number >= 0"),
        ("exp_u=nan", "must be a number >= 0"),
        ("dead_rows=one", "must be one of zero, nan, mean, any"),
        ("deterministic=o+x", "must be one of o, lse, dq, dk, dv, dbias"),
        ("dot_rz=maybe", "must be one of true, false"),
        ("io=float16", "must be one of"),
    ],
)
def test_a_wrong_declaration_names_what_exists(spec: str, said: str) -> None:
    with pytest.raises(ValueError, match="contract") as e:
        contract_for(spec)
    assert said in str(e.value)


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="dtype='int8'"):
        contract_for("", "int8")


def test_the_exact_contract_rounds_nothing_above_the_declared_constant() -> None:
    c = Contract.exact(2.0**-20)
    units = [getattr(c, n) for n in ("u", "dot_u", "acc_u", "p_u", "ds_u", "out_u", "exp_u", "lse_u")]
    assert max(units) <= 2.0**-50
    assert c.constant_u == 2.0**-20


def test_a_scaled_ds_is_declared_only_where_it_is_true() -> None:
    declared = {name for name in PRESETS if contract_for(name, "float16", "cuda").ds_scaled}
    assert declared == {"cudnn", "efficient"}
