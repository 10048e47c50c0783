"""A failure and a campaign are told in plain text that fits a terminal, and as the JSON that was agreed on."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from flashproof.fuzz.case import Case
from flashproof.fuzz.found import Campaign, Failure
from flashproof.fuzz.judge import Verdict, reason_of
from flashproof.fuzz.learn import Count
from flashproof.fuzz.nearest import Neighbour
from flashproof.fuzz.region import Region
from flashproof.fuzz.report import WIDTH, campaign_json, failure_block, failure_text, failures_text, summary
from flashproof.oracles.diagnose import Deviation
from flashproof.oracles.finding import Finding

MESSAGE = "error 3.1e-2 exceeds limit 4.5e-3 at [0, 1, 64, 3]: got 0.113, want 0.082"
WORST = [{"index": [0, 1, 64, n], "got": 0.113 + n, "want": 0.082, "limit": 0.0045} for n in range(7)]
FINDING = Finding(
    "value", "dk", MESSAGE, (0, 1, 64, 3), 0.031, 0.0045, 0.113, 0.082, details={"worst": WORST, "count": 40, "of": 260}
)  # fmt: skip
CASE = Case(Lk=65, requires_grad="k")
BIG = Case(
    B=2, Hq=4, Hkv=2, Lq=33, Lk=129, D=40, Dv=24, dtype="bfloat16", softcap=5.0, bias="large", data="heavy", seed=4711
)
DEVIATION = Deviation("TF32 operands", "--contract tf32", "use input_precision='ieee'")
FAILURE = Failure(
    "value:dk", CASE, BIG, Verdict(CASE, "fail", (FINDING,), deviations=(DEVIATION,)), count=17, reproduced=(3, 3), fresh=True,
    nearest=(Neighbour("Lk = 64 passes, 65 fails, 128 passes", Case(Lk=64)),), pattern="forward right; dk wrong in the last key (64)",
    original_pattern="forward right; dk wrong in the last key tile of kv heads >= 1", shrunk=True,
)  # fmt: skip
CAMPAIGN = Campaign(
    info={"target": "t", "dialect": "sdpa", "device": "cpu", "contract": "", "supports": None, "environment": {"torch": "2.13"}},
    cases=120, accepted=110, refused=8, inexpressible=2, seconds=2.0, seed=3, stopped="failure", seconds_to_first_failure=0.4,
    cases_to_first_failure=12, failures=[FAILURE], refusals=Counter({"ValueError: no softcap": 8}), warnings=Counter({"statistical o": 2}),
    by_kind={"softcap": Count(refused=8)}, table=[("softcap", 0, 8, 0)], learnt=Region(softcap=False), slowest=(0.5, BIG),
    budget={"o": (0.41, CASE)},
)  # fmt: skip
REPLAY = "flashproof replay failures/3f2a91bc.json"


def text(**changes: Any) -> str:
    return " ".join(failure_text(replace(FAILURE, **changes), REPLAY).split())


@pytest.mark.parametrize(
    "words",
    [
        "float32, B = Hq = Lq = D = 1, Lk = 65; gradients of k only",
        f"dk: {MESSAGE}",
        "40 of 260 elements; the worst",
        "[0, 1, 64, 4] 4.113 0.082 4 0.0045",
        "forward right; dk wrong in the last key (64)",
        "seed 4711; 17 cases failed so",
        "there forward right; dk wrong in the last key tile of kv heads >= 1",
        "Lk = 64 passes, 65 fails, 128 passes",
        "fails 3 of 3 times, in a new process too",
        "consistent with TF32 operands; declare --contract tf32, or change the code: use input_precision='ieee'; still a failure",
        REPLAY,
    ],
)
def test_a_failure_says(words: str) -> None:
    assert words in text()


def test_at_most_five_worst_elements_are_shown() -> None:
    assert "[0, 1, 64, 4]" in text()
    assert "[0, 1, 64, 5]" not in text()


def test_the_line_to_paste_is_one_line() -> None:
    long = "flashproof replay " + "very/" * 30 + "deep.json"
    assert any(line.endswith(long) for line in failure_text(FAILURE, long).splitlines())


@pytest.mark.parametrize("told", [failure_text(FAILURE, REPLAY), failures_text(CAMPAIGN), summary(CAMPAIGN)])
def test_the_text_fits_the_width(told: str) -> None:
    assert max(map(len, told.splitlines())) <= WIDTH


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"fresh": False, "reproduced": (2, 3)},
            "fails 2 of 3 times; not in a new process: it depends on earlier calls",
        ),
        (
            {"fresh": False, "reproduced": (0, 3)},
            "not in a new process: it depends on earlier calls, so the target keeps state",
        ),
        ({"fresh": False, "varies": True, "reproduced": (0, 3)}, "new processes answer differently: a race, or memory"),
        ({"fresh": None, "reproduced": (2, 2)}, "fails 2 of 2 times replay"),
        (
            {"preceding": (Case(dtype="bfloat16"),), "fresh": False, "reproduced": (2, 3)},
            "in a new process only after the case above",
        ),
        ({"preceding": (Case(dtype="bfloat16"),)}, "before bfloat16, B = Hq = Lq = Lk = D = 1"),
        ({"shrunk": False}, "not to the end; a smaller case may exist"),
        ({"behind": "value:o"}, "the same case fails value:o, which may be the cause"),
    ],
)
def test_what_is_special_about_a_failure_is_said(changes: dict[str, Any], words: str) -> None:
    assert words in text(**changes)


def test_an_exception_shows_the_end_of_its_traceback() -> None:
    trace = "\n".join(
        ["Traceback (most recent call last):", *(f"  line {n}" for n in range(30)), "IndexError: out of range"]
    )
    block = failure_block(
        Verdict(
            CASE,
            "fail",
            (Finding("exception", "IndexError", "IndexError: out of range", details={"traceback": trace}),),
        )
    )
    assert "IndexError: out of range" in block.splitlines()[-1]
    assert "line 29" in block
    assert "line 3\n" not in block


def test_the_finding_that_was_asked_for_comes_first() -> None:
    other = Finding("value", "o", "error 1 exceeds limit 0")
    block = failure_block(Verdict(CASE, "fail", (other, FINDING)), "value:dk")
    assert block.index("dk: error") < block.index("o: error")


def test_a_warning_about_a_tensor_that_fails_is_not_repeated() -> None:
    warnings = tuple(Finding("statistical", t, f"large errors of {t}", severity="warning") for t in ("dk", "dv"))
    block = failure_block(Verdict(CASE, "fail", (FINDING, *warnings)))
    assert "large errors of dv" in block
    assert "large errors of dk" not in block


def test_a_leak_of_masked_values_says_what_settles_it() -> None:
    case = CASE.but(data="nonfinite_masked")
    leak = failure_block(Verdict(case, "fail", (Finding("nonfinite", "o", "not finite"),)))
    assert "--contract masked_nonfinite=may_leak" in leak
    assert "may_leak" not in failure_block(Verdict(case, "fail", (FINDING,)))


@pytest.mark.parametrize(
    "words",
    [
        "120: 110 accepted, 8 refused, 2 inexpressible; 2.0 s; seed 3",
        "first failure at case 12 after 0.4 s",
        "ValueError: no softcap (8)",
        "learnt from refusals: no softcap",
        "statistical o (2)",
        "never accepted: softcap",
        "FAIL: 1 distinct failure (exit 1)",
    ],
)
def test_the_summary_says(words: str) -> None:
    assert words in " ".join(summary(CAMPAIGN).split())


def test_the_summary_is_short() -> None:
    assert len(summary(CAMPAIGN).splitlines()) <= 8


def test_a_pass_says_how_close_it_was() -> None:
    assert "o 41% of the limit" in " ".join(summary(replace(CAMPAIGN, failures=[])).split())


ALIKE = replace(
    FAILURE, key="value:dv", case=CASE.but(requires_grad="v"), verdict=Verdict(CASE, "fail", (replace(FINDING, tensor="dv"),)),
    behind="value:dk",
)  # fmt: skip


def campaign_text(*failures: Failure) -> str:
    return failures_text(replace(CAMPAIGN, failures=list(failures)), lambda _: REPLAY)


def test_a_consequence_is_a_line_below_its_cause() -> None:
    told = campaign_text(FAILURE, ALIKE)
    assert told.count("FAILURE") == 1
    assert "also     dv (value): float32, B = Hq = Lq = D = 1, Lk = 65; gradients of v only" in told


def test_a_consequence_says_only_how_its_case_differs() -> None:
    forward = replace(FAILURE, case=CASE.but(requires_grad=""), key="value:o")
    told = campaign_text(forward, replace(ALIKE, behind="value:o"))
    assert f"also     dv (value): the same case; gradients of v only; {REPLAY}" in told


def test_a_consequence_that_needs_more_has_a_block_of_its_own() -> None:
    told = campaign_text(FAILURE, replace(ALIKE, case=ALIKE.case.but(softcap=2.0)))
    assert told.count("FAILURE") == 2
    assert "behind   the same case fails value:dk" in told


def test_what_the_block_says_already_is_not_said_again() -> None:
    both = Verdict(CASE, "fail", (FINDING, replace(FINDING, tensor="dv")))
    told = campaign_text(replace(FAILURE, verdict=both), replace(ALIKE, case=CASE, verdict=both))
    assert "also" not in told


def test_a_failure_seen_only_in_a_used_process_is_told_as_such() -> None:
    told = campaign_text(FAILURE, replace(ALIKE, case=ALIKE.case.but(softcap=2.0), fresh=False))
    assert "also     dv (value): only after other calls, as above" in told


def test_a_fatal_signal_shows_the_frames_of_the_target() -> None:
    printed = """noise
