"""How targets are found, and what is said when they are not."""

import functools
from pathlib import Path

import pytest
import torch

from flashproof.impls import REGISTRY
from flashproof.impls.loading import TargetError, load, own_frames, takes_q_k_v
from flashproof.oracles.invariants import Watched

TARGETS = Path(__file__).parent / "targets"


def sentence(target: str) -> str:
    with pytest.raises(TargetError) as caught:
        load(target)
    return caught.value.sentence


def test_registered_name_gives_the_registered_implementation() -> None:
    assert load("textbook") is REGISTRY["textbook"]


def test_registered_callable_named_by_its_module_is_the_registered_implementation() -> None:
    assert load("flashproof.impls.textbook:textbook") is load("textbook")


def test_module_and_attribute() -> None:
    assert (
        load("torch.nn.functional:scaled_dot_product_attention").call
        is torch.nn.functional.scaled_dot_product_attention
    )


def test_attribute_of_a_file_which_imports_its_sibling() -> None:
    assert load(f"{TARGETS}/right.py:sdpa").call.__name__ == "sdpa"


def test_file_with_one_candidate_needs_no_attribute() -> None:
    assert load(f"{TARGETS}/single.py").call.__name__ == "attention"


def test_file_with_several_candidates_lists_them() -> None:
    assert sentence(f"{TARGETS}/right.py").endswith("got flash, flex, native, sdpa, varlen")


def test_file_without_candidate_says_what_one_is(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("def f(x): ...\n")
    assert "whose parameters begin with q, k, v" in sentence(f"{tmp_path}/empty.py")


def test_files_of_one_name_are_different_modules(tmp_path: Path) -> None:
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text(f"def f(q, k, v): return {value}\n")
    assert [load(f"{tmp_path}/{folder}/same.py:f").call(0, 0, 0) for folder in "ab"] == [1, 2]


def test_unknown_name_lists_close_and_known_names() -> None:
    text = sentence("textbok")
    assert "did you mean textbook?" in text
    assert "known names: " in text


def test_unknown_attribute_lists_close_names() -> None:
    assert "did you mean sdpa" in sentence(f"{TARGETS}/right.py:sdp")


def test_absent_file_is_named() -> None:
    assert "must name a file that exists, got /absent.py" in sentence("/absent.py:f")


def test_absent_module_is_named() -> None:
    assert "failed to import: ModuleNotFoundError: No module named 'absent_module'" in sentence("absent_module:f")


def test_import_error_inside_a_target_shows_the_targets_own_traceback() -> None:
    with pytest.raises(TargetError, match="failed to import: ModuleNotFoundError") as caught:
        load(f"{TARGETS}/broken.py:f")
    text = caught.value.traceback
    assert "in setup" in text
    assert "loading.py" not in text


def test_file_that_failed_to_import_is_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "later.py"
    file.write_text("raise SystemExit(1)\n")
    assert "SystemExit: 1" in sentence(f"{file}:f")
    file.write_text("def f(q, k, v): return 0  # now it is whole\n")
    assert load(f"{file}:f").call(0, 0, 0) == 0


def test_attribute_that_cannot_be_called_is_refused() -> None:
    assert "must be callable, got int" in sentence("signal:NSIG")


def test_class_is_refused() -> None:
    assert "got the class Linear" in sentence("torch.nn:Linear")


def test_empty_name_is_refused() -> None:
    assert sentence(":f").startswith("target must be a name")


def test_modules_and_partials_are_candidates() -> None:
    class Attention(torch.nn.Module):
        def forward(self, query, key, value):  # type: ignore[no-untyped-def]
            return query

    assert takes_q_k_v(Attention())
    assert takes_q_k_v(functools.partial(lambda q, k, v, causal: q, causal=True))
    assert not takes_q_k_v(lambda x, y, z: x)


def test_traceback_begins_where_the_harness_ends() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        Watched(lambda: 1 // 0, random=False)()
    assert "test_loading.py" in own_frames(caught.value).splitlines()[1]
