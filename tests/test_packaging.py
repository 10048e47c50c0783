"""What is built holds the package and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
FOLDERS = ("fuzz", "impls", "oracles", "ci")


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A folder with the sdist, and the wheel that was built from it; nothing is fetched."""
    tree, out = tmp_path_factory.mktemp("tree") / "flashproof", tmp_path_factory.mktemp("dist")
    skip = shutil.ignore_patterns(
        ".venv*", ".git", "build", "dist", "*.egg-info", ".*_cache", "__pycache__", ".hypothesis"
    )
    shutil.copytree(ROOT, tree, symlinks=True, ignore=skip)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(dist):
    return set(zipfile.ZipFile(next(dist.glob("*.whl"))).namelist())


@pytest.fixture(scope="module")
def sdist(dist):
    return {n.partition("/")[2] for n in tarfile.open(next(dist.glob("*.tar.gz"))).getnames()}


def test_the_wheel_puts_one_folder_into_site_packages(wheel):
    assert {n.split("/")[0] for n in wheel if ".dist-info/" not in n} == {"flashproof"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_wheel_has_every_module(wheel, folder):
    want = {f"flashproof/{folder}/{p.relative_to(ROOT / folder)}" for p in (ROOT / folder).rglob("*.py")}
    assert want and want <= wheel


def test_the_wheel_is_typed_and_licensed(wheel):
    assert "flashproof/py.typed" in wheel
    assert [n for n in wheel if n.endswith("licenses/LICENSE")]


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_sdist_keeps_the_top_level_folders(sdist, folder):
    assert {f"{folder}/{p.name}" for p in (ROOT / folder).glob("*.py")} <= sdist


def test_the_wheel_is_imported_without_the_source_tree(dist, tmp_path):
    zipfile.ZipFile(next(dist.glob("*.whl"))).extractall(tmp_path)  # noqa: S202 (built here)
    command = [sys.executable, "-c", "import flashproof.fuzz.case as m; print(m.__file__, m.Case())"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert str(tmp_path) in done.stdout, done.stderr
