"""The sticky comment of a pull request, from a gate's JSON that a stranger may have written: checked, then escaped.

`python -m flashproof.ci.comment result.json` prints the body, at most LINES lines. It needs neither torch nor a checkout, and runs
nothing of the change: in a workflow it is the only step whose job may write to the pull request.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

MARKER = "<!-- flashproof:gate -->"
"""First line of the body: the comment that has it is the one to write over."""
LINES, BYTES = 15, 60_000
"""Limits of the body; GitHub takes 65,536 characters."""
LARGEST = 32 << 20
"""Bytes of a result that is read at all."""
SHOWN = 160
TARGETS, WORST = 3, 3
"""Rows of either list: with heads, counts of the rest and the last line they make LINES."""
SCHEMA = Path(__file__).parent / "data" / "gate.json"
ORDER = ("new", "failure", "lost", "ledger")
"""Classes of failure, the worst first."""
ICONS = {
    "pass": "passed",
    "fail": "failed",
    "blind": "measured too little",
    "slower": "got slower",
    "error": "could not run",
}
PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ,=")


class Refused(ValueError):
    """A result that is not what a gate writes: one sentence."""


def read(path: Path) -> dict[str, Any]:
    """The result in a file; Refused if it is too large, no JSON, or not what the schema says."""
    try:
        if path.stat().st_size > LARGEST:
            raise Refused(f"{path} must have at most {LARGEST} bytes, got {path.stat().st_size}")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise Refused(f"{path} must be a file that can be read: {e.strerror}") from None
    except RecursionError:
        raise Refused(f"{path} must be the result of a gate, got JSON nested too deeply") from None
    except UnicodeDecodeError:
        raise Refused(f"{path} must be a JSON text file, got binary data") from None
    except ValueError as e:  # a number of too many digits is no JSONDecodeError
        raise Refused(f"{path} must be JSON: {e}") from None
    wrong = next(problems(data, json.loads(SCHEMA.read_text(encoding="utf-8"))), "")
    if wrong:
        raise Refused(f"{path} must be the result of a gate: {wrong}")
    return dict(data)


TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
    "null": (type(None),),
}  # fmt: skip


def problems(
    value: Any, schema: Mapping[str, Any], root: Mapping[str, Any] | None = None, at: str = "$"
) -> Iterator[str]:
    """Each way in which a value breaks a JSON schema, of which the keywords in KEYWORDS are understood; ValueError for others."""
    root = schema if root is None else root
    unknown = set(schema) - KEYWORDS
    if unknown:
        raise ValueError(f"schema must use only {', '.join(sorted(KEYWORDS))}, got {', '.join(sorted(unknown))}")
    if "$ref" in schema:
        yield from problems(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root, at)
        return
    if "anyOf" in schema and all(any(True for _ in problems(value, s, root, at)) for s in schema["anyOf"]):
        yield f"{at} must have one of {len(schema['anyOf'])} forms"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at} must be one of {', '.join(map(repr, schema['enum']))}"
    if "type" in schema and not _typed(value, schema["type"]):
        yield f"{at} must be of type {schema['type']}, got {type(value).__name__}"
        return
    if isinstance(value, str) and len(value) > schema.get("maxLength", LARGEST):
        yield f"{at} must have at most {schema['maxLength']} characters, got {len(value)}"
    if isinstance(value, int | float) and not isinstance(value, bool) and value < schema.get("minimum", value):
        yield f"{at} must be at least {schema['minimum']}"
    yield from _inside(value, schema, root, at)


KEYWORDS = {
    "$schema", "$id", "$defs", "$ref", "title", "description", "type", "enum", "anyOf", "required", "properties",
    "additionalProperties", "items", "maxItems", "maxLength", "minimum",
}  # fmt: skip


def _typed(value: Any, names: str | Sequence[str]) -> bool:
    wanted = [names] if isinstance(names, str) else names
    return any(isinstance(value, TYPES[n]) and (n == "boolean" or not isinstance(value, bool)) for n in wanted)


def _inside(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], at: str) -> Iterator[str]:
    if isinstance(value, list):
        if len(value) > schema.get("maxItems", LARGEST):
            yield f"{at} must have at most {schema['maxItems']} items, got {len(value)}"
        for n, item in enumerate(value):
            yield from problems(item, schema.get("items", {}), root, f"{at}[{n}]")
    if isinstance(value, dict):
        known, more = schema.get("properties", {}), schema.get("additionalProperties", True)
        yield from (f"{at} must have {name}" for name in schema.get("required", ()) if name not in value)
        for name, item in value.items():
            place = f"{at}.{name[:40]}"
            if name in known:
                yield from problems(item, known[name], root, place)
            elif more is False:
                yield f"{place} is not known"
            elif isinstance(more, Mapping):
                yield from problems(item, more, root, place)


def text(value: object, width: int = SHOWN) -> str:
    """A stranger's text as HTML that shows it and does nothing else: no markup, mention, link, reference or second line.

    Every character but letters, digits and a few signs becomes a numeric entity, which Markdown does not look into, and the whole
    stands in <code>, where GitHub looks for no mention. A zero-width space after @ and # is a second lock on the same door.
    """
    shown = unicodedata.normalize("NFC", str(value)[: 4 * width])
    shown = "".join(" " if c.isspace() else "?" if unicodedata.category(c)[0] == "C" else c for c in shown)
    shown = re.sub(" +", " ", shown).strip()
    shown = shown if len(shown) <= width else f"{shown[: width - 1]}…"
    return f"<code>{''.join(map(_entity, shown))}</code>"


def _entity(c: str) -> str:
    if c in PLAIN or (ord(c) > 127 and c.isalnum()):
        return c
    return f"&#{ord(c)};" + ("&#8203;" if c in "@#" else "")


def documents(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The results of the targets, one or several."""
    return list(result["targets"]) if "targets" in result else [dict(result)]


