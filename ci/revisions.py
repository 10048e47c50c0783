"""Revisions of a git repository as trees that a target can be loaded from: the working tree, and any other one in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..fuzz.commands import Exit, Stop
from ..fuzz.rooted import Tree, named

SHORT = 10
LOCAL = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
"""Variables that a hook sets and that would make git look at another repository than the one of its working folder."""


@dataclass(frozen=True)
class Repository:
    """A git repository, by the folder it is checked out in; `inside` is where the command was started, below it."""

    top: Path
    inside: str

    @classmethod
    def here(cls, option: str) -> Repository:
        """The repository of the working folder; Stop where there is none."""
        done = _git(Path.cwd(), "rev-parse", "--show-toplevel")
        if done.returncode:
            raise Stop(f"{option} must be used in a git repository, but {Path.cwd()} is in none ({last(done.stderr)})")
        top = Path(done.stdout.strip()).resolve()
        return cls(top, str(Path.cwd().resolve().relative_to(top)))

    def resolve(self, revision: str, option: str) -> str:
        """The commit that a revision names; Stop if there is none."""
        done = self.git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
        if done.returncode:
            shallow = self.git("rev-parse", "--is-shallow-repository").stdout.strip() == "true"
            hint = "; the clone is shallow: fetch more of it (in a workflow, fetch-depth: 0)" if shallow else ""
            raise Stop(f"{option} must name a revision of {self.top}, got {revision!r}{hint}")
        return done.stdout.strip()

    def git(self, *arguments: str, where: Path | None = None) -> subprocess.CompletedProcess[str]:
        """What a git command gave."""
        return _git(where or self.top, *arguments)

    @property
    def tree(self) -> Tree:
        """The working tree, as it is."""
        return Tree(str(self.top), str(self.top), self.inside, self.state())

    def state(self) -> str:
        """The working tree in words: its commit, and whether anything in it is not committed."""
        head = self.git("rev-parse", "--short", "HEAD").stdout.strip() or "no commit"
        dirty = bool(self.git("status", "--porcelain", "--untracked-files=no").stdout.strip())
        return f"{head} with changes that are not committed" if dirty else head

    def path(self, path: Path) -> Path | None:
        """A path below the repository's top; None for one outside."""
        full = path.resolve()
        return full.relative_to(self.top) if full.is_relative_to(self.top) else None

    @contextmanager
    def checkout(self, commit: str) -> Iterator[Tree]:
        """The tree of a commit, in a temporary folder that is removed at the end. No hook of the repository runs."""
        with tempfile.TemporaryDirectory(prefix="flashproof-") as folder:
            place = Path(folder).resolve() / "tree"
            done = self.git(
                "-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach", "--force", str(place), commit
            )
            if done.returncode:
                raise Stop(f"git could not check {commit[:SHORT]} out: {last(done.stderr)}", Exit.INFRASTRUCTURE)
            try:
                yield Tree(str(place), str(self.top), self.inside, commit[:SHORT])
            finally:
                self.git("worktree", "remove", "--force", str(place))
                self.git("worktree", "prune")


def _git(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {n: v for n, v in os.environ.items() if n not in LOCAL} | {"LC_ALL": "C"}
    try:
        return subprocess.run(
            ["git", *arguments], cwd=where, env=environment, capture_output=True, text=True, errors="replace", check=False  # noqa: S607 (the git that the user has)
        )  # fmt: skip
    except OSError as e:
        raise Stop(f"git is needed to look at revisions, but it cannot be started: {e.strerror}") from None


def last(text: str) -> str:
    """The last line of what a command printed."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def has(tree: Tree, target: str) -> bool:
    """Whether a tree has the file or module that a target names."""
    kind, place = named(target)
    if kind == "file":
        found = tree.place(place)
        return found is not None and found.is_file()
    parts = place.split(".")
    roots = [Path(tree.root, tree.inside), Path(tree.root), Path(tree.root, "src")]
    return any(
        r.joinpath(*parts).with_suffix(".py").is_file() or r.joinpath(*parts, "__init__.py").is_file() for r in roots
    )


def inside(repository: Repository, target: str, option: str) -> None:
    """Stop for a target that has no revisions: one outside the repository, or one that comes with flashproof."""
    kind, place = named(target)
    if kind == "known":
        raise Stop(f"{option} needs targets of the repository, but {target} comes with flashproof: it has one revision")
    if kind == "file" and repository.path(Path(place)) is None:
        raise Stop(
            f"target {target} must lie in the repository {repository.top}, so that {option} has another revision of it"
        )


@dataclass
class Revisions:
    """The revisions that a gate looks at: the working tree, the base it is compared to, and the one whose policy holds."""

    repository: Repository
    new: Tree
    base: Tree
    policy: Tree

    @classmethod
    @contextmanager
    def opened(cls, base: str, policy: str) -> Iterator[Revisions]:
        """The revisions that `--base` and `--policy-from` name (default: the same), checked out until the end."""
        repository = Repository.here("--base")
        commit = repository.resolve(base, "--base")
        judged = repository.resolve(policy, "--policy-from") if policy else commit
        with ExitStack() as stack:
            old = stack.enter_context(repository.checkout(commit))
            rules = old if judged == commit else stack.enter_context(repository.checkout(judged))
            yield cls(repository, repository.tree, old, rules)
