"""Ledger: failures that are known. Each has an issue, an owner and a day on which it must have been looked at again.

A file of TOML with one [[known]] table for each entry; docs/ci.md shows it. Wrong answers still run, so that a fault that is gone
is noticed; what kills or hangs a process is never launched.
"""

from __future__ import annotations

import datetime
import os.path
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..oracles.finding import Finding
from .case import Case
from .corpus import CorpusError, Record, judgeable
from .judge import Verdict
from .learn import ENOUGH
from .region import mask_kind
from .rooted import named

LEDGER = Path("flashproof-ledger.toml")
KINDS = ("wrong", "crash", "hang")
LINK = re.compile(r"https?://[^\s<>\"]+|[\w.-]+/[\w.-]+#[0-9]+")
"""An address, or owner/repository#number."""
KEYS = ("target", "issue", "owner", "expires", "finding", "where", "case", "kind")
WHERE = tuple(f.name for f in fields(Case))


class LedgerError(ValueError):
    """A ledger that cannot be used: one sentence with its path."""


@dataclass(frozen=True)
class Entry:
    """One known failure. `where` are (field, allowed values or bounds); `record` is the case that shows it, where one is named."""

    target: str
    issue: str
    owner: str
    expires: datetime.date
    finding: str = ""
    where: tuple[tuple[str, Any], ...] = ()
    case: str = ""
    kind: str = "wrong"
    record: Record | None = field(default=None, compare=False)

    @property
    def launched(self) -> bool:
        """Whether cases of this kind are run."""
        return self.kind == "wrong"

    @property
    def same(self) -> tuple[Any, ...]:
        """What two entries for the same failure have in common, whoever owns it and however long."""
        return (self.target, self.finding, self.where, self.case, self.kind)

    def covers(self, case: Case) -> bool:
        """Whether a case is one of those that are known: by `where`; without it, the case that is named; else every case."""
        if self.where:
            return all(_within(_value(case, name), allowed) for name, allowed in self.where)
        return self.record is None or self.record.case.key == case.key

    def excuses(self, case: Case, key: str) -> bool:
        """Whether a finding on a case is known."""
        return self.finding in ("", key) and self.covers(case)

    def words(self) -> str:
        """The entry in a few words: finding, issue, owner."""
        return f"{self.finding or self.kind} ({self.issue}, {self.owner})"


def _value(case: Case, name: str) -> Any:
    return mask_kind(case) if name == "mask" else getattr(case, name)


def _within(value: Any, allowed: Any) -> bool:
    if isinstance(allowed, _Bounds):
        return value is not None and allowed.low <= value <= allowed.high
    return value in allowed


@dataclass(frozen=True)
class _Bounds:
    low: float
    high: float


def load(path: Path) -> tuple[Entry, ...]:
    """The entries of a ledger file; LedgerError says in one sentence what is wrong with it."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise LedgerError(f"{path} must be a ledger that can be read: {e.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise LedgerError(f"{path} must be TOML: {e}") from None
    rows = data.get("known", [])
    if set(data) - {"known"} or not isinstance(rows, list) or not all(isinstance(r, dict) for r in rows):
        raise LedgerError(f"{path} must hold [[known]] tables only, got {', '.join(data)}")
    entries = []
    for number, row in enumerate(rows, 1):
        try:
            entries.append(_entry(row, path.parent))
        except (ValueError, CorpusError) as e:
            told = f" ({row['target']})" if isinstance(row.get("target"), str) else ""
            raise LedgerError(f"{path}: entry {number}{told}: {e}") from None
    return tuple(entries)


def _entry(row: Mapping[str, Any], folder: Path) -> Entry:
    for name in row:
        if name not in KEYS:
            raise ValueError(f"it must have only the fields {', '.join(KEYS)}, got {name!r}")
    for name in ("target", "owner"):
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise ValueError(f"{name} must be a text that is not empty, got {name}={row.get(name)!r}")
    issue = row.get("issue")
    if not isinstance(issue, str) or not LINK.fullmatch(issue):
        raise ValueError(f"issue must be a link (https://... or owner/repository#number), got issue={issue!r}")
    if type(row.get("expires")) is not datetime.date:
        raise ValueError(
            f"expires must be a day such as 2030-01-31, without quotes, got expires={row.get('expires')!r}"
        )
    kind, finding, case = row.get("kind", "wrong"), row.get("finding", ""), row.get("case", "")
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got kind={kind!r}")
    if not isinstance(finding, str) or not isinstance(case, str):
        raise ValueError(f"finding and case must be texts, got finding={finding!r}, case={case!r}")
    where, record = _where(row.get("where", {})), judgeable(folder / case) if case else None
    if not where and not case and (kind != "wrong" or not finding):
        raise ValueError("it must say which failures are known: where or case, or for a wrong answer a finding")
    return Entry(normal(row["target"]), issue, row["owner"], row["expires"], finding, where, case, kind, record)


def normal(target: str) -> str:
    """A target's name with its path in its usual form: ./k.py:f is k.py:f."""
    kind, place = named(target)
    return target.replace(place, os.path.normpath(place), 1) if kind == "file" else target