def body(result: Mapping[str, Any]) -> str:
    """The comment of a result: marker, verdict, a row for each target, the worst failures, what it was compared with."""
    docs = documents(result)
    failures = sorted(
        ((d, f) for d in docs for f in d["failures"]), key=lambda x: ORDER.index(x[1].get("class", "failure"))
    )
    counts = {c: sum(f.get("class", "failure") == c for _, f in failures) for c in ORDER}
    told = [f"{n} {WORDS[c]}" for c, n in counts.items() if n] or ["no failure"]
    before = sum(len((d.get("base") or {}).get("existing", ())) for d in docs)
    told += [f"{before} there before"] if before else []
    lines = [MARKER, f"**flashproof {ICONS[result['verdict']]}**: {', '.join(told)}", ""]
    lines += ["| target | cases | accepted | verdict |", "|---|---|---|---|"]
    lines += [f"| {text(d['target'], 80)} | {d['cases']} | {d['accepted']} | {d['verdict']} |" for d in docs[:TARGETS]]
    lines += [f"| {len(docs) - TARGETS} more | | | |"] if len(docs) > TARGETS else []
    rest = [f"- {d['target']}: {p}" for d in docs for p in d["problems"] if not failures]
    found = [_line(d, f) for d, f in failures] or [f"- {text(r[2:])}" for r in rest]
    lines += ["", *found[:WORST]]
    lines += [f"- {len(found) - WORST} more"] if len(found) > WORST else []
    lines += _compared(docs)
    return "\n".join(lines[:LINES]).encode()[:BYTES].decode(errors="ignore")


WORDS = {"new": "new", "failure": "wrong", "lost": "no longer answered", "ledger": "of the ledger"}


def _line(document: Mapping[str, Any], failure: Mapping[str, Any]) -> str:
    first = failure["findings"][0] if failure["findings"] else {"oracle": "", "tensor": "", "message": "no finding"}
    name = f"{first['oracle']}:{first['tensor']}"
    return f"- {WORDS[failure.get('class', 'failure')]}, {text(document['target'], 60)}: {text(name, 60)} {text(first['message'])}"


def _compared(docs: Sequence[Mapping[str, Any]]) -> list[str]:
    base = next((d["base"] for d in docs if d.get("base")), None)
    if base is None:
        return []
    words = (
        f"{text(base['change'], 60)} compared with {text(base['revision'], 20)}; rules of {text(base['policy'], 20)}"
    )
    return [f"<sub>{words}</sub>"]


def main(arguments: Sequence[str]) -> int:
    """Print the comment of the result that is named; 2 and one sentence where it is none."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m flashproof.ci.comment RESULT.json", file=sys.stderr)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    try:
        print(body(read(Path(arguments[0]))))
    except Refused as e:
        print(f"Error: {text_line(str(e))}", file=sys.stderr)
        return 2
    return 0


def text_line(sentence: str) -> str:
    """A sentence on one line, without control characters, for a log: a workflow command can begin on no line of it."""
    shown = "".join("?" if unicodedata.category(c)[0] == "C" else c for c in sentence[:500])
    return shown.replace("::", ": :")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
