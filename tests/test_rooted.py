"""A target is loaded from the tree that is named, and from no other."""

import functools
import os
import sys

import pytest

from flashproof.fuzz.rooted import Tree, check, enter, module_path, source, tree_from_json
from flashproof.impls.loading import TargetError


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name in ("old/src", "old/lib", "new/src", "new/lib", "new/venv/site-packages", "new/untracked"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "")
    return Tree(str(tmp_path / "old"), str(tmp_path / "new"), label="abc")


def test_the_tree_comes_first_and_nothing_of_the_other_one_is_left(tree):
    new, old = tree.original, tree.root
    given = [f"{new}/lib", f"{new}/untracked", f"{new}/venv/site-packages", "/usr/lib/python3"]
    assert module_path(tree, given) == [
        old,
        f"{old}/src",
        f"{old}/lib",
        f"{new}/venv/site-packages",
        "/usr/lib/python3",
    ]


def test_the_working_tree_keeps_its_own_path(tree):
    own = Tree(tree.original, tree.original)
    assert module_path(own, [f"{own.root}/untracked"])[-1] == f"{own.root}/untracked"


def test_a_process_that_enters_writes_no_bytecode_and_stands_in_the_tree(tree):
    assert enter(tree, f"{tree.original}/lib/k.py:f") == f"{tree.root}/lib/k.py:f"
    assert sys.dont_write_bytecode and os.getcwd() == tree.root and sys.path[0] == tree.root


def test_a_module_from_elsewhere_is_no_revision(tree):
    with pytest.raises(TargetError, match="must lie in the repository"):
        check(tree, "json:loads")
    check(tree, f"{tree.root}/k.py:f")


def test_a_path_outside_the_repository_has_no_place(tree):
    assert tree.place("../elsewhere/k.py") is None
    assert tree_from_json(tree.to_json()) == tree


def test_a_callable_tells_where_it_is_defined():
    line = test_a_callable_tells_where_it_is_defined.__code__.co_firstlineno
    assert source(functools.partial(test_a_callable_tells_where_it_is_defined)) == [__file__, line]
    assert source(len) == []
