"""The documentation names everything there is, and the README's commands do what it says."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import click
import pytest

from flashproof.__main__ import flashproof
from flashproof.fuzz import case, masks
from flashproof.fuzz.commands import Exit
from flashproof.fuzz.dialects import DIALECTS
from flashproof.fuzz.listing import ORACLES
from flashproof.impls import load_registry
from flashproof.impls.planted import KINDS
from flashproof.oracles.contract import PRESETS, Contract

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()


def commands(group: click.Group = flashproof) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        yield from commands(command) if isinstance(command, click.Group) else [(name, command)]


COMMANDS = dict(commands())


def quoted(page: str) -> set[str]:
    """Every word that stands in backquotes on a page, or on several."""
    text = "".join((DOCS / name).read_text() for name in page.split())
    return {w for span in re.findall(r"`([^`\n]+)`", text) for w in re.split(r"[\s,=|/]+", span)}


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("cases.md", [f.name for f in fields(case.Case)]),
        ("cases.md", masks.KINDS),
        ("cases.md", [f.name for kind in masks.KINDS.values() for f in fields(kind)]),
        ("cases.md", masks.ALIGNMENTS),
        ("cases.md", [*case.DTYPES, *case.DATA, *case.GRADS, *case.LAYOUTS, *case.MASK_FORMS, *case.MASK_FILLS]),
        ("cases.md", [n for n in (*case.SEQUENCES, *case.BIAS) if n]),
        ("targets.md", DIALECTS),
        ("targets.md", [n for d in DIALECTS.values() for names in d.keywords.values() for n in names]),
        ("targets.md", [name for name in load_registry() if not name.startswith("planted_")]),
        ("teeth.md", KINDS),
        ("oracles.md", ORACLES),
        ("targets.md", PRESETS),
        ("limits.md targets.md", [f.name for f in fields(Contract) if f.name not in ("io", "spec")]),
        ("cli.md", COMMANDS),
        ("cli.md", [o for c in COMMANDS.values() for p in c.params for o in p.opts if o.startswith("--")]),
    ],
)
def test_a_page_names_all_there_is(page, names):
    missing = sorted(set(names) - quoted(page))
    assert not missing, f"docs/{page} must name {', '.join(missing)}"


def test_every_oracle_that_makes_findings_is_listed():
    calls = [
        node
        for folder in ("fuzz", "oracles", "ci")
        for path in (ROOT / folder).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding" and node.args
    ]
    named = {c.args[0].value for c in calls if isinstance(c.args[0], ast.Constant)}
    assert named
    assert named <= set(ORACLES)


def test_every_exit_code_is_documented():
    listed = re.findall(r"^\| (\d) \|", (DOCS / "exit-codes.md").read_text(), re.MULTILINE)
    assert [int(n) for n in listed] == sorted(Exit)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_of_a_command_ends_with_an_example(name):
    last = (COMMANDS[name].help or "").rstrip().splitlines()[-1].strip()
    assert last.startswith(f"Example: flashproof {name} ")


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_option_of_a_command_says_what_it_does(name):
    assert all(p.help for p in COMMANDS[name].params if isinstance(p, click.Option))


PAGES = [ROOT / name for name in ("README.md", "DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    DOCS.rglob("*.md")
)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    links = [n for n in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()) if "://" not in n]
    assert all((page.parent / link).exists() for link in links), links


def test_every_page_is_in_the_index():
    index = (DOCS / "README.md").read_text()
    assert all(f"({p.name})" in index for p in DOCS.glob("*.md") if p.name != "README.md")


def test_every_decision_is_in_the_list():
    index = (DOCS / "decisions/README.md").read_text()
    assert all(f"({p.name})" in index for p in (DOCS / "decisions").glob("0*.md"))


def test_the_design_names_every_module():
    names = {p.stem for folder in ("fuzz", "impls", "oracles", "ci") for p in (ROOT / folder).glob("*.py")} - {
        "__init__"
    }
    missing = sorted(n for n in names if not re.search(rf"\b{n}\b", (ROOT / "DESIGN.md").read_text()))
    assert not missing, f"DESIGN.md must name {', '.join(missing)}"


def test_make_targets_in_the_docs_exist():
    known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = [n for p in PAGES for n in re.findall(r"\bmake ([a-z-]+)\b(?= *(?:`|#|\n))", p.read_text())]
    assert named
    assert set(named) <= set(known)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the Python files that the README shows; the first line of each names it."""
    place = tmp_path_factory.mktemp("readme")
    for block in blocks("python"):
        (place / block.partition("\n")[0].removeprefix("# ")).write_text(block)
    (place / "conftest.py").write_text(UNSHRUNK)
    return place


UNSHRUNK = """from hypothesis import Phase, settings
settings.register_profile("unshrunk", derandomize=True, database=None, phases=[Phase.explicit, Phase.generate])
settings.load_profile("unshrunk")
"""
"""For the test that the README shows: Hypothesis's own number of examples, the same ones every time. A failure need not shrink."""


README_COMMANDS = [line for b in blocks("sh") for line in b.splitlines() if line.startswith(("flashproof ", "pytest "))]


def run(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command of the README on fewer cases."""
    program, *words = shlex.split(
        re.sub(r"(--seconds|--examples) \d+", f"--examples {200 if ' gate ' in line else 40}", line.partition("#")[0])
    )
    more = {"gate": ["--min-cases", "10"]}.get(words[0], [])
    before = ["-p", "flashproof.fuzz.plugin"] if program == "pytest" else []  # where flashproof is not installed
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", program, *before, *words, *more]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("line", README_COMMANDS)
def test_a_command_of_the_readme_exits_as_it_says(line, folder):
    said = re.search(r"#.*exit (\d)", line)
    done = run(line, folder)
    assert done.returncode == int(said.group(1) if said else 0), done.stdout + done.stderr
