"""A pull request rehearsed in a scratch repository: a small kernel, its saved case, its ledger, and what changes do to it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from flashproof.ci import comment
from flashproof.fuzz.case import Case
from flashproof.fuzz.corpus import Record, save
from flashproof.oracles.finding import Finding

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
KERNEL = """
    import torch
    from scores import scores


    def flash(query, key, value, is_causal=False, scale=None):
        D = query.shape[-1]
        s = scores(query, key, scale)
        if is_causal:
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        return (s.softmax(-1) @ value.double()).to(query.dtype)
"""
SCORES = """
    def scores(query, key, scale):
        return (query.double() @ key.double().mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
"""
WRONG = "return (s.softmax(-1) @ value.double()).to(query.dtype) * (1.01 if key.shape[-2] > 20 else 1)"
RIGHT = "return (s.softmax(-1) @ value.double()).to(query.dtype)"
LEDGER = """
    [[known]]
    target = "kernels.py:flash"
    finding = "value:o"
    where = {{ Lk = {{ min = 21 }} }}
    issue = "https://example.org/issues/7"
    owner = "@attention"
    expires = {day}
"""
GATE = ["--max-len", "40", "--dtype", "float32", "--contract", "may_leak", "--examples", "40", "--min-cases", "15"]
FILES = ["--json", "out.json", "--comment", "out.md", "--summary", "summary.md", "--junit", "out.xml"]


class Repository:
    """A git repository with the kernel in it."""

    def __init__(self, top: Path) -> None:
        self.top = top
        top.mkdir()
        self.git("init", "-q", "-b", "main")
        self.write("kernels.py", KERNEL)
        self.write("scores.py", SCORES)
        save(Record("kernels.py:flash", Case(Lq=1, Lk=33, D=1, Dv=1)), top / "flashproof-corpus")
        self.commit("a kernel")

    def git(self, *arguments: str) -> str:
        env = os.environ | {
            f"GIT_{who}_{what}": "x@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
        }
        return subprocess.run(
            ["git", *arguments],  # noqa: S607 (the git that the user has)
            cwd=self.top,
            env=env,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    def write(self, name: str, text: str) -> None:
        (self.top / name).write_text(textwrap.dedent(text).lstrip())

    def change(self, old: str, new: str, name: str = "kernels.py") -> None:
        text = (self.top / name).read_text()
        assert old in text
        (self.top / name).write_text(text.replace(old, new))

    def commit(self, message: str) -> str:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message)
        return self.git("rev-parse", "HEAD")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "flashproof", *arguments]
        return subprocess.run(command, cwd=self.top, env=env, capture_output=True, text=True, check=False)

    def gate(
        self, *more: str, target: str = "kernels.py:flash", base: str = "main"
    ) -> subprocess.CompletedProcess[str]:
        done = self.run("gate", target, *GATE, *FILES, "--base", base, *more)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def document(self) -> dict:
        """What the gate wrote, after a check against the schema."""
        return comment.read(self.top / "out.json")

    def classes(self) -> dict[str, int]:
        kinds = [f["class"] for f in self.document()["failures"]]
        return {k: kinds.count(k) for k in kinds}

    def sticky(self) -> str:
        text = (self.top / "out.md").read_text()
        assert len(text.splitlines()) <= 15
        assert text.startswith(comment.MARKER)
        return text


@pytest.fixture
def repository(tmp_path):
    made = Repository(tmp_path / "scratch")
    made.git("checkout", "-q", "-b", "change")
    return made


def wrong_in_one_more_way(repository: Repository) -> None:
    """main is wrong for many keys; the change, for five queries too."""
    repository.git("checkout", "-q", "main")
    repository.change(RIGHT, WRONG)
    repository.commit("wrong for many keys, long ago")
    repository.git("checkout", "-q", "-b", "other")
    repository.change(
        "(1.01 if key.shape[-2] > 20 else 1)", "(1.01 if key.shape[-2] > 20 or query.shape[-2] == 5 else 1)"
    )


def test_a_good_change_passes(repository):
    repository.change("s = scores(query, key, scale)", "s = scores(query, key, scale) + 0.0")
    repository.commit("tidy")
    done = repository.gate()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "**flashproof passed**: no failure" in repository.sticky()
    assert repository.document()["base"]["revision"] == repository.git("rev-parse", "main")[:10]
    assert repository.git("worktree", "list").count("\n") == 0, "the base's tree is taken away again"


def test_a_wrong_change_fails_with_a_new_failure(repository):
    repository.change(RIGHT, WRONG)
    repository.commit("faster")
    done = repository.gate("--annotations")
    assert done.returncode == 1, done.stdout + done.stderr
    assert set(repository.classes()) == {"new"}
    assert "**flashproof failed**" in repository.sticky() and "new, <code>kernels" in repository.sticky()
    assert "::error file=kernels.py,line=5,title=flashproof%3A value o::kernels.py:flash" in done.stdout
    assert '<failure message="o: error' in (repository.top / "out.xml").read_text()


@pytest.mark.nightly
def test_two_workers_for_each_revision_tell_the_same_new_from_what_was_there(repository):
    wrong_in_one_more_way(repository)
    found = []
    for jobs in ("1", "2"):
        done = repository.gate("--examples", "120", "--jobs", jobs)
        assert done.returncode == 1, done.stdout + done.stderr
        document = repository.document()
        found.append(([f["case"] for f in document["failures"]], document["base"]["existing"], document["accepted"]))
        assert set(repository.classes()) == {"new"} and document["base"]["existing"]
        assert all(f["case"]["Lq"] == 5 and f["case"]["Lk"] <= 20 for f in document["failures"]), (
            "what was there is not new"
        )
    assert found[0] == found[1]


def test_a_change_that_excuses_itself_in_the_ledger_fails(repository):
    repository.change(RIGHT, WRONG)
    repository.write("flashproof-ledger.toml", LEDGER.format(day="2999-01-01"))
    next((repository.top / "flashproof-corpus").iterdir()).unlink()
    repository.commit("faster, a known failure, and a saved case less")
    done = repository.gate()
    assert done.returncode == 1, done.stdout + done.stderr
    assert "new" in repository.classes() and repository.document()["known"] == []
    assert "it has no effect before it is merged" in done.stdout
    assert repository.document()["corpus"] == {"cases": 1, "accepted": 1, "failures": 1}, (
        "the base's saved case is replayed"
    )
    assert "**flashproof failed**" in repository.sticky()


REFUSES = """if D > 16:
            raise NotImplementedError(f"head dim {D}")
        s = scores(query, key, scale)"""


def test_a_change_that_refuses_what_it_served_fails_unless_that_is_allowed(repository):
    repository.change(
        "    s = scores(query, key, scale)",
        textwrap.dedent(REFUSES).replace("\n        ", "\n    ").replace("if D", "    if D", 1),
    )
    repository.commit("fewer head dims")
    done = repository.gate()
    assert done.returncode == 1, done.stdout + done.stderr
    assert set(repository.classes()) == {"lost"}
    (lost,) = repository.document()["failures"]
    assert (
        lost["case"]["D"] == 17
        and "no longer answered: NotImplementedError: head dim 17" in lost["findings"][0]["message"]
    )
    assert "no longer answered, <code>kernels" in repository.sticky()
    leave = repository.gate("--allow-lost")
    assert leave.returncode == 0 and "allowed: coverage" in leave.stdout
    assert any("coverage" in w for w in repository.document()["warnings"])


@pytest.mark.nightly
def test_what_was_wrong_before_is_shown_and_does_not_fail(repository):
    repository.git("checkout", "-q", "main")
    repository.change(RIGHT, WRONG)
    repository.commit("wrong, long ago")
    repository.git("checkout", "-q", "-b", "other")
    repository.change("s = scores(query, key, scale)", "s = scores(query, key, scale) + 0.0")
    done = repository.gate()
    assert done.returncode == 0, done.stdout + done.stderr
    before = repository.document()["base"]["existing"]
    assert "value:o" in [e["finding"] for e in before]
    assert (
        "there before" in repository.sticky()
        and "with changes that are not committed" in done.stdout + repository.sticky().replace("&#46;", ".")
    )


@pytest.mark.nightly
def test_a_new_failure_behind_an_old_one_of_the_same_kind_is_found(repository):
    wrong_in_one_more_way(repository)
    done = repository.gate("--examples", "200")
    assert done.returncode == 1, done.stdout + done.stderr
    cases = [f["case"] for f in repository.document()["failures"]]
    assert cases and all(c["Lq"] == 5 and c["Lk"] <= 20 for c in cases)
    assert repository.document()["base"]["existing"]


@pytest.mark.nightly
def test_the_ledger_of_the_base_excuses_and_an_entry_taken_out_does_not(repository):
    repository.git("checkout", "-q", "main")
    repository.change(RIGHT, WRONG)
    text = LEDGER.format(day="2999-01-01").replace("finding", "#")
    repository.write("flashproof-ledger.toml", text)
    repository.commit("wrong, and known")
    repository.git("checkout", "-q", "-b", "other")
    assert repository.gate().returncode == 0
    assert repository.document()["known"][0]["issue"] == "https://example.org/issues/7"
    (repository.top / "flashproof-ledger.toml").unlink()
    done = repository.gate()
    assert done.returncode == 1 and "new" in repository.classes(), done.stdout


@pytest.mark.nightly
def test_contract_and_region_are_those_of_the_base(repository):
    declared = """

    from flashproof.fuzz.region import Region
    from flashproof.impls import Implementation

    declared = Implementation("declared", flash, contract="may_leak", supports=Region(
        dtypes=("float32",), masks=("none", "causal_top_left"), max_len=40, dv_differs=True, gqa=False, bias=False, bias_grad=False,
        softcap=False, dropout=False, lse=False, lse_grad=False))
    """
    repository.git("checkout", "-q", "main")
    text = (repository.top / "kernels.py").read_text() + textwrap.dedent(declared)
    (repository.top / "kernels.py").write_text(text)
    repository.commit("declared")
    repository.git("checkout", "-q", "-b", "other")
    repository.change('contract="may_leak"', 'contract="may_leak,u=0.1,out_u=0.1"')
    repository.change(RIGHT, WRONG)
    repository.change("max_len=40", "max_len=30")
    own = [a for a in GATE if a not in ("--contract", "may_leak")]
    done = repository.run("gate", "kernels.py:declared", *own, *FILES, "--base", "main")
    assert done.returncode == 1, done.stdout + done.stderr
    assert repository.document()["contract"] == "may_leak"
    assert {"new", "lost"} <= set(repository.classes())
    assert "the region no longer declares lengths above 30" in done.stdout


def test_a_base_that_does_not_import_is_blind_and_the_change_is_judged_all_the_same(repository):
    good = repository.git("rev-parse", "main")
    repository.git("checkout", "-q", "main")
    repository.change("import torch", "import torch, no_such_module")
    broken = repository.commit("broken")
    repository.git("checkout", "-q", "-b", "other")
    repository.change("import torch, no_such_module", "import torch")
    done = repository.gate()
    told = repository.document()
    assert done.returncode == 4, done.stdout + done.stderr
    (problem,) = told["problems"]
    assert problem.startswith(f"kernels.py:flash cannot be loaded at {broken[:10]}") and "no_such_module" in problem
    assert "\n" not in problem and done.stdout.count(problem) == 1
    assert repository.gate("--policy-from", good, base=good).returncode == 0, "the base alone was to blame"
    right = repository.document()
    assert right["problems"] == [] and right["failures"] == told["failures"] == []
    assert told["accepted"] >= 20 and 2 * told["accepted"] >= told["cases"], "there were enough cases"
    assert [told[n] for n in ("cases", "accepted")] == [right[n] for n in ("cases", "accepted")]
    repository.change(RIGHT, WRONG)
    assert repository.gate().returncode == 1


@pytest.mark.nightly
def test_a_new_target_is_judged_by_itself(repository):
    (repository.top / "more.py").write_text((repository.top / "kernels.py").read_text())
    done = repository.gate(target="more.py:flash")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "it is new" in done.stdout


@pytest.mark.nightly
def test_modules_are_taken_from_their_own_tree(repository):
    repository.change("return (query", "return 1.05 * (query", "scores.py")
    done = repository.gate(target="kernels:flash")
    assert done.returncode == 1, "the base imports its own scores.py"
    assert "new" in repository.classes()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["kernels.py:flash", "--base", "nosuch"], "--base must name a revision"),
        (["kernels.py:flash", "--base", "main", "--policy-from", "nosuch"], "--policy-from must name a revision"),
        (["../outside.py:f", "--base", "main"], "must lie in the repository"),
        (["textbook", "--base", "main"], "comes with flashproof"),
        (["kernels.py:flash", "--base", "main", "--in-process"], "--in-process cannot be used"),
        (["kernels.py:flash", "--base", "main", "--ledger", "../ledger.toml"], "--ledger must lie in the repository"),
    ],
)
@pytest.mark.nightly
def test_what_cannot_be_compared_is_one_sentence(repository, arguments, said):
    done = repository.run("gate", *arguments)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.nightly
def test_outside_a_repository_there_is_no_base(tmp_path):
    done = Repository.run(type("Nowhere", (), {"top": tmp_path}), "gate", "x.py:f", "--base", "main")
    assert done.returncode == 2 and "is in none" in done.stderr


@pytest.mark.nightly
def test_bisect_names_the_first_bad_commit_and_what_it_skipped(repository):
    commits = []
    good = repository.git("rev-parse", "main")
    for n in range(6):
        if n == 2:
            repository.change("import torch", "import torch, no_such_module")
        if n == 3:
            repository.change("import torch, no_such_module", "import torch")
        if n == 4:
            repository.change(RIGHT, WRONG)
        repository.write("note.txt", f"{n}\n")
        commits.append(repository.commit(f"change {n}"))
    finding = Finding("value", "o", "found before")
    path = save(
        Record("kernels.py:flash", Case(Lk=33), contract="may_leak", findings=(finding,)), repository.top / "failures"
    )
    done = repository.run("bisect", str(path), "--good", good)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"first bad commit: {commits[4]}" in done.stdout
    assert f"  {commits[2][:10]}: " in done.stdout and "no_such_module" in done.stdout
    assert repository.run("bisect", str(path), "--good", commits[5]).returncode == 2
    assert repository.git("status", "--porcelain", "--untracked-files=no") == ""


@pytest.mark.nightly
def test_bisect_does_not_guess_between_commits_that_cannot_be_run(repository):
    good = repository.git("rev-parse", "main")
    repository.change("import torch", "import torch, no_such_module")
    repository.commit("broken")
    repository.change("import torch, no_such_module", "import torch")
    repository.change(RIGHT, WRONG)
    repository.commit("wrong")
    path = save(Record("kernels.py:flash", Case(Lk=33), contract="may_leak"), repository.top / "failures")
    done = repository.run("bisect", str(path), "--good", good)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "is one of these" in done.stdout and "skipped 1:" in done.stdout
