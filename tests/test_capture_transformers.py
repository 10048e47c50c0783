"""A capture around a real model of transformers, where that is installed: a tiny one with random weights, nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashproof.__main__ import run
from flashproof.fuzz.corpus import load_all
from flashproof.fuzz.masks import Causal

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def tiny(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, **heads, attn_implementation="sdpa", **changes)
    )


def step(model: Any) -> list[torch.Tensor]:
    """Gradients of two training steps, the second of them padded at the left, and then four decoded tokens."""
    ids = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(1))
    padding = torch.ones_like(ids)
    padding[1, :5] = 0
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    model(input_ids=ids, attention_mask=padding, labels=ids).loss.backward()
    model.eval()
    with torch.no_grad():
        out = model.generate(
            ids[:, :4], attention_mask=padding[:, 5:9], max_new_tokens=4, do_sample=False, pad_token_id=0
        )
    return [out, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_of_a_llama_is_recorded_left_alone_and_replays(
    capture: Callable[..., Any], folder: Path, capsys: pytest.CaptureFixture[str], dtype: torch.dtype
) -> None:
    plain = step(tiny().to(dtype))
    with capture(tensors=True) as log:
        seen = step(tiny().to(dtype))
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    cases = [record.case for _, record in load_all(folder)]
    assert {c.dtype for c in cases} == {str(dtype).removeprefix("torch.")}
    trained = {(c.mask == Causal(), c.mask_form, c.Hkv) for c in cases if c.requires_grad}
    assert trained == {(True, "flags", 2), (False, "bool", 4)}, "a dense mask comes with the key heads repeated"
    assert all((c.B, c.Hq, c.Lq, c.Lk, c.D) == (2, 4, 17, 17, 16) for c in cases if c.requires_grad)
    assert [c.Lk for c in sorted(cases, key=lambda c: c.Lk) if c.Lq == 1] == [5, 6, 7]
    assert "12 calls in 6 structures" in log.summary()
    assert run(["replay", str(folder), "--target", "sdpa_math"]) == 0
    assert "6 cases, 0 wrong, 6 right" in capsys.readouterr().out
    assert run(["replay", str(folder), "--target", "planted_head_mapping"]) == 1
