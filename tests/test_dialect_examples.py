"""Each dialect has a correct example target, which a hunt lets pass, and ten faulty ones, which it catches and makes small."""

import re
from pathlib import Path

import pytest

from flashproof.fuzz.binding import DIALECTS
from flashproof.fuzz.case import Case
from flashproof.fuzz.engine import hunt
from flashproof.fuzz.execute import Runner
from flashproof.fuzz.found import Policy
from flashproof.fuzz.judge import Judge
from flashproof.fuzz.masks import Causal, Packed, Window
from flashproof.fuzz.strategies import cases

TARGETS = Path(__file__).parent / "targets"
RIGHT = {"sdpa": "sdpa", "flash_attn": "flash", "flash_attn_varlen": "varlen", "flex": "flex", "native": "native"}
FILES = {"sdpa": "faulty", **{d: f"wrong_{n}" for d, n in RIGHT.items() if d != "sdpa"}}
FIRST = Policy(more=(0, 0), distinct=1, shrink_seconds=60.0, behind_probes=0)
"""The first failure alone, shrunk without a hurry, so that a busy machine gives the same case."""


def forward(**changes):
    return Case(requires_grad="", **changes)


BOTTOM_RIGHT, ONE_BACK = Causal("bottom_right"), Window(0, -1, "bottom_right")
FAULTS = {
    "sdpa": {
        "wrong_value": ("value:o", forward()),
        "ignores_causal": ("value:o", forward(Lk=2, mask=Causal())),
        "writes_input": ("purity:k", forward()),
        "writes_past_input": ("guard:q", forward()),
        "uninitialised": ("nonfinite:o", forward()),
        "returns_input": ("alias:o", forward()),
        "returns_wrong_shape": ("shape:o", forward()),
        "returns_double": ("dtype:o", forward()),
        "detached": ("grad:o", Case(requires_grad="q")),
        "drops_key_gradient": ("grad:dk", Case(requires_grad="qk")),
        "changes_state": ("global-state:float32 matmul precision", forward()),
    },
    "flash_attn": {
        "causal_top_left": ("value:o", forward(Lk=2, mask=BOTTOM_RIGHT)),
        "window_one_wider": ("value:o", forward(Lk=2, mask=ONE_BACK)),
        "ignores_softcap": ("value:o", forward(Lk=2, softcap=1.0)),
        "scale_of_the_values_width": ("value:o", forward(Lk=2, Dv=2)),
        "binary_logarithm": ("value:lse", forward()),
        "lse_with_heads_last": ("shape:lse", None),
        "last_key_of_a_tail_lost": ("value:o", forward(Lk=17)),
        "heads_interleaved": ("value:o", forward(Hq=4, Hkv=2)),
        "dead_rows_are_means": ("dead-row:o", forward(Lk=0)),
        "one_head_of_a_group_gives_dv": ("value:dv", Case(Hq=2, requires_grad="v")),
    },
    "flash_attn_varlen": {
        "one_sequence": ("value:o", forward(B=2)),
        "keys_by_the_lengths_of_q": ("exception:RuntimeError", None),
        "one_key_of_the_neighbour": ("value:o", forward(B=2)),
        "causal_top_left": ("value:o", forward(Lk=2, mask=BOTTOM_RIGHT)),
        "diagonal_of_the_longest": ("value:o", forward(Lq=3, Lk=2, mask=Packed((1, 2), (1, 1), "bottom_right"))),
        "window_lost_in_decoding": ("value:o", forward(Lk=2, mask=ONE_BACK)),
        "stops_at_an_empty_sequence": ("value:o", forward(Lk=2, mask=Packed((0, 1), (1, 1)))),
        "keeps_rows_without_keys": ("dead-row:o", forward(Lk=0)),
        "keys_cut_at_64": ("value:o", forward(Lk=65)),
        "dv_of_the_first_sequence_alone": ("value:dv", Case(B=2, requires_grad="v")),
        "moves_cu_seqlens": ("purity:cu_seqlens_q", forward()),
        "lse_with_heads_last": ("shape:lse", None),
    },
    "flex": {
        "ignores_score_mod": ("value:lse", forward(bias="normal")),
        "ignores_block_mask": ("value:o", forward(Lk=2, mask=Causal())),
        "score_mod_before_scale": ("value:lse", forward(D=2, bias="normal")),
        "first_batch_everywhere": ("value:dbias", None),
        "key_heads_for_heads": ("value:lse", forward(Hq=2, bias="normal", bias_axes="h")),
        "query_index_within_its_tile": ("value:o", forward(Lq=17, Lk=2, mask=Causal())),
        "partial_blocks_are_full": ("value:o", forward(Lk=2, mask=Causal())),
        "last_key_of_a_tile_lost": ("value:o", forward(Lk=16, mask=BOTTOM_RIGHT)),
        "heads_interleaved": ("value:o", forward(Hq=4, Hkv=2)),
        "lse_before_score_mod": ("value:lse", forward(bias="normal")),
        "dead_rows_are_nan": ("dead-row:o", forward(Lk=0)),
    },
    "native": {
        "ignores_the_mask": ("value:o", forward(Lk=2, mask=Causal())),
        "bias_of_the_first_batch": ("value:lse", forward(B=2, bias="normal", bias_axes="b")),
        "bias_of_the_first_head": ("value:lse", forward(Hq=2, Hkv=2, bias="normal", bias_axes="h")),
        "bias_gradient_is_a_mean": ("value:dbias", Case(B=2, Lk=2, bias="normal", requires_grad="b")),
        "bias_before_softcap": ("value:o", forward(Lk=2, bias="normal", softcap=1.0)),
        "softcap_divides_only": ("value:o", forward(Lk=2, softcap=2.0)),
        "reads_a_batch_too_few": ("value:o", forward(B=3, Lk=2)),
        "dead_rows_are_nan": ("dead-row:o", forward(Lk=0)),
        "lse_of_every_key": ("value:lse", forward(Lk=2, mask=Causal())),
        "a_column_beyond_64_lost": ("value:o", forward(Dv=65)),
    },
}
"""Per dialect and faulty target: the key of the first failure, and the case it shrinks to where a person would write that."""
LONG = {
    "diagonal_of_the_longest", "window_lost_in_decoding", "stops_at_an_empty_sequence", "keys_cut_at_64",
    "dv_of_the_first_sequence_alone", "query_index_within_its_tile", "key_heads_for_heads", "first_batch_everywhere",
    "last_key_of_a_tile_lost", "heads_interleaved", "window_one_wider",
}  # fmt: skip
ROWS = [
    pytest.param(d, name, key, case, marks=[pytest.mark.nightly] * (name in LONG), id=f"{d}-{name}")
    for d, rows in FAULTS.items()
    for name, (key, case) in rows.items()
]


