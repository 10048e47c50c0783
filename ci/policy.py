"""What a target is held to: the ledger, contract and region of the revision that a change is compared to, not the change's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..fuzz.commands import Exit, Options, Stop
from ..fuzz.ledger import LEDGER, Entry, LedgerError, load
from ..fuzz.region import Region
from ..fuzz.rooted import Tree
from ..fuzz.session import Session, opened
from .compare import widest
from .revisions import Revisions, has

OWN = "default"
"""The contract of a target that declares none: said aloud, so that what the change declares has no effect."""


@dataclass(frozen=True)
class Rules:
    """The ledger that holds. `removed` are entries that the change takes out, `renewed` those whose day it moves."""

    entries: tuple[Entry, ...] = ()
    removed: tuple[Entry, ...] = ()
    renewed: frozenset[tuple[object, ...]] = frozenset()
    notes: tuple[str, ...] = ()


def rules(given: Path | None, revisions: Revisions | None) -> Rules:
    """The ledger of a gate; Stop says in one sentence what is wrong with it.

    Compared with a base revision an entry counts only if that revision has it and the change keeps it: a change can tighten
    the ledger at once, and loosen it only by being merged.
    """
    path = given or LEDGER
    own = _entries(path)
    if revisions is None:
        if own is None and given:
            raise Stop(f"--ledger must be a file that exists, got {given}")
        return Rules(own or ())
    inside = revisions.repository.path(path)
    if inside is None:
        raise Stop(
            f"--ledger must lie in the repository {revisions.repository.top} to be read from its base, got {path}"
        )
    base = _entries(Path(revisions.policy.root, inside), f"{path} at {revisions.policy.label}")
    if base is None and own is None and given:
        raise Stop(f"--ledger must be a file that exists in one of the two revisions, got {given}")
    return _tightened(own or (), base or (), path, revisions.policy.label)


def _tightened(own: tuple[Entry, ...], base: tuple[Entry, ...], path: Path, label: str) -> Rules:
    kept = {e.same: e for e in own}
    before = {e.same for e in base}
    added = [e for e in own if e.same not in before]
    notes = [f"{path} adds {e.target}: {e.words()}; it has no effect before it is merged" for e in added]
    moved = [e for e in base if e.same in kept and kept[e.same].expires > e.expires]
    notes += [f"{path} gives {e.target}: {e.words()} more time; at {label} it ends on {e.expires}" for e in moved]
    return Rules(
        tuple(e for e in base if e.same in kept),
        tuple(e for e in base if e.same not in kept),
        frozenset(e.same for e in moved),
        tuple(notes),
    )


def _entries(path: Path, name: str = "") -> tuple[Entry, ...] | None:
    """The entries of a ledger; None where there is no such file."""
    try:
        return load(path) if path.exists() else None
    except LedgerError as e:
        raise Stop(str(e).replace(str(path), name or str(path), 1)) from None


@dataclass
class Held:
    """What a target is held to, and the session of its base revision where there is one to compare with.

    `contract` is what the new revision is run with; `region` is None where nothing is declared. `problems` make the gate blind.
    """

    contract: str
    region: Region | None = None
    old: Session | None = None
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@contextmanager
def held(target: str, options: Options, revisions: Revisions | None) -> Iterator[Held]:
    """What a target is held to; without revisions, what it declares itself."""
    if revisions is None:
        yield Held(options.contract)
        return
    out = Held(options.contract)
    told = _declared(target, options, revisions.policy, out)
    if told is not None:
        out.contract, out.region = told
        out.notes.append(f"contract and region are those of {revisions.policy.label}")
    with _session(target, replace(options, contract=out.contract), revisions.base, out) as out.old:
        yield out


def _declared(target: str, options: Options, tree: Tree, out: Held) -> tuple[str, Region | None] | None:
    """(contract, region) that a target declares in a tree; None where it cannot be asked."""
    with _session(target, options, tree, out) as session:
        return None if session is None else (session.judge.spec or OWN, session.declared)


@contextmanager
def _session(target: str, options: Options, tree: Tree, out: Held) -> Iterator[Session | None]:
    """The session of a target in a tree; None, with a note or a problem, where the tree has none that can be loaded."""
    if not has(tree, target):
        _say(out.notes, f"{tree.label} has no {target}: it is new, and judged by its own contract and region")
        yield None
        return
    context = opened(target, options, tree=tree)
    try:
        session = context.__enter__()
    except Stop as e:
        if e.code is not Exit.USAGE:
            raise
        if "must name something that exists" in e.message:
            _say(out.notes, f"{tree.label} has no {target}: it is new, and judged by its own contract and region")
        else:
            _say(out.problems, f"{target} cannot be loaded at {tree.label}, so its contract and region there are unknown "
                 f"and nothing was compared: {e.message}")  # fmt: skip
        yield None
        return
    try:
        yield session
    finally:
        context.__exit__(None, None, None)


def _say(lines: list[str], line: str) -> None:
    if line not in lines:
        lines.append(line)


def bound(session: Session, held_to: Held) -> Session:
    """The session of the new revision, held to that: its own declaration can add to the region, and take nothing from it."""
    old = held_to.old
    if old is None and held_to.region is None:
        return session
    both = [r for r in (held_to.region, session.declared) if r is not None]
    session.judge.region = widest(*both) if len(both) > 1 else next(iter(both), None)
    drawn = widest(old.region, session.region) if old is not None else session.region
    return replace(session, region=drawn, declared=session.judge.region)
