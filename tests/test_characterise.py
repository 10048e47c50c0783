"""A fitted contract names the arithmetic that was planted, where it is seen, and nothing else."""

import time
from dataclasses import replace
from functools import cache

import pytest
import torch

from flashproof.fuzz.characterising import kept, plan, sample
from flashproof.fuzz.masks import Padding
from flashproof.fuzz.region import Region
from flashproof.fuzz.tensors import build
from flashproof.impls.emulation import Arithmetic, broken, run
from flashproof.oracles.characterise import fit
from flashproof.oracles.contract import contract_for
from flashproof.oracles.exact import Problem
from flashproof.oracles.fitted import Fit, Seen, nearer
from flashproof.oracles.sample import Sample
from flashproof.oracles.traits import ALLOWANCES, INSIDE, TRAITS

REGION = Region(softcap=False, dropout=False, dv_differs=False)
COUNT = 72


@cache
def problems(dtype, count=COUNT):
    cases = [c for c in plan(replace(REGION, dtypes=(dtype,)), count) if not c.data.startswith("nonfinite")]
    return [(c, Problem.of(build(c))) for c in cases]


def fitted(arithmetic, dtype="bfloat16", device="cpu", over=lambda: False):
    torch.set_num_threads(1)
    counts = {}
    return fit([sample(c, run(p, arithmetic), counts) for c, p in problems(dtype)], device, over=over)


def names(found: Fit):
    return [seen.trait.name for seen in found.traits]


