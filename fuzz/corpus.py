"""Failing cases on disk: one JSON file each, named by what it shows, written so that a killed run loses none.

A failure file holds the case as absolute data, so it replays on any implementation. `failures/` is where runs leave what
they find; `flashproof-corpus/` holds what a repository wants replayed for ever (move a file there and commit it).
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..oracles.finding import Finding
from .case import Case, case_from_json
from .tensors import MAX_ORACLE_BYTES, oracle_bytes

SCHEMA = 1
FAILURES = Path("failures")
CORPUS = Path("flashproof-corpus")
FIELDS: dict[str, type[Any]] = {
    "target": str,
    "dialect": str,
    "device": str,
    "contract": str,
    "case": dict,
    "preceding": list,
    "findings": list,
    "environment": dict,
    "found": str,
}


class CorpusError(ValueError):
    """A case file that cannot be read: one sentence with its path."""


@dataclass(frozen=True)
class Record:
    """A failing case, how it was run, and what was found. `preceding` cases ran before it in the same process.

    A captured case was found in a real call and has no findings: `captured` says what the call was like, `tensors` is the file
    beside it that holds real inputs, where there is one.
    """

    target: str
    case: Case
    dialect: str = ""
    device: str = "cpu"
    contract: str = ""
    preceding: tuple[Case, ...] = ()
    findings: tuple[Finding, ...] = ()
    environment: dict[str, Any] = field(default_factory=dict)
    found: str = ""
    captured: dict[str, Any] = field(default_factory=dict)
    tensors: Path | None = None

    @property
    def name(self) -> str:
        """File name: a hash of the target, the case and the kinds of finding; the same failure has the same name."""
        said = "\n".join(
            (self.target, self.case.key, *(c.key for c in self.preceding), *sorted({f.key for f in self.findings}))
        ) + str(self.captured.get("digest", ""))
        return hashlib.sha256(said.encode()).hexdigest()[:8] + ".json"

    @property
    def configuration(self) -> int | None:
        """Which configuration of autotuned kernels failed; None where no finding names one."""
        told = (f.details.get("configuration") for f in self.findings)
        index = next((t.get("index") for t in told if isinstance(t, dict)), None)
        return index if isinstance(index, int) and index >= 0 else None

    def to_json(self) -> dict[str, Any]:
        """The JSON object of a failure file."""
        return {
            "schema": SCHEMA,
            "target": self.target,
            "dialect": self.dialect,
            "device": self.device,
            "contract": self.contract,
            "case": self.case.to_json(),
            "preceding": [c.to_json() for c in self.preceding],
            "findings": [f.to_json() for f in self.findings],
            "environment": self.environment,
            "found": self.found,
        } | ({"captured": self.captured} if self.captured else {})


def save(record: Record, folder: Path) -> Path:
    """The file that holds the record, complete or not there at all; a failure that is already there keeps its file."""
    path = folder / record.name
    if path.exists():
        return path
    write_whole(path, as_text(record.to_json() | {"found": record.found or datetime.date.today().isoformat()}))
    return path


def as_text(document: dict[str, Any]) -> str:
    """Strict JSON text: a number that JSON lacks, or anything else unknown to it, is written as its name."""
    return json.dumps(_plain(document), indent=1, allow_nan=False, default=str) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file under another name, then rename: a reader sees all of it or none. Makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner may read
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load(path: Path) -> Record:
    """The record in a failure file; CorpusError says in one sentence what is wrong with the file."""
    try:
        data = json.loads(_read(path))
        return _record(data, path.parent)
    except CorpusError:
        raise
    except RecursionError:
        raise CorpusError(f"{path} must be a flashproof case file, got JSON nested too deeply") from None
    except json.JSONDecodeError as e:
        raise CorpusError(f"{path} must be JSON: {e}") from None
    except (ValueError, TypeError) as e:
        raise CorpusError(f"{path}: {e}") from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CorpusError(f"{path} must be a case file, but there is no such file") from None
    except IsADirectoryError:
        raise CorpusError(f"{path} must be a case file, got a directory") from None
    except UnicodeDecodeError:
        raise CorpusError(f"{path} must be a JSON text file, got binary data") from None
    except OSError as e:
        raise CorpusError(f"{path} must be readable: {e.strerror}") from None


def _record(data: object, folder: Path) -> Record:
    if not isinstance(data, Mapping):
        raise ValueError(f"a case file must hold a JSON object, got {type(data).__name__}")
    if data.get("schema") != SCHEMA:
        raise ValueError(f"schema must be {SCHEMA} for this version of flashproof, got schema={data.get('schema')!r}")
    for name, kind in FIELDS.items():
        if not isinstance(data.get(name), kind):
            raise ValueError(f"field {name} must be a JSON {_json_name(kind)}, got {name}={data.get(name)!r}")
    return Record(
        **{n: data[n] for n in ("target", "dialect", "device", "contract", "environment", "found")},
        case=case_from_json(data["case"]),
        preceding=tuple(case_from_json(c) for c in data["preceding"]),
        findings=tuple(_finding(f) for f in data["findings"]),
        **_captured(data.get("captured", {}), folder),
    )


def _captured(data: object, folder: Path) -> dict[str, Any]:
    """captured and tensors of a record; the file of tensors lies in the folder of the case file."""
    if not isinstance(data, dict):
        raise ValueError(f"field captured must be a JSON object, got captured={data!r:.80}")
    name = data.get("tensors", "")
    if not isinstance(name, str) or Path(name).name != name:
        raise ValueError(f"field captured.tensors must be the name of a file in the same folder, got {name!r:.80}")
    return {"captured": dict(data), "tensors": folder / name if name else None}


def _json_name(kind: type[Any]) -> str:
    return {"str": "string", "dict": "object", "list": "array"}[kind.__name__]


def _finding(data: object) -> Finding:
    try:
        return Finding.from_json(data)  # type: ignore[arg-type]
    except (TypeError, KeyError, ValueError, AttributeError):
        raise ValueError(
            f"a finding must have the fields oracle, tensor, message, index and details, got {data!r:.80}"
        ) from None


def files(path: Path) -> list[Path]:
    """The case files that a path names, in order: itself, or every .json file of a folder."""
    return sorted(path.glob("*.json")) if path.is_dir() else [path]


def judgeable(path: Path) -> Record:
    """The record in a failure file; CorpusError also for one that is too large to judge."""
    record = load(path)
    needed = max(oracle_bytes(c) for c in (record.case, *record.preceding))
    if needed > MAX_ORACLE_BYTES:
        raise CorpusError(
            f"{path}: a case must need at most {MAX_ORACLE_BYTES} bytes to judge, got one that needs {needed}"
        )
    return record


def load_all(path: Path) -> list[tuple[Path, Record]]:
    """Every record of a file or folder with its path; CorpusError for one that cannot be read or judged."""
    return [(file, judgeable(file)) for file in files(path)]
