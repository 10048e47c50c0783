"""A failure file is written whole, read back equal, and refused with one clear sentence."""

import json
import math
import os

import pytest

from flashproof.fuzz.case import Case
from flashproof.fuzz.corpus import CorpusError, Record, as_text, files, load, load_all, save, write_whole
from flashproof.fuzz.masks import Causal, Random
from flashproof.oracles.finding import Finding

FINDING = Finding("value", "dk", "error 3e-2 exceeds limit 4e-3", (0, 1, 2, 3), 3e-2, 4e-3, 0.1, float("nan"))
RECORD = Record(
    "mine.py:attention",
    Case(Lk=65, mask=Causal() & Random(50)),
    "sdpa",
    "cpu",
    "ieee",
    (Case(Lk=3),),
    (FINDING,),
    {"torch": "2.13"},
    "2026-01-02",
)


def edited(tmp_path, **changes):
    """A failure file with some fields changed."""
    path = tmp_path / "edited.json"
    path.write_text(as_text({**RECORD.to_json(), **changes}))
    return path


def test_a_record_comes_back_equal(tmp_path):
    back = load(save(RECORD, tmp_path))
    assert repr(back) == repr(RECORD), "NaN is not equal to itself, so the texts are compared"


def test_the_same_failure_has_one_file_and_keeps_the_day_it_was_found(tmp_path):
    first = save(RECORD, tmp_path)
    again = save(Record(**{**vars(RECORD), "found": "2027-01-01", "environment": {}}), tmp_path)
    assert first == again and load(first).found == "2026-01-02" and len(files(tmp_path)) == 1


@pytest.mark.parametrize("change", [{"target": "b:c"}, {"case": Case(Lk=66)}, {"findings": ()}, {"preceding": ()}])
def test_another_failure_has_another_file(tmp_path, change):
    assert save(Record(**{**vars(RECORD), **change}), tmp_path) != save(RECORD, tmp_path)


def test_the_day_is_written_when_none_is_given(tmp_path):
    assert len(load(save(Record("a:b", Case()), tmp_path)).found) == len("2026-01-02")


def test_a_write_that_dies_leaves_no_file_and_the_old_one_whole(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    write_whole(path, "old")

    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["x.json"]


def test_numbers_that_json_lacks_do_not_lose_a_failure(tmp_path):
    odd = Finding("value", "o", "bad", details={"worst": [math.inf, {"x": math.nan}], 3: object})
    text = save(Record("a:b", Case(), findings=(odd,)), tmp_path).read_text()
    assert json.loads(text)["findings"][0]["details"]["worst"] == ["inf", {"x": "nan"}]


def test_a_folder_gives_its_case_files_in_order(tmp_path):
    paths = [save(Record("a:b", Case(seed=n)), tmp_path) for n in range(5)]
    (tmp_path / "notes.txt").write_text("not a case")
    assert [p for p, _ in load_all(tmp_path)] == sorted(paths)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"schema": 2}, "schema must be 1 for this version of flashproof, got schema=2"),
        ({"case": {"schema": 9}}, "case schema must be 1 for this version of flashproof, got schema=9"),
        ({"case": {"schema": 1, "Lk": -1}}, "case field Lk must be an integer >= 0, got Lk=-1"),
        ({"case": {"schema": 1, "mask": {"kind": "x"}}}, "mask kind must be one of"),
        ({"case": []}, "field case must be a JSON object, got case=[]"),
        ({"target": 3}, "field target must be a JSON string, got target=3"),
        ({"preceding": [1]}, "case must be a JSON object, got int"),
        ({"findings": [{}]}, "a finding must have the fields"),
        ({"findings": ["x"]}, "a finding must have the fields"),
    ],
)
def test_a_wrong_field_is_named(tmp_path, changes, says):
    with pytest.raises(CorpusError) as e:
        load(edited(tmp_path, **changes))
    assert says in str(e.value) and str(e.value).startswith(str(tmp_path)) and "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "must be JSON"),
        (b"{", "must be JSON"),
        (b"[1]", "must hold a JSON object"),
        (b"\xff\xfe\x00", "got binary data"),
        (b"[" * 100_000, "JSON"),
    ],
)
def test_a_file_that_is_no_case_file_is_named(tmp_path, content, says):
    path = tmp_path / "f.json"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=says):
        load(path)


def test_an_absent_file_and_a_directory_are_named(tmp_path):
    with pytest.raises(CorpusError, match="no such file"):
        load(tmp_path / "absent.json")
    with pytest.raises(CorpusError, match="got a directory"):
        load(tmp_path)
