"""The folder of a capture: a case file for each structure, its tensors beside it, a summary; and the table that is shown."""

from __future__ import annotations

import datetime
import platform
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from . import stored
from .case import Case
from .corpus import CorpusError, Record, as_text, load, write_whole
from .patched import CaptureError
from .recorded import Recorded
from .tensors import MAX_ORACLE_BYTES, oracle_bytes
from .words import sentence

SUMMARY = "summary.txt"
HEADERS, WIDTHS = ("calls", "target", "case", "file"), (None, None, 64, None)


class Folder:
    """Where a capture writes. What an earlier capture wrote there is kept, and the counts are added up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: dict[Path, dict[int, Recorded]] = {}
        self._before: dict[Path, int] = {}

    def make(self) -> None:
        """Make the folder; CaptureError if nothing can be written there."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as e:
            raise CaptureError(f"{self.path} must be a folder that can be written: {e.strerror}") from None

    def keep(self, one: Recorded, inexpressible: Counter[str]) -> None:
        """Write the file of a structure as it is known now, in place of what was written of it before."""
        whole, case = one.case()
        if oracle_bytes(case) > MAX_ORACLE_BYTES:
            inexpressible[f"no smaller case in the image of {sentence(whole)} can be judged"] = one.count
            return
        tensors = _corner(one.copies, case)
        data = stored.packed(tensors, one.strides) if tensors else b""
        captured = self._captured(one, whole, case) | ({"digest": stored.digest(data)} if data else {})
        record = Record(
            one.source.name,
            case,
            one.source.binding.dialect,
            one.device,
            environment=_environment(one),
            captured=captured,
        )
        path = self.path / record.name
        self._move(one, path)
        if data:
            captured["tensors"] = path.with_suffix(".safetensors").name
            write_whole(path.with_suffix(".safetensors"), data)
        captured["count"] = self._before[path] + sum(o.count for o in self._held[path].values())
        today = datetime.date.today().isoformat()
        write_whole(path, as_text(replace(record, captured=captured, found=today).to_json()))

    def _move(self, one: Recorded, path: Path) -> None:
        """The structure's file is `path` now: one of another name that only it had is removed."""
        if one.path not in (None, path):
            held = self._held[one.path]
            del held[id(one)]
            if not held and not self._before[one.path]:
                one.path.unlink(missing_ok=True)
                one.path.with_suffix(".safetensors").unlink(missing_ok=True)
        if path not in self._before:
            self._before[path] = _count(path)
        self._held.setdefault(path, {})[id(one)] = one
        one.path = path

    def _captured(self, one: Recorded, whole: Case, case: Case) -> dict[str, Any]:
        """What the file says of the call itself."""
        out: dict[str, Any] = {"count": one.count, "backward": one.backward}
        if whole != case:
            out["called"] = whole.to_json()
        out |= {"statistics": one.statistics(), "strides": {n: list(s) for n, s in one.strides.items()}}
        notes = [*one.call.notes, *_notes(one)]
        return out | ({"notes": notes} if notes else {})

    def say(self, text: str) -> None:
        """Write the summary beside the cases."""
        write_whole(self.path / SUMMARY, text + "\n")


def _notes(one: Recorded) -> list[str]:
    """What is not as it was called, in sentences."""
    out = []
    if one.call.keep is not None:
        kept = "stored beside the case" if "keep" in one.copies else "replaced by one by hash with the same density"
        out.append(f"no kind of mask says the dense mask exactly; it is {kept}")
    if one.first.requires_grad and not one.backward:
        out.append("no gradient of the output was seen; grad_output is told as contiguous and normal")
    return out


def _count(path: Path) -> int:
    """The calls that an earlier capture counted in a file; 0 where there is none."""
    try:
        return int(load(path).captured.get("count", 0)) if path.exists() else 0
    except (CorpusError, TypeError, ValueError):
        return 0


def _corner(tensors: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    """The part of each tensor that a reduced case has, its first batches, heads and rows."""
    B, Hq, Hkv, Lq, Lk = case.B, case.Hq, case.Hkv, case.Lq, case.Lk
    sizes = {"q": (B, Hq, Lq), "do": (B, Hq, Lq), "k": (B, Hkv, Lk), "v": (B, Hkv, Lk)}
    out = {}
    for name, x in tensors.items():
        for axis, n in enumerate(sizes.get(name, (B, Hq, Lq, Lk))):
            x = x.narrow(axis, 0, min(n, x.shape[axis]))  # noqa: PLW2901 (narrowed axis by axis)
        out[name] = x
    return out


def _environment(one: Recorded) -> dict[str, Any]:
    """Versions, and how the callable is called."""
    b = one.source.binding
    how = {"interpreted": False, "bound": list(b.bound), "unbound": list(b.unbound), "required": list(b.required)}
    return {"python": platform.python_version(), "torch": torch.__version__, "returns_lse": b.returns_lse, **how}


def table(
    recorded: Iterable[Recorded], folder: Path, inexpressible: Counter[str], skipped: Counter[str], notes: Iterable[str]
) -> str:
    """A line for each structure, the most frequent first; then the calls that are not recorded, each with its reason."""
    rows = sorted(recorded, key=lambda r: -r.count)
    lines = [
        (r.count, r.source.name.rpartition(":")[2], sentence(r.call.case), r.path.name if r.path else "not written")
        for r in rows
    ]
    total = sum(r.count for r in rows)
    head = f"{total} calls in {len(rows)} structures recorded in {folder}"
    parts = [head, tabulate(lines, headers=HEADERS, maxcolwidths=WIDTHS, disable_numparse=True)] if rows else [head]
    for title, counter in (("cannot be expressed", inexpressible), ("not recorded", skipped)):
        parts += [f"{n} calls {title}: {why}" for why, n in counter.most_common()]
    parts += [f"note: {text}" for text in notes]
    return "\n".join(parts)
