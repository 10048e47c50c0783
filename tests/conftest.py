"""What every test gets: one torch thread, a Hypothesis profile of our own, and no GPU test where there is no GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

import flashproof

torch.set_num_threads(1)

# Hypothesis loads a profile "ci" by itself when it sees CI, and new profiles inherit from the loaded one: name the parent.
_PARENT = settings.get_profile("default")
settings.register_profile(
    "fast",
    parent=_PARENT,
    max_examples=50,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "thorough",
    parent=_PARENT,
    max_examples=1000,
    derandomize=False,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("FLASHPROOF_PROFILE", "fast"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # a folder of that name is a keyword too
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where `capture` writes."""
    return tmp_path / "captured"


@pytest.fixture
def capture(folder: Path) -> Callable[..., Any]:
    """flashproof.capture into `folder`, without a word at the end."""

    def begin(*args: Any, **kwargs: Any) -> Any:
        return flashproof.capture(folder, *args, quiet=True, **kwargs)

    return begin
