"""The comment on a pull request: what is no result of a gate is refused, what a stranger wrote is shown and does nothing."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from flashproof.ci import comment, github
from flashproof.fuzz.case import Case
from flashproof.fuzz.outcome import FailedCase, Outcome, document
from flashproof.oracles.finding import Finding

ROOT = Path(__file__).parents[1]
HOSTILE = [
    "@everyone",
    "<script>alert(1)</script>",
    "`code` ```\nfence\n```",
    "::error file=x::y",
    "one\ntwo\r\nthree\u2028four",
    "](https://evil.example) ![x](https://evil.example/p.png)",
    "https://evil.example www.evil.example",
    "owner/repo#1 #1 GH-1",
    "</code></table><!-- flashproof:gate -->",
    "| a | b |\n|---|---|",
    "\u202egnp.exe \x1b[31m \x00 \ufeff",
    "&lt;img src=x onerror=alert(1)&gt; &#64;everyone",
    "**bold** _it_ ~~gone~~ $x$",
    "@" * 10_000_000,
]


def failed(oracle="value", tensor="dk", message="dk is wrong", kind="new"):
    return FailedCase(Case(), (Finding(oracle, tensor, message),), extra={"class": kind})


def result(*failures, **changes):
    made = Outcome("k.py:flash", cases=400, accepted=390, failures=list(failures))
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def stored(tmp_path, data):
    path = tmp_path / "result.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


class Shown(HTMLParser):
    """The text and the tags that a browser makes of HTML."""

    def __init__(self):
        super().__init__()
        self.text, self.tags, self.comments = "", [], []

    def handle_data(self, data):
        self.text += data

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, attrs))

    def handle_comment(self, data):
        self.comments.append(data)


def shown(html):
    parser = Shown()
    parser.feed(html)
    parser.close()
    return parser


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda h: repr(h[:20]))
def test_hostile_text_is_shown_and_does_nothing(hostile):
    html = comment.text(hostile)
    page = shown(html)
    assert page.tags == [("code", [])] and not page.comments
    inner = html.removeprefix("<code>").removesuffix("</code>")
    raw = re.sub(r"&#\d+;", "", inner)  # what Markdown can still look into
    assert not re.search(r"[^\w ,=…]|_", raw), raw
    assert "\n" not in html and not re.search(r"[@#](?!\u200b)", page.text)
    assert len(page.text.replace("\u200b", "")) <= comment.SHOWN
    first = hostile.split()[0][:20]
    assert first.isprintable() is False or page.text.replace("\u200b", "").startswith(first)


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda h: repr(h[:20]))
def test_a_body_of_hostile_text_has_at_most_fifteen_lines_and_our_tags_only(tmp_path, hostile):
    data = document(
        [result(*(failed("value", hostile, hostile) for _ in range(9)), target=hostile, problems=[hostile])] * 9
    )
    for doc in data["targets"]:
        doc["target"] = hostile[:4000]
        for failure in doc["failures"]:
            failure["findings"][0]["tensor"] = hostile[:900]
            failure["findings"][0]["message"] = hostile[:100_000]
        doc["problems"] = [hostile[:100_000]]
    body = comment.body(comment.read(stored(tmp_path, data)))
    assert len(body.splitlines()) <= 15 and len(body.encode()) < 60_000
    assert body.splitlines()[0] == comment.MARKER and body.count("<!--") == 1
    assert {t for t, _ in shown(body).tags} <= {"code", "sub"}
    assert "\n- 78 more" in body and "\n| 6 more |" in body


def test_ten_megabytes_are_read_and_more_than_the_limit_are_not(tmp_path):
    data = document([result(failed(message="x" * 10_000_000))])
    assert len(comment.body(comment.read(stored(tmp_path, data)))) < 2000
    path = stored(tmp_path, " " * (comment.LARGEST + 1))
    with pytest.raises(comment.Refused, match="at most"):
        comment.read(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.pop("verdict"), "forms"),
        (lambda d: d.update(verdict="great"), "forms"),
        (lambda d: d.update(cases=-1), "forms"),
        (lambda d: d.update(cases="400"), "forms"),
        (lambda d: d.update(cases=True), "forms"),
        (lambda d: d.update(failures=[{}]), "forms"),
        (lambda d: d.update(failures="none"), "forms"),
        (lambda d: d["failures"][0].update({"class": "fine"}), "forms"),
        (lambda d: d["failures"][0]["findings"][0].pop("message"), "forms"),
        (lambda d: d.update(base={"revision": "x"}), "forms"),
        (lambda d: d.update(target="x" * 5000), "forms"),
        (lambda d: d.update(schema=2), "forms"),
    ],
)
def test_what_breaks_the_schema_is_refused(tmp_path, change, said):
    data = document([result(failed())])
    assert comment.read(stored(tmp_path, data))
    broken = copy.deepcopy(data)
    change(broken)
    with pytest.raises(comment.Refused, match=said):
        comment.read(stored(tmp_path, broken))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"a": ' + "9" * 5000 + "}", '"x"', "NaN"])
def test_what_is_no_result_is_refused_in_one_sentence(tmp_path, capsys, text):
    assert comment.main([str(stored(tmp_path, text))]) == 2
    told = capsys.readouterr()
    assert told.err.count("\n") == 1 and not told.out


def test_binary_data_and_missing_files_are_refused(tmp_path, capsys):
    (tmp_path / "x.json").write_bytes(b"\xff\xfe")
    assert comment.main([str(tmp_path / "x.json")]) == 2
    assert comment.main([str(tmp_path / "none.json")]) == 2
    assert comment.main([]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_an_error_message_carries_no_workflow_command(tmp_path, capsys):
    assert comment.main([str(tmp_path / "x\n::error::y")]) == 2
    assert "\n::" not in capsys.readouterr().err


def test_a_schema_with_an_unknown_keyword_is_an_error():
    with pytest.raises(ValueError, match="must use only"):
        list(comment.problems(1, {"multipleOf": 2}))


def test_it_needs_neither_torch_nor_numpy(tmp_path):
    path = stored(tmp_path, document([result(failed())]))
    lines = [
        "import sys, runpy; sys.argv = ['comment', sys.argv[1]]",
        "try: runpy.run_module('flashproof.ci.comment', run_name='__main__')",
        "except SystemExit as e: print(e.code, 'torch' in sys.modules)",
    ]
    code = "\n".join(lines)
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code, str(path)], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(comment.MARKER) and done.stdout.endswith("0 False\n")


def test_the_worst_come_first_and_the_rest_are_counted():
    kinds = ["ledger", "lost", "new", "new", "new", "new"]
    lines = comment.body(document([result(*(failed(kind=k) for k in kinds))])).splitlines()
    assert "4 new, 1 no longer answered, 1 of the ledger" in lines[1]
    assert sum(line.startswith("- new,") for line in lines) == 3 and "- 3 more" in lines


def test_a_summary_stays_below_githubs_limit_and_counts_the_rest():
    outcome = result(*(failed(message="é" * 5000) for _ in range(300)))
    text = github.markdown([outcome], "| table |")
    assert len(text.encode()) < 1 << 20
    shown_, more = text.count("### <code>"), int(re.search(r"(\d+) more failures", text).group(1))
    assert shown_ > 50 and shown_ + more == 300


def test_a_fence_in_a_summary_is_longer_than_any_inside():
    text = github.markdown([result(failed(message="````\n<script>"))], "")
    assert text.rstrip().endswith("`````")


def test_annotations_are_the_ten_worst_and_cannot_break_out():
    many = [failed(message=f"wrong {n}\n::set-output name=x::%") for n in range(12)]
    lines = github.errors([result(*many, failed("crash", "SIGSEGV", "died"))], ROOT)
    assert len(lines) == 11 and lines[-1] == "3 more failures"
    assert "crash SIGSEGV" in lines[0]
    assert all(line.startswith("::error title=flashproof%3A") and "\n" not in line for line in lines[:-1])
    assert "wrong 0%0A::set-output name=x::%25" in lines[1]


def test_the_log_obeys_no_command_of_a_target():
    stop = re.fullmatch(r"::stop-commands::([0-9a-f]{32})", github.quiet())
    assert github.loud() == f"::{stop.group(1)}::"


def test_junit_has_a_case_for_each_finding_and_a_blind_target_is_an_error():
    from xml.etree import ElementTree

    outcomes = [
        result(failed(message="bad \x00\x1b ]]> <x>")),
        result(accepted=0, problems=["none was accepted"], extra={"known": [
            {"finding": "value:o", "issue": "o/r#1", "owner": "me", "expires": "2999-01-01", "cases": 1, "not_launched": 0}
        ]}),
    ]  # fmt: skip
    root = ElementTree.fromstring(github.junit(outcomes, ROOT).partition("\n")[2])  # noqa: S314 (our own text)
    suite = root.find("testsuite")
    assert {n: suite.get(n) for n in ("tests", "failures", "errors", "skipped")} == {
        "tests": "4", "failures": "1", "errors": "1", "skipped": "1",
    }  # fmt: skip
    assert suite.find("testcase/error").get("message") == "none was accepted"
    assert "o/r#1" in suite.find("testcase/skipped").get("message")
