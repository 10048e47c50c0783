"""A gate's result in the forms that continuous integration shows: Markdown, a comment, annotations, JUnit XML."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ..fuzz.commands import VERDICTS, Exit, worst
from ..fuzz.corpus import write_whole
from ..fuzz.outcome import FailedCase, Outcome, document, replay_line
from . import comment

SUMMARY_BYTES = 1_000_000
"""GitHub drops a step summary above 1 MiB, the whole of it."""
ANNOTATIONS = 10
"""GitHub shows this many of a kind for a step."""
DEADLY = ("crash", "hang", "memory", "guard", "nonfinite")
"""Findings that come first among the worst."""
_token = secrets.token_hex(16)


def sort(failed: FailedCase, compared: bool) -> str:
    """The class of a failure: lost, ledger, new (there was something to compare with) or failure."""
    oracles = {f.oracle for f in failed.findings}
    if oracles == {"coverage"}:
        return "lost"
    return "ledger" if oracles == {"ledger"} else "new" if compared else "failure"


def write(outcomes: Sequence[Outcome], table: str, notes: Sequence[str], given: dict[str, Any], top: Path) -> None:
    """Write the files that were asked for: `summary`, `comment`, `junit`."""
    if given["summary"]:
        write_whole(given["summary"], markdown(outcomes, table, notes))
    if given["comment"]:
        write_whole(given["comment"], comment.body(document(outcomes)) + "\n")
    if given["junit"]:
        write_whole(given["junit"], junit(outcomes, top))


def failures(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, FailedCase]]:
    """Every failure with its target, the worst first."""

    def rank(pair: tuple[Outcome, FailedCase]) -> tuple[int, bool]:
        _, failed = pair
        return comment.ORDER.index(failed.extra.get("class", "failure")), failed.findings[0].oracle not in DEADLY

    return sorted(((o, f) for o in outcomes for f in o.failures), key=rank)


def markdown(outcomes: Sequence[Outcome], table: str, notes: Sequence[str] = ()) -> str:
    """The table, every failure as far as there is room, what is known, for a step summary."""
    parts = [f"## flashproof: {VERDICTS[worst(o.code for o in outcomes)]}", table]
    told = [*notes, *(f"{o.target}: {line}" for o in outcomes for line in said(o))]
    parts += ["\n".join(f"- {comment.text(line, 400)}" for line in told[:100])] if told else []
    room = SUMMARY_BYTES - sum(len(p.encode()) + 2 for p in parts) - 200
    found = failures(outcomes)
    for shown, (outcome, failed) in enumerate(found):
        block = _block(outcome, failed)
        room -= len(block.encode()) + 2
        if room < 0:
            parts.append(f"{len(found) - shown} more failures; the JSON has them all")
            break
        parts.append(block)
    return "\n\n".join(parts) + "\n"


def said(outcome: Outcome) -> list[str]:
    """What a reader of the table should know besides: rules, known failures, those that were there before, what is gained."""
    base = outcome.extra.get("base") or {}
    out = list(outcome.extra.get("notes", []))
    out += [f"known: {k['finding']} ({k['issue']}, {k['owner']})" for k in outcome.extra.get("known", [])]
    out += [f"there before: {e['finding']}, {e['cases']} cases, such as {e['case']}" for e in base.get("existing", [])]
    gained = base.get("gained") or {}
    if gained.get("cases"):
        out.append(f"gained: {gained['cases']} of {gained['asked']} cases asked, such as {gained['smallest']}")
    return out


def _block(outcome: Outcome, failed: FailedCase) -> str:
    found = "\n".join(map(str, failed.findings))
    line = replay_line(failed.path) if failed.path and not failed.text else ""
    inner = f"{failed.text or found}\n{line}".rstrip()
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", inner)), default=0))
    return f"### {comment.text(outcome.target)}: {failed.extra.get('class', 'failure')}\n\n{fence}\n{inner}\n{fence}"


def quiet() -> str:
    """The line after which GitHub obeys no command in the log: what a target prints may look like one."""
    return f"::stop-commands::{_token}"


def loud() -> str:
    """The line that ends it."""
    return f"::{_token}::"


def errors(outcomes: Sequence[Outcome], top: Path) -> list[str]:
    """Workflow commands for the worst failures, and one for the rest."""
    found = failures(outcomes)
    out = []
    for outcome, failed in found[:ANNOTATIONS]:
        first = failed.findings[0]
        place = _place(outcome, top)
        title = f"flashproof: {first.oracle} {first.tensor}"
        line = replay_line(failed.path) if failed.path else ""
        properties = ",".join(f"{n}={_property(v)}" for n, v in (*place, ("title", title)))
        out.append(f"::error {properties}::{_data(f'{outcome.target}: {first} {line}'.strip())}")
    if len(found) > ANNOTATIONS:
        out.append(f"{len(found) - ANNOTATIONS} more failures")
    return out


def _place(outcome: Outcome, top: Path) -> list[tuple[str, str]]:
    """file and line of a target, below the top of the repository."""
    source = outcome.session.info.get("source") if outcome.session else None
    if not source or not Path(source[0]).resolve().is_relative_to(top.resolve()):
        return []
    return [("file", str(Path(source[0]).resolve().relative_to(top.resolve()))), ("line", str(source[1]))]


def _data(value: str) -> str:
    return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(value: str) -> str:
    return _data(value).replace(":", "%3A").replace(",", "%2C")


def junit(outcomes: Sequence[Outcome], top: Path) -> str:
    """JUnit XML: a case for each target, and one for each finding of it.

    A target that measured too little is an error, not a skipped case: most servers show a skipped case in green. Failures that are
    known or were there before are skipped cases.
    """
    suite = ElementTree.Element("testsuite", name="flashproof")
    for outcome in outcomes:
        whole = _case(suite, outcome, "gate", top)
        whole.set("time", f"{outcome.seconds:.3f}")
        if outcome.code not in (Exit.RIGHT, Exit.WRONG):
            _child(whole, "error", VERDICTS[outcome.code], "; ".join(outcome.problems) or VERDICTS[outcome.code])
        for failed in outcome.failures:
            first = failed.findings[0]
            inner = _child(
                _case(suite, outcome, first.key, top), "failure", failed.extra.get("class", "failure"), str(first)
            )
            inner.text = _xml(failed.text or "\n".join(map(str, failed.findings)))
        base = outcome.extra.get("base") or {}
        for known in outcome.extra.get("known", []):
            _child(
                _case(suite, outcome, known["finding"], top),
                "skipped",
                "",
                f"known: {known['issue']}, {known['owner']}",
            )
        for old in base.get("existing", []):
            _child(_case(suite, outcome, old["finding"], top), "skipped", "", f"there before: {old['case']}")
    counts = {
        "tests": "testcase",
        "failures": "testcase/failure",
        "errors": "testcase/error",
        "skipped": "testcase/skipped",
    }
    for name, path in counts.items():
        suite.set(name, str(len(suite.findall(path))))
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _case(suite: ElementTree.Element, outcome: Outcome, name: str, top: Path) -> ElementTree.Element:
    words = {"classname": outcome.target, "name": name, **dict(_place(outcome, top))}
    return ElementTree.SubElement(suite, "testcase", {n: _xml(v) for n, v in words.items()})


def _child(case: ElementTree.Element, tag: str, kind: str, message: str) -> ElementTree.Element:
    inner = ElementTree.SubElement(case, tag, message=_xml(message))
    if kind:
        inner.set("type", kind)
    return inner


def _xml(value: str) -> str:
    """Text without the characters that XML cannot hold."""
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", value)
