"""What each tool of compute-sanitizer says of a target with one planted error, on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashproof.__main__ import run
from flashproof.fuzz import sanitizer

PLANTED = Path(__file__).parent / "kernels" / "sanitizable.py"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tool", "target", "kernel"),
    [
        ("racecheck", "race", "planted_race"),
        ("initcheck", "unwritten", "planted_read"),
        ("synccheck", "barrier", "planted_barrier"),
    ],
)
def test_a_planted_error_is_found_in_its_kernel(tool: str, target: str, kernel: str, tmp_path: Path) -> None:
    try:
        sanitizer.found_sanitizer()
    except sanitizer.SanitizerAbsent as e:
        pytest.skip(str(e))
    out = tmp_path / "out.json"
    arguments = ["--device", "cuda", "--sanitizer", tool, "--save", str(tmp_path / "failures"), "--json", str(out)]
    assert run(["fuzz", f"{PLANTED}:{target}", *arguments]) == 1
    text = json.dumps(json.loads(out.read_text()))
    assert kernel in text and '"sanitizer"' in text