Fatal Python error: Segmentation fault

Thread 1 (most recent call first):
  File "threading.py", line 982 in run
Current thread 2 (most recent call first):
  File "kernel.py", line 16 in attention
  File "/x/flashproof/fuzz/execute.py", line 178 in _sequence
Extension modules: numpy"""
    died = Finding("crash", "SIGSEGV", "the process died", details={"printed": printed})
    block = failure_block(Verdict(CASE, "fail", (died,)))
    assert "line 16 in attention" in block
    assert not any(word in block for word in ("noise", "threading", "execute.py", "Extension"))


def test_a_pass_says_how_much_was_right() -> None:
    assert summary(replace(CAMPAIGN, failures=[])).endswith("PASS: 110 cases right (exit 0)")


def test_a_blind_gate_says_why() -> None:
    last = summary(replace(CAMPAIGN, failures=[]), "gate").splitlines()[-1]
    assert last == "BLIND: 110 cases were accepted, fewer than 200 (exit 4)"


def test_an_interrupted_campaign_says_so() -> None:
    assert "(interrupted)" in summary(replace(CAMPAIGN, stopped="interrupted"))


def test_the_document_has_the_agreed_fields() -> None:
    document = json.loads(json.dumps(campaign_json(CAMPAIGN, target="a.b:c", replay=lambda _: REPLAY), allow_nan=False))
    assert set(document) >= {
        "schema", "target", "dialect", "device", "contract", "supports", "verdict", "warnings", "cases", "accepted", "refused",
        "inexpressible", "seconds", "seconds_to_first_failure", "failures", "environment",
    }  # fmt: skip
    assert (document["schema"], document["target"], document["verdict"]) == (1, "a.b:c", "fail")
    (failure,) = document["failures"]
    assert failure["case"] == CASE.to_json()
    assert failure["replay"] == REPLAY
    assert failure["findings"][0] | {"index": [0, 1, 64, 3], "error": 0.031, "limit": 0.0045} == failure["findings"][0]


def test_what_an_unshrunk_failure_is_caused_by_is_told_with_its_cause_and_the_counts_agree() -> None:
    changed = replace(FAILURE, key="purity:k")
    more = {"value:o": CASE, "repeat:o": CASE, "value:dv": CASE}
    campaign = replace(
        CAMPAIGN, failures=[changed], unshrunk=more, caused=dict.fromkeys(("value:o", "repeat:o"), "purity:k")
    )
    told = failures_text(campaign, lambda _: REPLAY)
    assert "and      2 more, probably caused by it: value:o, repeat:o" in told
    assert "also     1 more, not shrunk: value:dv" in told
    assert "FAIL: 4 distinct failures: 1 shown in full, 3 more" in summary(campaign)


def test_refusals_outside_the_declared_region_are_told_as_such() -> None:
    told = summary(replace(CAMPAIGN, declared=Region(), outside=6))
    assert "8 refused (6 rightly, drawn outside the declared region)" in " ".join(told.split())


def test_a_refusal_names_the_field_that_leaves_its_case_out() -> None:
    key, case = "refusal:no gqa", Case(Hq=2)
    refused = Failure(key, case, case, Verdict(case, "fail", (Finding("refusal", "no gqa", "refused"),)))
    assert "Region(gqa=False)" in failure_text(refused)
    assert [reason_of(f"Refuse: {why}") for why in ("head dim 80 > 64", "float16")] == ["head dim N > N", "float16"]