PLANTED = {
    "dS from the rounded P": (broken(Arithmetic(), "ds_from_pc"), "bfloat16", ["p_in_ds"]),
    "normaliser from the rounded P": (Arithmetic(l_rounded=True), "bfloat16", ["l_rounded"]),
    "q scaled, then rounded": (Arithmetic(q_prescaled=True), "bfloat16", ["q"]),
    "lse in bfloat16": (broken(Arithmetic(), "lse_bf16"), "bfloat16", ["lse"]),
    "dP in bfloat16": (broken(Arithmetic(), "dp_bf16"), "float32", ["dp_bf16"]),
    "TF32": (Arithmetic(dots="tf32"), "float32", ["tf32"]),
    "truncated TF32": (Arithmetic(dots="tf32_rz"), "float32", ["tf32_rz"]),
    "bfloat16 dots": (Arithmetic(dots="bf16"), "float32", ["bf16"]),
    "cubic exp2": (Arithmetic(exp="cubic"), "float32", ["exp_cubic"]),
    "scores in bfloat16": (broken(Arithmetic(), "s_lowp"), "float32", ["s_bf16"]),
    "dS scaled before its cast": (Arithmetic(ds_scaled=True), "float16", ["ds_scaled"]),
    "two at once": (broken(Arithmetic(l_rounded=True), "ds_from_pc"), "bfloat16", ["p_in_ds", "l_rounded"]),
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("what", PLANTED)
def test_the_fit_names_exactly_what_was_planted(what):
    arithmetic, dtype, expected = PLANTED[what]
    found = fitted(arithmetic, dtype)
    assert names(found) == expected, found
    assert found.beyond[1] == 0
    contract_for(found.spec, dtype)


CONFORM = {
    "other tiles, reversed": Arithmetic(q_tile=8, kv_tile=64, delta="do.o32", order="reverse", exp="exp"),
    "textbook": Arithmetic(algorithm="textbook", delta="p.dp"),
    "flash": Arithmetic(),
}


@pytest.mark.parametrize("what", CONFORM)
@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_conforming_implementation_needs_no_trait(what, dtype):
    found = fitted(CONFORM[what], dtype)
    assert names(found) == [] and found.spec == "" and found.beyond == (0, 0)


def test_a_trait_is_seen_in_the_tensors_that_it_reaches():
    found = fitted(PLANTED["dS from the rounded P"][0])
    assert set(found.traits[0].tensors) == {"dq", "dk", "dbias"}


@pytest.mark.nightly
def test_a_rounded_normaliser_is_seen_in_lse_alone():
    assert set(fitted(Arithmetic(l_rounded=True)).traits[0].tensors) == {"lse"}


def test_of_a_wrong_target_no_trait_is_told_but_an_example():
    started = time.monotonic()
    found = fitted(broken(Arithmetic(), "miss_last_key"), over=lambda: time.monotonic() - started > 5)
    assert names(found) == [] and found.spec == "" and found.beyond[1] > 10
    assert (
        found.unexplained[0].startswith("o: ")
        and " still beyond the limit, as in bfloat16, B = " in found.unexplained[0]
    )


def test_a_leak_of_masked_nan_is_named_by_its_policy():
    case = plan(REGION, 4)[0].but(data="nonfinite_masked", dtype="float32", mask_form="bool", requires_grad="", bias="")
    case = case.but(mask=Padding((case.Lk - 5,)))
    p = Problem.of(build(case))
    outputs = {"o": torch.full((*p.q.shape[:3], p.v.shape[3]), torch.nan)}
    found = fit([Sample(p, outputs, "float32", None, "a leak")] * 3)
    assert names(found) == ["may_leak"] and found.spec == "masked_nonfinite=may_leak"


def test_items_that_no_fit_can_see_stay():
    assert kept("cudnn,kv_tile=64,dead_rows=nan,forward_only=true") == "kv_tile=64,forward_only=true"
    found = fit([sample(c, run(p, Arithmetic()), {}) for c, p in problems("bfloat16", 8)[:1]], kept="kv_tile=64")
    assert found.spec == "kv_tile=64" and found.preset == ""


def test_every_trait_is_a_contract_and_changes_something():
    dtypes = ("float32", "float16", "bfloat16")
    plain = [contract_for("", d).but(spec="") for d in dtypes]
    for t in (*TRAITS, *ALLOWANCES, *INSIDE):
        assert [contract_for(t.declared, d).but(spec="") for d in dtypes] != plain, t.name
    assert len({t.name for t in (*TRAITS, *ALLOWANCES, *INSIDE)}) == len(TRAITS) + len(ALLOWANCES) + len(INSIDE)


def test_what_the_default_allows_and_nothing_needs_may_be_taken_back():
    found = fitted(Arithmetic(p_dtype=torch.float32, ds_dtype=torch.float32))
    assert names(found) == [] and found.tighter.startswith("p_u=0,p_eta=2^-126,ds_u=0,ds_eta=2^-126,gqa_u=0")


@pytest.mark.nightly
def test_what_is_needed_is_not_taken_back():
    assert "p_u" not in fitted(Arithmetic()).tighter and "gqa_u=0" in fitted(Arithmetic()).tighter


@pytest.mark.nightly
def test_a_preset_that_says_the_same_is_named():
    assert fitted(Arithmetic(ds_scaled=True), "float16", "cuda").preset == "cudnn"


def test_a_trait_counts_as_seen_by_wrong_runs_or_by_the_size_of_errors():
    seen = Seen(TRAITS[0], {"o": (0, 0, 1.0, 1.0), "dk": (3, 0, 1.0, 1.0), "dv": (0, 0, 1.3, 1.02)})
    assert seen.tensors == ("dk", "dv") and nearer(0.5, 0.9) > 0 and nearer(0.0, 1.0) == 0.0


def test_the_plan_stays_inside_the_region_and_has_every_dtype():
    region = Region(dtypes=("float16", "bfloat16"), head_dims=(64,), masks=("none", "causal_bottom_right"), bias=False, scale=False,
                    dropout=False, softcap=False, lse=False, lse_grad=False, lq_differs=False, min_len=1)  # fmt: skip
    cases = plan(region, 100)
    assert len(cases) == 100 and not [c for c in cases if region.refuses(c)]
    assert {c.dtype for c in cases} == {"float16", "bfloat16"} and {c.G for c in cases} > {1}
    assert [c.key for c in cases] == [c.key for c in plan(region, 100)]
