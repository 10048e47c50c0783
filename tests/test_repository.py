"""The repository keeps its own rules: which module may import which, how the folders lie, what names are not used."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("fuzz", "impls", "oracles", "ci")
SOURCES = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

LAYERS = (
    (
        "compat",
        "fuzz",
        "fuzz.allowance",
        "fuzz.compiling",
        "fuzz.grid",
        "fuzz.hashing",
        "fuzz.layouts",
        "fuzz.nursery",
        "fuzz.wire",
    ),
    ("fuzz.masks", "fuzz.values"),
    ("fuzz.case",),
    ("fuzz.measured", "fuzz.patched", "fuzz.recognised"),
    ("fuzz.generate", "fuzz.ladders", "fuzz.literals", "fuzz.pattern", "fuzz.region", "fuzz.simpler", "fuzz.words"),
    ("fuzz.flex", "fuzz.learn", "fuzz.packing", "fuzz.tensors"),
    ("fuzz.reduced", "fuzz.shrink"),
    ("fuzz.added", "fuzz.nearest", "fuzz.stateful", "fuzz.strategies", "impls", "oracles"),
    ("fuzz.adapter", "fuzz.sequences"),
    ("fuzz.binding", "fuzz.corpus", "fuzz.definition", "fuzz.modes", "fuzz.rooted"),
    ("fuzz.varlen",),
    ("fuzz.dialects",),
    ("fuzz.arrangement", "fuzz.called", "fuzz.stored"),
    ("fuzz.recorded", "fuzz.telling"),
    ("fuzz.adapted", "fuzz.calling", "fuzz.probe", "fuzz.written"),
    ("fuzz.commands", "fuzz.repro"),
    ("fuzz.repro_adapted",),
    ("fuzz.environment",),
    ("fuzz.execute",),
    ("fuzz.offline", "fuzz.sanitized"),
    ("fuzz.child", "fuzz.judge", "fuzz.worker"),
    ("fuzz.delivery",),
    ("fuzz.fleet", "fuzz.juror", "fuzz.sanitizer"),
    ("fuzz.alternatives", "fuzz.book", "fuzz.buckets", "fuzz.found", "fuzz.ledger", "fuzz.session"),
    ("fuzz.order",),
    (
        "fuzz.answers",
        "fuzz.characterising",
        "fuzz.likely",
        "fuzz.listing",
        "fuzz.outcome",
        "fuzz.progress",
        "fuzz.report",
        "fuzz.study",
    ),
    ("fuzz.warmed",),
    ("fuzz.engine", "fuzz.sanitizing"),
    ("fuzz.hunting", "fuzz.inspecting"),
    ("fuzz.api", "fuzz.capture", "fuzz.cli", "fuzz.plugin", "ci"),
    ("fuzz.reshrink",),
    ("flashproof",),
    ("__main__",),
)
"""Every module, lowest first; a folder stands for its modules. A module imports from lower layers only."""

LONG_FILES: dict[str, str] = {}
"""Files over 400 lines, each with its reason."""

OTHERS_RULES = {"ci/peer_rules.py", "ci/comparison.py"}
"""Files that speak of other projects' rules, in their words."""

EXECUTES = {
    "oracles/interpreter_launch.py": {"exec"},  # a kernel is interpreted by compiling its own rewritten source
    "impls/planted/edits.py": {"exec"},  # a planted bug is our own source with one edit
}


