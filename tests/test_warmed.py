"""What warm compiled is what a hunt with any seed needs, and a list that does not hold is told of and ignored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from flashproof.__main__ import run
from flashproof.fuzz.buckets import Buckets, bucket
from flashproof.fuzz.case import Case
from flashproof.fuzz.region import Region
from flashproof.fuzz.tensors import build
from flashproof.fuzz.warmed import PREFIX, Warmed, WarmedDraw, cases_class, found, identity, source_hash

REGION = Region(dropout=False)
HERE = {
    "target": "t",
    "dialect": "native",
    "arch": "sm_90",
    "triton": "3.6.0",
    "python": "3.12",
    "configs": "tuned",
    "source": "ab",
}


def a_list(**changes):
    return Warmed(dict(HERE), Buckets(0).round(REGION, 48, 0), 12, **changes)


@pytest.mark.parametrize("seed", [1, 2, 77])
def test_a_draw_stays_in_the_classes_of_the_list(seed):
    warmed = a_list()
    known = {cases_class(c) for c in warmed.cases}
    cases = [c for n in range(4) for c in WarmedDraw(seed, warmed).round(REGION, 64, n)]
    assert {cases_class(c) for c in cases} <= known
    assert len({c.key for c in cases}) > 200 and len({bucket(c) for c in cases}) == len(
        {bucket(c) for c in warmed.cases}
    )


def test_sizes_are_those_of_the_list_where_they_are_not_free():
    warmed = a_list(sizes_free=False)
    sizes = {(c.B, c.Hq, c.Hkv, c.Lq, c.Lk) for c in warmed.cases}
    drawn = {(c.B, c.Hq, c.Hkv, c.Lq, c.Lk) for c in WarmedDraw(3, warmed).round(REGION, 200, 0)}
    assert drawn <= sizes


def test_sizes_are_drawn_anew_where_they_are_free():
    warmed = Warmed(dict(HERE), [Case(B=2, Lq=77, Lk=77)], 1)
    assert len({c.Lq for c in WarmedDraw(3, warmed).round(REGION, 64, 0)}) > 10


def test_a_draw_is_cheap():
    warmed, began = a_list(), time.process_time()
    draw = WarmedDraw(5, warmed)
    count = sum(len(draw.round(REGION, 64, n)) for n in range(8))
    assert count / (time.process_time() - began) > 1000  # of one core, whatever else runs


def test_a_list_is_read_as_it_was_written(tmp_path):
    warmed = a_list(sizes_free=False)
    warmed.save(tmp_path)
    assert found(tmp_path, HERE) == (warmed, "")


@pytest.mark.parametrize(
    ("field", "words"),
    [("source", "has changed"), ("triton", "version of Triton"), ("arch", "architecture"), ("configs", "--configs")],
)
def test_a_list_for_something_else_is_ignored_with_the_reason(tmp_path, field, words):
    a_list().save(tmp_path)
    warmed, why = found(tmp_path, HERE | {field: "other"})
    assert warmed is None and words in why and "ignored" in why


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": 2}', '{"schema": 1, "holds_for": {}, "cases": [3]}'])
def test_a_list_that_cannot_be_read_is_told_in_one_sentence(tmp_path, text):
    (tmp_path / f"{PREFIX}0.json").write_text(text)
    warmed, why = found(tmp_path, HERE)
    assert warmed is None and "cannot be read" in why and "\n" not in why


def test_a_change_of_a_file_beside_the_target_changes_its_source(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "kernel.py").write_text("y = 1\n")
    info = {"source": [str(tmp_path / "a.py"), 1]}
    before = source_hash(info)
    (tmp_path / "kernel.py").write_text("y = 2\n")
    assert before != source_hash(info)


@pytest.mark.parametrize("layout", ["contiguous", "blhd", "chunk", "offset", "strided", "transposed"])
def test_pointers_are_aligned_in_memory_as_their_offset_says(layout):
    """Where Triton looks whether 16 divides a pointer, CUDA's memory, aligned to 512, and the pretended device's agree."""
    inputs = build(Case(dtype="float16", Lq=5, Lk=7, D=8, Dv=8, layout_q=layout, layout_k=layout, layout_v=layout))
    for x in (inputs.q, inputs.k, inputs.v):
        assert x.data_ptr() % 16 == x.storage_offset() * x.element_size() % 16


WARM = ["warm", "triton_flash", "--arch", "sm_90", "--examples", "6", "--dtype", "float16", "--max-len", "40"]


@pytest.mark.nightly
def test_a_hunt_with_another_seed_builds_nothing_on_the_pretended_device(tmp_path, monkeypatch):
    from flashproof.ci.warm import _Compiler
    from flashproof.fuzz.commands import Options
    from flashproof.fuzz.engine import hunt
    from flashproof.fuzz.hunting import COMPILING
    from flashproof.fuzz.session import opened

    pytest.importorskip("triton")
    assert run([*WARM, "--cache", str(tmp_path)]) == 0
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with opened("triton_flash", Options(device="cuda", dtypes=("float16",)), arch="sm_90") as session:
        warmed, why = found(tmp_path, identity(session.info, "tuned"))
        assert why == "" and warmed is not None
        told = hunt(_Compiler(session), session.region, examples=60, seed=9, policy=COMPILING, warmed=warmed).compiled
    assert told.built == 0 and len(told.variants) >= 3


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [0, 5])
def test_warm_without_a_gpu_then_a_hunt_on_one_builds_nothing(tmp_path, seed):
    import torch

    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    env, told = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}, tmp_path / "told.json"
    flashproof = [sys.executable, "-m", "flashproof"]
    warm = [
        *flashproof,
        "warm",
        "triton_flash",
        "--arch",
        arch,
        "--cache",
        str(tmp_path / "cache"),
        "--examples",
        "100",
    ]
    subprocess.run(warm, env={**env, "CUDA_VISIBLE_DEVICES": ""}, check=True, timeout=300)
    fuzz = [*flashproof, "fuzz", "triton_flash", "--device", "cuda", "--examples", "150", "--seed", str(seed)]
    subprocess.run([*fuzz, "--save", str(tmp_path / "f"), "--json", str(told)], env=env, check=True, timeout=300)
    compiled = json.loads(told.read_text())["compiled"]
    assert compiled["built"] == 0 and compiled["variants"] > 10
