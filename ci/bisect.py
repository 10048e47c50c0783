"""Which commit broke a case: git bisect, where each revision replays the case in a worker of its own."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path

import click

from ..fuzz.commands import Exit, Options, Stop, flashproof, takes_options
from ..fuzz.corpus import CorpusError, Record, judgeable
from ..fuzz.hunting import rerun
from ..fuzz.judge import Verdict
from ..fuzz.rooted import Tree
from ..fuzz.session import opened
from .revisions import SHORT, Repository, has, inside, last

REFUSALS = ("coverage", "refusal")
"""Findings for which a revision that refuses the case is a bad one."""
FIRST_BAD = re.compile(r"^([0-9a-f]{40,64}) is the first (?:bad|'bad') commit", re.MULTILINE)


@flashproof.command("bisect")
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--good", required=True, metavar="REV", help="A revision that is right on the case.")
@click.option("--bad", default="HEAD", show_default=True, metavar="REV", help="A revision that is wrong on it.")
@click.option(
    "--target", default="", metavar="TARGET", help="Run the case on this target instead of the one that failed."
)
@takes_options
def bisect(path: Path, good: str, bad: str, target: str, options: Options) -> Exit:
    """Print the first commit after --good that is wrong on the case in FILE, as it was found there.

    Revisions that cannot be loaded, or cannot say the case, are skipped and named. Code 4: too many were.

    Example: flashproof bisect failures/3f2a91bc.json --good v1.2
    """
    if options.in_process:
        raise Stop("--in-process cannot be used with bisect: two revisions of one module need two processes")
    try:
        record = judgeable(path)
    except CorpusError as e:
        raise Stop(str(e)) from None
    name = target or record.target
    repository = Repository.here("bisect")
    inside(repository, name, "bisect")
    first, last_ = repository.resolve(good, "--good"), repository.resolve(bad, "--bad")
    own = options.over("" if target else record.dialect, record.device, "" if target else record.contract)
    with repository.checkout(last_) as tree:
        return Bisection(repository, tree, record, name, own).run(first, last_)


@dataclass
class Bisection:
    """git bisect in a tree of its own: neither the working tree nor a bisection under way there is touched."""

    repository: Repository
    tree: Tree
    record: Record
    target: str
    options: Options
    skipped: list[str] = field(default_factory=list)
    asked: dict[str, str] = field(default_factory=dict)

    def run(self, good: str, bad: str) -> Exit:
        """Check both ends, then halve what lies between them."""
        if good == bad:
            raise Stop(f"--good and --bad must be two revisions, got {good[:SHORT]} for both")
        for name, commit, wanted in (("--bad", bad, "bad"), ("--good", good, "good")):
            self._git("checkout", "--detach", "--force", commit)
            state, why = self.state()
            click.echo(f"{commit[:SHORT]}  {state:5} {why}")
            if state != wanted:
                rule = "fail on the case" if wanted == "bad" else "be right on the case"
                raise Stop(f"{name} must {rule}, but {commit[:SHORT]} is {state}: {why or 'it passes'}")
        out = self._git("bisect", "start", bad, good)
        while True:
            found = FIRST_BAD.search(out)
            if found:
                return self._found(found.group(1))
            if "first bad commit could be any of" in out:
                return self._unknown(out)
            out = self._step()

    def _step(self) -> str:
        """What git says when it is told how the revision that it checked out does."""
        commit = self._git("rev-parse", "HEAD").strip()
        if commit in self.asked:
            raise Stop(f"git bisect asked for {commit[:SHORT]} twice", Exit.INFRASTRUCTURE)
        self.asked[commit], why = self.state()
        click.echo(f"{commit[:SHORT]}  {self.asked[commit]:5} {why}")
        if self.asked[commit] == "skip":
            self.skipped.append(f"{commit[:SHORT]}: {why}")
        return self._git("bisect", self.asked[commit], fails=True)

    def state(self) -> tuple[str, str]:
        """("good" | "bad" | "skip", why) of the revision that is checked out."""
        tree = dataclasses.replace(self.tree, label=self._git("rev-parse", "--short", "HEAD").strip())
        if not has(tree, self.target):
            return "skip", f"it has no {self.target}"
        try:
            with opened(self.target, self.options, tree=tree) as session:
                session.judge.region = None  # a refusal is judged by what the file says was found
                return judged(self.record, rerun(session, self.record))
        except Stop as e:
            if e.code not in (Exit.USAGE, Exit.INFRASTRUCTURE) or e.message.startswith(("device", "contract")):
                raise
            return "skip", e.message.partition("\n")[0]

    def _found(self, commit: str) -> Exit:
        told = self._git("show", "--no-patch", "--format=%h  %an, %ad%n    %s", "--date=short", commit).strip()
        click.echo(f"\nfirst bad commit: {commit}\n{told}")
        self._tell_skipped()
        return Exit.RIGHT

    def _unknown(self, out: str) -> Exit:
        commits = re.findall(r"^[0-9a-f]{40,64}$", out, re.MULTILINE)
        click.echo("\nthe first bad commit is one of these, of which none but the last can be run:")
        for commit in commits:
            click.echo(f"  {self._git('show', '--no-patch', '--format=%h %s', commit).strip()}")
        self._tell_skipped()
        return Exit.BLIND

    def _tell_skipped(self) -> None:
        if self.skipped:
            click.echo("\n".join([f"skipped {len(self.skipped)}:", *(f"  {line}" for line in self.skipped)]))

    def _git(self, *arguments: str, fails: bool = False) -> str:
        """What a git command printed in the tree; Stop if it failed, unless that says something too."""
        done = self.repository.git("-c", "core.hooksPath=/dev/null", *arguments, where=Path(self.tree.root))
        if done.returncode and not (fails and done.stdout.strip()):
            raise Stop(f"git {arguments[0]} failed: {last(done.stderr or done.stdout)}", Exit.INFRASTRUCTURE)
        return done.stdout


def judged(record: Record, verdict: Verdict) -> tuple[str, str]:
    """("good" | "bad" | "skip", why): bad is what shows a finding of the file, or any where the file has none."""
    wanted = {f.key for f in record.findings}
    message = verdict.execution.message if verdict.execution else ""
    if verdict.status in ("refused", "inexpressible"):
        bad = any(f.oracle in REFUSALS for f in record.findings)
        return ("bad" if bad else "skip"), f"{verdict.status}: {message}"
    if verdict.status == "infrastructure":
        return "skip", message
    shown = [f for f in verdict.failures if not wanted or f.key in wanted]
    if shown:
        return "bad", str(shown[0])
    other = f"fails otherwise: {verdict.failures[0]}" if verdict.failures else ""
    return "good", other
