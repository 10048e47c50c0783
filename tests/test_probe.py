"""Keywords that are accepted must change the answer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashproof.fuzz.dialects import recognise
from flashproof.fuzz.probe import BASES, CHANGES, IGNORED, probe_keywords
from flashproof.fuzz.tensors import build
from flashproof.impls.loading import load
from flashproof.oracles.exact import Problem, Reference

TARGETS = Path(__file__).parent / "targets"


def rows(fn: Any, dialect: str = "") -> dict[str, str]:
    return probe_keywords(recognise(fn, dialect), fn)[0]


@pytest.mark.parametrize("name", ["sdpa", "flash", "native"])
def test_keywords_of_a_right_target_change_its_answer(name: str) -> None:
    fn = load(f"{TARGETS}/right.py:{name}").call
    assert set(rows(fn).values()) == {"changes the answer"}
    assert probe_keywords(recognise(fn), fn)[1] == []


@pytest.mark.parametrize("keyword", [k for k in CHANGES if k != "dropout"])
def test_each_change_must_change_the_answer_by_the_definition(keyword: str) -> None:
    for base in BASES[:3]:
        plain, changed = (Reference(Problem.of(build(c))).outputs()["o"] for c in (base, base.but(**CHANGES[keyword])))
        assert float((plain - changed).abs().max()) > 1e-3


def test_ignored_keyword_is_a_finding_with_its_case() -> None:
    fn = load(f"{TARGETS}/faulty.py:ignores_causal").call
    seen, (finding,) = probe_keywords(recognise(fn), fn)
    assert seen == {"is_causal": IGNORED, "scale": "changes the answer"}
    assert (
        str(finding) == "is_causal: is accepted and ignored: mask=Causal(align='top_left') does not change the answer"
    )
    assert finding.details["case"]["mask"] == {"kind": "causal", "align": "top_left"}


def test_a_refused_keyword_is_not_probed() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        if is_causal:
            raise NotImplementedError("later")
        return q * 1.0

    assert rows(fn) == {"is_causal": "not probed: NotImplementedError: later"}


def test_a_base_is_found_that_the_target_serves() -> None:
    seen: list[tuple[torch.dtype, int]] = []

    def fn(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        if q.dtype == torch.float32 or q.shape[-1] < 64:
            raise ValueError
        seen.append((q.dtype, q.shape[1]))
        return q * (2.0 if causal else 1.0)

    assert rows(fn) == {"causal": "changes the answer"}
    assert seen[0] == (torch.float16, 128)


def test_a_target_that_serves_nothing_says_why() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        raise RuntimeError("never")

    assert rows(fn) == {"causal": "not probed: RuntimeError: never"}


def test_keywords_of_a_builtin_are_probed() -> None:
    fn = torch.nn.functional.scaled_dot_product_attention
    assert rows(fn, "sdpa") == dict.fromkeys(("is_causal", "attn_mask", "scale", "dropout_p"), "changes the answer")


def test_global_state_that_a_target_changes_is_put_back_for_the_cases_to_see() -> None:
    def careless(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        torch.set_default_dtype(torch.float64)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scale)

    assert rows(careless, "sdpa") == {"scale": "changes the answer"}
    assert torch.get_default_dtype() == torch.float32
