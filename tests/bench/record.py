"""Write the numbers of a pytest-benchmark JSON file into a page, between its two markers.

python tests/bench/record.py RESULTS.json PAGE.md
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- measured -->", "<!-- end -->"


def rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Every measured value, in the order of the file."""
    found = [b["extra_info"] for b in results["benchmarks"]]
    return [row for info in found for row in (info, *info.get("also", ()))]


def machine(results: dict[str, Any]) -> str:
    """The processor, the date and the versions that were measured."""
    info = results["machine_info"]
    versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("torch", "triton", "numpy", "hypothesis"))
    cpu = f"{info['cpu'].get('brand_raw', info['machine'])}, one core of {info['cpu'].get('count', '?')}"
    return f"{results['datetime'][:10]}, {cpu}; Python {info['python_version']}, {versions}."


def table(results: dict[str, Any]) -> str:
    """The measured part of the page."""
    lines = [machine(results), "", "| what | measured |", "|---|---|"]
    lines += [f"| {row['what']} | {row['value']:.3g} {row['unit']} |" for row in rows(results)]
    return "\n".join(lines)


def replaced(page: str, text: str) -> str:
    """The page with the text between its markers; ValueError if it has none."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page must have {BEGIN} and {END} once each")
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(replaced(target.read_text(), table(json.loads(source.read_text()))))