def sizes(case):
    return case.B * case.Hq * case.Lq * case.Lk * case.D * case.Dv


def hunted(name, examples, policy=FIRST, seed=0, **narrowed):
    runner = Runner(f"{TARGETS}/{name.partition(':')[0]}.py:{name.partition(':')[2]}")
    judge = Judge(runner, runner.implementation.contract)
    return hunt(judge, examples=examples, policy=policy, seed=seed, strategy=lambda region: cases(region, **narrowed))


def test_every_dialect_has_a_correct_target_and_ten_faulty_ones():
    assert set(RIGHT) == set(FILES) == set(FAULTS) == set(DIALECTS) - {"adapter"}
    assert all(len(rows) >= 10 for rows in FAULTS.values())


@pytest.mark.parametrize("dialect", [d for d in FAULTS if d != "sdpa"])
def test_every_faulty_target_of_a_file_is_hunted(dialect):
    written = re.findall(r"^(\w+) = partial", (TARGETS / f"{FILES[dialect]}.py").read_text(), re.MULTILINE)
    assert written == list(FAULTS[dialect])


@pytest.mark.nightly
@pytest.mark.parametrize("dialect", RIGHT)
def test_a_hunt_lets_the_correct_target_pass(dialect):
    campaign = hunted(f"right:{RIGHT[dialect]}", 120, max_len=70)
    assert campaign.info["dialect"] == dialect
    assert not campaign.failures and campaign.accepted > 90 and not campaign.refused


@pytest.mark.parametrize(("dialect", "name", "key", "case"), ROWS)
def test_a_hunt_catches_the_fault_and_makes_it_small(dialect, name, key, case):
    without = ("sequence", "layouts", "dropout", "data")
    for seed in range(6):  # which finding comes first depends on the cases that are drawn
        campaign = hunted(f"{FILES[dialect]}:{name}", 200, seed=seed, max_len=140, dtypes=["float32"], without=without)
        if [f.key for f in campaign.failures] == [key]:
            break
    (failure,) = campaign.failures
    assert campaign.info["dialect"] == dialect
    assert failure.key == key, str(failure.verdict.failures[0])
    assert case in (None, failure.case) or sizes(failure.case) <= sizes(case)  # another mask of the same size will do
