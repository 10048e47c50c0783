"""Where a target compiles, few structures are drawn and many run-time shapes inside them."""

from __future__ import annotations

import pytest

from flashproof.fuzz.buckets import VARIANTS, WORK, Buckets, bucket, names, shape_class
from flashproof.fuzz.case import Case
from flashproof.fuzz.compiling import Compiled
from flashproof.fuzz.engine import COMPILES_BY, hunt
from flashproof.fuzz.execute import Execution
from flashproof.fuzz.found import Policy
from flashproof.fuzz.judge import Verdict
from flashproof.fuzz.learn import kinds
from flashproof.fuzz.region import Region
from flashproof.fuzz.shrink import WITHIN_BUCKET, Shrinker
from flashproof.fuzz.tensors import MAX_ORACLE_BYTES, oracle_bytes

REGION = Region(dropout=False)


class Runner:
    """Counts what a hunt compiles."""

    def __init__(self):
        self.info, self.compiled = {"target": "fake"}, Compiled()


class CompilingJudge:
    """Its three kernels compile anew for whatever `variant` says of a case."""

    def __init__(self, variant=lambda _: "", refuses=lambda _: ""):
        self.region, self.runner = REGION, Runner()
        self.variant, self.refuses, self.ran = variant, refuses, []

    def check(self, case, thorough=False, *, explain=True):
        self.ran.append(case)
        if self.refuses(case):
            return Verdict(case, "refused", execution=Execution("refused", message=self.refuses(case)))
        if self.variant(case):
            kernels = [f"{kernel} {self.variant(case)}" for kernel in ("forward", "dq", "dkdv")]
            self.runner.compiled.add({"variants": kernels, "built": 0, "seconds": 0.0})
        return Verdict(case, "pass")

    def again(self, case, thorough=True):
        return self.check(case)

    def restart(self):
        pass


def hunted(variant, examples=400, seed=0, **how):
    judge = CompilingJudge(variant, **how)
    campaign = hunt(judge, REGION, examples=examples, seed=seed, policy=Policy(variants=VARIANTS))
    return judge, campaign


def test_a_hunt_compiles_at_most_the_limit_and_uses_each_variant_often():
    judge, campaign = hunted(bucket)
    assert 30 <= len(campaign.compiled.variants) <= VARIANTS
    assert campaign.cases == 400 and len({c.key for c in judge.ran}) == 400


def test_sizes_that_compile_nothing_are_drawn_freely():
    judge, _ = hunted(bucket)
    assert len({(c.Lq, c.Lk) for c in judge.ran}) > 150


def test_the_limit_holds_for_a_kernel_that_is_specialised_on_every_size():
    judge, campaign = hunted(shape_class)
    assert len(campaign.compiled.variants) <= VARIANTS and campaign.cases == 400
    assert len({shape_class(c) for c in judge.ran}) <= VARIANTS // 3


def test_buckets_reach_every_structural_kind_of_the_region():
    judge, _ = hunted(bucket)
    reached = set().union(*map(names, judge.ran))
    missing = {k.name for k in kinds() if k.counted and k.served(REGION)} - reached
    assert missing <= {"float64"}


def test_the_same_seed_draws_the_same_cases_and_another_draws_others():
    first, second, other = (hunted(bucket, 150, seed)[0].ran for seed in (3, 3, 4))
    assert [c.key for c in first] == [c.key for c in second] != [c.key for c in other]


def test_a_case_of_a_bucket_is_no_more_work_than_a_drawn_case():
    judge, _ = hunted(bucket)
    work = max(c.B * c.Hq * c.Lq * c.Lk * max(c.D, c.Dv) for c in judge.ran)
    assert work <= WORK and max(map(oracle_bytes, judge.ran)) <= MAX_ORACLE_BYTES


def test_the_first_case_is_the_simplest():
    assert hunted(bucket, 8)[0].ran[0] == Case()


def test_a_target_that_compiles_nothing_is_given_cases_of_every_structure():
    judge = CompilingJudge()
    hunt(judge, REGION, examples=200, policy=Policy(variants=VARIANTS))
    assert len({bucket(c) for c in judge.ran[COMPILES_BY:]}) > 100


def test_a_bucket_whose_cases_are_all_refused_is_given_up():
    judge, _ = hunted(bucket, 300, refuses=lambda c: "" if c.dtype == "float32" else "float32 only")
    refused = [c for c in judge.ran[100:] if c.dtype != "float32"]
    assert len(refused) < 60


def test_no_bucket_is_opened_once_half_of_the_time_went_into_compilation():
    b = Buckets(0, spent=lambda: True)
    b.round(REGION, 8, 0)
    assert b.all == []


@pytest.mark.parametrize(("field", "value"), [("Lq", 7), ("B", 3), ("seed", 9), ("data", "uniform"), ("scale", 0.5)])
def test_run_time_arguments_stay_in_the_bucket(field, value):
    assert bucket(Case().but(**{field: value})) == bucket(Case())


@pytest.mark.parametrize(
    ("field", "value"), [("D", 2), ("dtype", "float16"), ("softcap", 5.0), ("layout_q", "blhd"), ("bias", "normal")]
)
def test_structure_leaves_the_bucket(field, value):
    assert bucket(Case().but(**{field: value})) != bucket(Case())


def test_a_shrink_stays_in_the_bucket_before_it_leaves_it():
    start = Case(Lq=40, Lk=50, B=2, D=64, Dv=64, dtype="bfloat16", softcap=30.0, data="outlier", seed=77)
    asked = []
    s = Shrinker(start, lambda c: asked.append(c) or c.requires_grad == "qkv", first=WITHIN_BUCKET)
    s.run()
    left = next(n for n, c in enumerate(asked) if bucket(c) != bucket(start))
    assert (asked[left - 1].Lq, asked[left - 1].Lk, asked[left - 1].B) == (1, 1, 1) and s.best == Case()


def test_a_report_adds_what_executions_tell():
    compiled = Compiled()
    assert compiled.add({"variants": ["a 1", "b 2"], "built": 1, "seconds": 2.0}) == 2
    assert compiled.add(Execution("ok", compiled={"variants": ["a 1"], "built": 0, "seconds": 0.5}).compiled) == 0
    assert compiled.to_json() == {"variants": 2, "built": 1, "seconds": 2.5, "kernels": {"a": 1, "b": 1}, "configs": {}}
