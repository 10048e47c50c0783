"""The worked examples of docs/bring-your-own.md: the page shows them as they are, each passes, and each is caught with one line broken."""

import re
from pathlib import Path

import pytest

from flashproof.__main__ import run
from flashproof.fuzz import adapter, hunting
from flashproof.fuzz.commands import Exit
from flashproof.fuzz.found import Policy

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "bring-your-own.md").read_text()
QUICK = Policy(more=(1, 2), distinct=1, shrink_seconds=1.0, probes=40, again=1)
EXAMPLES = (
    "triton_kernel",
    "raw_pair",
    "fused_qkv",
    "module",
    "packed_trainer",
    "transformers_interface",
    "library_op",
)
SLOW = ("triton_kernel", "library_op")
"""Interpreted, or not to be loaded twice into one process."""
BROKEN = [
    ("triton_kernel", "tl.exp(m - safe)", "tl.exp(m - m)"),
    ("triton_kernel", "j[None, :] <= i[:, None] + Lk - Lq", "j[None, :] <= i[:, None]"),
    ("triton_kernel", "(i[:, None] < Lq) & (j[None, :] < Lk)", "(i[:, None] < Lq) & (j[None, :] < Lk + 1)"),
    ("raw_pair", "lse.copy_(m + torch.log2(total))", "lse.copy_(m + torch.log(total))"),
    ("raw_pair", "dk.copy_(", "dk.add_("),
    ("raw_pair", "ds.mT @ q).transpose(1, 2))", "ds.mT @ q)[:, :, :TILE].transpose(1, 2))"),
    ("fused_qkv", "dq, dk, dv = dqkv.unbind(2)", "dk, dq, dv = dqkv.unbind(2)"),
    ("fused_qkv", "dq, dk, dv = dqkv.unbind(2)", "dq, dk, dv = dqkv.flatten(2, 3).unflatten(2, (-1, 3)).unbind(3)"),
    ("fused_qkv", "triu(1)", "triu(2)"),
    ("module", "if self.mask.shape[0] < q.shape[1]:", "if not self.mask.numel():"),
    ("module", "triu(1)", "triu(2)"),
    ("packed_trainer", "tril(kb.shape[1] - qb.shape[1])", "tril(0)"),
    ("packed_trainer", "k[keys], v[keys]", "k[keys], v[rows]"),
    ("transformers_interface", "is None else scaling", "is None else query.shape[-1] ** -0.5"),
    ("transformers_interface", "repeat_interleave(groups, 1), value", "repeat(1, groups, 1, 1), value"),
    ("library_op", " + dlse[..., None]", ""),
    ("library_op", "(p * dp).sum(-1, keepdim=True)", "0.0"),
]
"""One line of each example, right and wrong."""


@pytest.fixture
def hunted(tmp_path, monkeypatch):
    """A function from the text of a target to the exit code of a short hunt on it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hunting, "policy", lambda *_: QUICK)

    def code(text, examples, *more):
        (tmp_path / "kernel.py").write_text(text)
        return run(["fuzz", "kernel.py", "--examples", str(examples), "--max-len", "70", *more])

    return code


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_page_shows_the_adapter_as_it_is(name):
    own = (DOCS / "examples" / f"{name}.py").read_text().partition("# The adapter\n")[2].strip()
    assert f"```python\n{own}\n```" in PAGE


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_passes(hunted, name):
    assert hunted((DOCS / "examples" / f"{name}.py").read_text(), 24) == Exit.RIGHT


def broken(name, right, wrong):
    text = (DOCS / "examples" / f"{name}.py").read_text()
    assert text.count(right) == 1
    return text.replace(right, wrong)


@pytest.mark.parametrize(("name", "right", "wrong"), [b for b in BROKEN if b[0] not in SLOW])
def test_a_broken_line_is_caught(hunted, name, right, wrong):
    assert hunted(broken(name, right, wrong), 300, "--in-process") == Exit.WRONG


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "right", "wrong"), [b for b in BROKEN if b[0] in SLOW])
def test_a_broken_line_of_a_slower_example_is_caught(hunted, name, right, wrong):
    assert hunted(broken(name, right, wrong), 300) == Exit.WRONG


def table(first):
    """Names in the first column of the table of the page whose head is `first`, all of them."""
    rows = [part.partition("\n\n")[0] for part in PAGE.split(f"| {first} |")[1:]]
    return {name for row in "\n".join(rows).splitlines() for name in re.findall(r"`(\w+)`", row.split(" | ")[0])}


def test_the_page_names_all_that_may_be_taken_and_declared():
    assert set(adapter.FORWARD | adapter.BACKWARD) <= table("parameter")
    assert set(adapter.target.__kwdefaults__) <= table("argument")
    said = {*adapter.SIZES, *adapter.OUTPUTS, *adapter.GRADIENTS, "made"}
    assert {n for n in said if f"`{n}`" not in PAGE} == set()