def _where(data: object) -> tuple[tuple[str, Any], ...]:
    if not isinstance(data, dict):
        raise ValueError(f"where must be a table of case fields, got where={data!r}")
    out = []
    for name, value in sorted(data.items()):
        if name not in WHERE:
            raise ValueError(f"where must name fields of a case ({', '.join(WHERE)}), got {name!r}")
        out.append((name, _allowed(name, value)))
    return tuple(out)


def _allowed(name: str, value: Any) -> Any:
    """Bounds for {min, max}, else the values allowed."""
    if isinstance(value, dict):
        numbers = [v for v in value.values() if isinstance(v, int | float) and not isinstance(v, bool)]
        if not value or set(value) - {"min", "max"} or len(numbers) != len(value):
            raise ValueError(f"where.{name} must be a value, a list or {{min, max}} with numbers, got {value!r}")
        return _Bounds(value.get("min", float("-inf")), value.get("max", float("inf")))
    values = value if isinstance(value, list) else [value]
    if any(isinstance(v, dict | list) for v in values):
        raise ValueError(f"where.{name} must be a value, a list or {{min, max}} with numbers, got {value!r}")
    return tuple(values)


@dataclass
class Known:
    """A ledger at work on one target: a sieve for its judge, and what it took out.

    `excused` counts cases by entry and finding, `skipped` those never launched. `ran` and `failed` count the cases of each entry
    that were answered, and those of them that showed what it says.
    """

    entries: tuple[Entry, ...]
    today: datetime.date
    excused: Counter[tuple[Entry, str]] = field(default_factory=Counter)
    skipped: Counter[Entry] = field(default_factory=Counter)
    ran: Counter[Entry] = field(default_factory=Counter)
    failed: Counter[Entry] = field(default_factory=Counter)
    _seen: set[tuple[str, ...]] = field(default_factory=set)

    @classmethod
    def of(cls, entries: tuple[Entry, ...], target: str) -> Known:
        """What a ledger says of a target, today."""
        return cls(tuple(e for e in entries if e.target == normal(target)), datetime.date.today())

    def skips(self, case: Case) -> bool:
        """Whether a case must not be launched. A day that has passed does not make a crash harmless."""
        for entry in self.entries:
            if not entry.launched and entry.covers(case):
                self.skipped[entry] += self._first("skip", case.key)
                return True
        return False

    def sift(self, verdict: Verdict) -> Verdict:
        """The verdict without the findings that are known."""
        self._tally(verdict)
        kept = tuple(f for f in verdict.findings if f.severity != "fail" or not self._excused(verdict.case, f))
        return without(verdict, kept)

    def _tally(self, verdict: Verdict) -> None:
        """Count for each entry whether a case of its shows what it says; a refusal shows nothing."""
        if verdict.status not in ("pass", "fail", "known") or not self._first("ran", verdict.case.key, *verdict.keys):
            return
        for entry in self.entries:
            if entry.covers(verdict.case):
                self.ran[entry] += entry.record is None or entry.record.case.key == verdict.case.key
                self.failed[entry] += any(entry.finding in ("", key) for key in verdict.keys)

    def _excused(self, case: Case, finding: Finding) -> bool:
        for entry in self.entries:
            if self.valid(entry) and entry.launched and entry.excuses(case, finding.key):
                self.excused[entry, finding.key] += self._first("excused", case.key, finding.key)
                return True
        return False

    def _first(self, *what: str) -> bool:
        new = what not in self._seen
        self._seen.add(what)
        return new

    def valid(self, entry: Entry) -> bool:
        """Whether the entry's last day is not over."""
        return self.today <= entry.expires

    def expired(self) -> list[Entry]:
        """The entries whose last day is over."""
        return [e for e in self.entries if not self.valid(e)]

    def passing(self) -> list[Entry]:
        """The entries for wrong answers that are right now: the case that is named, or else ENOUGH others, ran and none failed."""
        return [
            e
            for e in self.entries
            if e.launched and not self.failed[e] and self.ran[e] >= (1 if e.record is not None else ENOUGH)
        ]

    def lines(self) -> list[str]:
        """What was taken out, a line for each entry."""
        out = [f"known: {key} ({e.issue}, {e.owner}): {n} cases" for (e, key), n in self.excused.items()]
        return out + [f"known: {e.words()}: {n} cases not launched" for e, n in self.skipped.items()]

    def document(self) -> list[dict[str, Any]]:
        """The same as JSON."""
        told = [(e, key, n, 0) for (e, key), n in self.excused.items()]
        told += [(e, e.finding or e.kind, 0, n) for e, n in self.skipped.items()]
        return [
            {
                "finding": key,
                "issue": e.issue,
                "owner": e.owner,
                "expires": e.expires.isoformat(),
                "cases": n,
                "not_launched": m,
            }
            for e, key, n, m in told
        ]


def without(verdict: Verdict, findings: tuple[Finding, ...]) -> Verdict:
    """The verdict with these findings only; `known` when it failed and now has none that fails."""
    if len(findings) == len(verdict.findings):
        return verdict
    refused = verdict.execution is not None and verdict.execution.status == "refused"
    failed = any(f.severity == "fail" for f in findings)
    return replace(verdict, findings=findings, status="fail" if failed else "refused" if refused else "known")