def module(path: Path) -> str:
    """Dotted name below flashproof: `fuzz.case`, `impls` for an __init__."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[2:] if parts[:2] == ("src", "flashproof") else parts
    return ".".join(p for p in parts if p != "__init__") or "flashproof"


MODULES = {module(p): p for p in [*SOURCES, *(ROOT / "src/flashproof").glob("*.py")]}


def imports(name: str) -> set[str]:
    """Modules of this package that a module names in an import, wherever the statement stands."""
    package = MODULES[name].name == "__init__.py"
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.ImportFrom):
            here = name.split(".") if name != "flashproof" else []
            base = here[: len(here) + package - node.level] if node.level else []
            target = [*base, *(node.module or "").split(".")] if node.module else base
            target = target[1:] if not node.level and target[0] == "flashproof" else target
            if not node.level and node.module and node.module.split(".")[0] != "flashproof":
                continue
            dotted = [".".join([*target, alias.name]) for alias in node.names if alias.name != "__version__"]
            found |= {d if d in MODULES else ".".join(target) or "flashproof" for d in dotted}
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("flashproof.") for a in node.names if a.name.startswith("flashproof")}
    return found - {name}


def layer(name: str) -> int:
    """Index in LAYERS of the module, else of its folder."""
    for wanted in (name, name.partition(".")[0] if not name.startswith("fuzz.") else ""):
        for index, names in enumerate(LAYERS):
            if wanted in names:
                return index
    raise AssertionError(f"{name} must be listed in LAYERS")


def family(name: str) -> str:
    """The folder of a module of impls, oracles or ci, whose modules share a layer; other modules are alone."""
    folder = name.partition(".")[0]
    return folder if folder in ("impls", "oracles", "ci") else name


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_module_imports_from_lower_layers_only(name):
    for other in imports(name) & set(MODULES):
        assert family(other) == family(name) or layer(other) < layer(name), f"{name} must not import {other}"


def test_no_import_goes_round_in_a_circle():
    graph, done = {name: imports(name) & set(MODULES) for name in MODULES}, set()

    def visit(name, path):
        assert name not in path, f"circle of imports: {' -> '.join([*path, name])}"
        if name not in done:
            for other in graph[name]:
                visit(other, [*path, name])
            done.add(name)

    for name in MODULES:
        visit(name, [])


def test_implementations_import_neither_oracles_nor_one_another():
    for name in (n for n in MODULES if n.startswith("impls.") and not n.startswith("impls.planted")):
        parts = name.rpartition("_")[0] or name  # triton_flash is made of triton_*
        assert not {m for m in imports(name) if m.startswith(("oracles", "impls.")) and not m.startswith(parts)}, name


def test_oracles_import_no_implementation():
    for name in (n for n in MODULES if n.startswith("oracles")):
        assert not {m for m in imports(name) if m.startswith("impls")}, name


def test_every_folder_with_code_is_packaged_and_linked():
    folders = {p.parent.name for p in ROOT.glob("*/__init__.py")}
    inner = {str(p.parent.relative_to(ROOT)) for f in FOLDERS for p in (ROOT / f).glob("*/**/__init__.py")}
    where = PYPROJECT["tool"]["setuptools"]["package-dir"]
    assert folders == set(FOLDERS)
    packaged = {f"flashproof.{f.replace('/', '.')}": f for f in {*FOLDERS, *inner}}
    assert where == {"flashproof": "src/flashproof"} | packaged
    assert set(where) == set(PYPROJECT["tool"]["setuptools"]["packages"])
    for folder in FOLDERS:
        assert (ROOT / "src/flashproof" / folder).readlink() == Path("../..", folder)


def test_the_linter_does_not_read_a_file_twice():
    assert set(PYPROJECT["tool"]["ruff"]["extend-exclude"]) == {f"src/flashproof/{f}" for f in FOLDERS}


@pytest.mark.parametrize(
    "path", [*SOURCES, *sorted((ROOT / "tests").glob("*.py"))], ids=lambda p: str(p.relative_to(ROOT))
)
def test_a_file_has_at_most_400_lines(path):
    lines = len(path.read_text().splitlines())
    listed = str(path.relative_to(ROOT)) in LONG_FILES
    assert (lines > 400) == listed, f"{path.name} has {lines} lines; LONG_FILES lists the longer ones with a reason"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_unfinished_work_and_no_machine_of_ours_is_named(path):
    unwanted = re.findall(r"(?i)\b(?:todo|fixme|xxx|tolerance|atol|rtol)\b|/(?:home|root|Users)/", path.read_text())
    theirs = {"tolerance", "atol", "rtol"} if path.relative_to(ROOT).as_posix() in OTHERS_RULES else set()
    assert not set(unwanted) - theirs


def test_no_module_is_named_after_nothing():
    assert not {m.rpartition(".")[2] for m in MODULES} & {"utils", "common", "helpers", "manager", "base", "misc"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_untrusted_bytes_are_executed(path):
    nodes = list(ast.walk(ast.parse(path.read_text())))
    called = {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    named = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    assert called & {"eval", "exec"} == EXECUTES.get(str(path.relative_to(ROOT)), set())
    assert not named & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}


def test_a_name_bound_in_an_init_is_no_submodule():
    for folder in FOLDERS:
        tree = ast.parse((ROOT / folder / "__init__.py").read_text())
        bound = {a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
        bound |= {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        assert not bound & {p.stem for p in (ROOT / folder).glob("*.py")}, folder


def test_hypothesis_keeps_our_profile_where_ci_is_set():
    code = "import runpy; runpy.run_path('tests/conftest.py'); from hypothesis import settings as s; "
    code += "print(s().max_examples, s().derandomize)"
    env = os.environ | {"CI": "true", "FLASHPROOF_PROFILE": "thorough"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1000", "False"]


def test_integration_runs_the_readmes_test_command():
    commands = [
        line for line in (ROOT / ".ci/run").read_text().splitlines() if not line.startswith(("#", "set ", "cd "))
    ]
    assert commands == ["exec make test </dev/null"]
    assert os.access(ROOT / ".ci/run", os.X_OK)
