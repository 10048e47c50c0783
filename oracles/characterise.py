"""Fit a contract: the fewest named traits under which every run stays within its limits with errors of the expected size.

Three things are weighed. An element beyond its limit counts VIOLATION for its case and tensor. The size of the errors counts
by how far their root mean square is from the scale that the contract predicts (oracles/spread.py), so that a contract that is
too wide loses as one that is too narrow does. Each trait costs COST, so that only what is seen is named. What the predicted
scale is worth is measured on the same problems: a conforming implementation gives the factor that makes it 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .contract import PRESETS, TENSORS, Contract, contract_for
from .sample import Sample, log_sizes, outside, special
from .traits import TIGHTEST, TRAITS, Trait

VIOLATION, COST, CAUTIOUS = 3.0, 0.5, 2.5
"""What promises more than the default does costs more."""
TOO_LARGE, TOO_SMALL = 3.0, 0.7
"""Errors larger than expected speak against a contract; smaller ones less so, since expectations err on that side."""
EVIDENCE = 0.04
"""A trait is seen in a tensor when its errors come this much nearer to their expected size, in natural logarithms."""
DEAD_ZONE = {"16 bit": (-0.05, 0.1), "witness": (-1.2, 0.45)}
"""How far the size may be off at no cost. A tensor that holds float32 is a witness: its errors show the order of additions,
which nobody declares, and the default leaves room for an exponential of the hardware."""
UNEXPLAINED = {"16 bit": math.log(1.15), "witness": math.log(2.5)}
MEASURED = 24
"""Runs of each dtype whose errors are measured; all are held to their limits."""
FEW = 6
"""Of those, runs of each dtype by which the LIKELY traits are picked that are tried on all."""
LIKELY, BEAM = 6, 2
VIOLATING = 30
"""Runs beyond a limit on which traits are tried; the fitted contract is held against all."""
ROUNDS = 8
KEPT_FIELDS = ("kv_tile", "q_tile", "rescale_slack", "delta", "forward_only", "deterministic")
"""Items of a declared contract that no fit can see; they stay."""


@dataclass(frozen=True)
class Seen:
    """A trait of the fitted contract and per tensor what speaks for it.

    `evidence`: tensor -> (runs beyond a limit without it, with it, size of the errors without it, with it).
    """

    trait: Trait
    evidence: dict[str, tuple[int, int, float, float]]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Where it is seen: fewer wrong runs, or errors nearer to their expected size."""
        return tuple(n for n, e in self.evidence.items() if e[1] < e[0] or nearer(e[2], e[3]) > EVIDENCE)


@dataclass
class Fit:
    """A fitted contract. `spec` is the line to paste; `tighter` are items that may be added since nothing needs what they take.

    `sizes`: dtype -> tensor -> (errors over their expected size before, after); `beyond` (before, after): runs outside a limit.
    `unexplained`: what no trait accounts for, in words. `preset`: the one that says the same, if one does.
    """

    spec: str = ""
    traits: list[Seen] = field(default_factory=list)
    tighter: str = ""
    preset: str = ""
    samples: int = 0
    measured: int = 0
    beyond: tuple[int, int] = (0, 0)
    sizes: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    unexplained: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The JSON object of a fit."""
        traits = [
            {"name": s.trait.name, "declared": s.trait.declared, "words": s.trait.words, "code_change": s.trait.code_change,
             "tensors": list(s.tensors),
             "evidence": {n: dict(zip(("beyond_without", "beyond_with", "size_without", "size_with"), e, strict=True))
                          for n, e in s.evidence.items()}}
            for s in self.traits
        ]  # fmt: skip
        plain = ("spec", "tighter", "preset", "samples", "measured", "beyond", "sizes", "unexplained")
        return {n: getattr(self, n) for n in plain} | {"traits": traits}


def fit(
    samples: Sequence[Sample], device: str = "cpu", kept: str = "", over: Callable[[], bool] = lambda: False
) -> Fit:
    """The contract that describes the runs. `kept` are items that no fit can see; `over` says that time is up."""
    with np.errstate(all="ignore"):
        return _Fitting(samples, device, kept, over).run()


def nearer(before: float, after: float) -> float:
    """How much nearer to 1 a ratio came, in natural logarithms."""
    if not before or not after:
        return 0.0
    return abs(math.log(before)) - abs(math.log(after))


@dataclass(frozen=True)
class _State:
    """A set of traits and how badly it does: per (dtype, tensor) the log sizes of each measured run; runs beyond a limit."""

    traits: tuple[Trait, ...]
    logs: dict[tuple[str, str], list[float]]
    beyond: frozenset[tuple[int, str]]
    loss: float


class _Fitting:
    """One fit. What a run says under a contract is remembered: many traits leave the contract of a dtype as it is."""

    def __init__(self, samples: Sequence[Sample], device: str, kept: str, over: Callable[[], bool]) -> None:
        self.samples, self.device, self.kept, self.over = samples, device, kept, over
        self.dtypes = sorted({s.dtype for s in samples})
        self.measured = _measured(samples)
        self.few = [s for d in self.dtypes for s in [m for m in self.measured if m.dtype == d][:FEW]]
        self.sizes: dict[tuple[int, Contract], dict[str, float]] = {}
        self.outside: dict[tuple[int, Contract], list[str]] = {}
        self.states: dict[tuple[Trait, ...], _State] = {}
        self.base = self._conforming()
        self.start = self._beyond((), range(len(samples)))
        wrong = sorted({i for i, _ in self.start})
        self.suspects = wrong[:: max(1, -(-len(wrong) // VIOLATING))]
        self.share = len(wrong) / max(1, len(self.suspects))

    def run(self) -> Fit:
        """Policies first, which show in few runs; then add the trait that helps most or put one in the place of another."""
        candidates = _distinct(TRAITS, self._contracts)
        policies, first = self._policies([t for t in candidates if t.policy]), self._state(())
        beam = [self._state(policies)]
        for _ in range(ROUNDS):
            found = {s.traits: s for state in beam for s in (*self._changed(state, candidates), state)}
            best = sorted(found.values(), key=lambda s: s.loss)[:BEAM]
            if best == beam or self.over():
                break
            beam = best
        return self._fit(first, self._pruned(min([*beam, *found.values()], key=lambda s: s.loss)))

    def _policies(self, candidates: Sequence[Trait]) -> tuple[Trait, ...]:
        """The policies without which more runs are wrong, the strictest of each group."""
        odd = sorted({i for i, _ in self.start if not self.samples[i].plain})
        chosen: tuple[Trait, ...] = ()
        for _ in range(len(candidates)):
            now = self._special(chosen, odd)
            tried = [(self._special(_with(chosen, t), odd), n, t) for n, t in enumerate(candidates)] if now else []
            if not tried or min(tried)[0] >= now:
                break
            chosen = _with(chosen, min(tried)[2])
        return chosen

    def _special(self, traits: tuple[Trait, ...], runs: Iterable[int]) -> int:
        """Tensors with wrong rows that have no key, or wrong non-finite numbers: what policies are about."""
        contracts = self._by_dtype(traits)
        return sum(special(self.samples[i], contracts[self.samples[i].dtype]) for i in runs)

    def _changed(self, state: _State, candidates: list[Trait]) -> list[_State]:
        """The states with one trait more, or one in the place of another."""
        fewer = [[x for x in state.traits if x is not old] for old in state.traits if not old.policy]
        sets = [_with(kept, t) for t in self._likely(candidates, state) for kept in (state.traits, *fewer)]
        return [self._state(traits) for traits in sets if not self.over()]

    def _likely(self, candidates: Iterable[Trait], state: _State) -> list[Trait]:
        """The LIKELY traits to be tried on all runs: those that do best on few, and better there than the state does."""
        scale = len(self.measured) / max(1, len(self.few))
        bar = self._quick(state.traits, scale) - 1e-6
        free = [t for t in candidates if not t.policy and t not in state.traits]
        bounds = [(self._quick(_with(state.traits, t), scale), n, t) for n, t in enumerate(free) if not self.over()]
        return [t for bound, _, t in sorted(bounds) if bound < bar][:LIKELY]

    def _quick(self, traits: tuple[Trait, ...], scale: float) -> float:
        """What a state would lose, judged by few runs."""
        some = self.suspects[:: max(1, len(self.suspects) // FEW)][:FEW]
        beyond = len(self._beyond(traits, some)) * self.share * len(self.suspects) / max(1, len(some))
        return self._misfit(traits, self.few) * scale + VIOLATION * beyond

    def _pruned(self, state: _State) -> _State:
        """The state without traits that others have made needless."""
        while any(not t.policy for t in state.traits):
            fewer = [
                self._state(tuple(t for t in state.traits if t is not gone)) for gone in state.traits if not gone.policy
            ]
            best = min(fewer, key=lambda s: s.loss)
            if best.loss > state.loss:
                break
            state = best
        return state

    def _spec(self, traits: Sequence[Trait]) -> str:
        return ",".join(filter(None, [self.kept, TIGHTEST, *(t.declared for t in traits)]))

    def _contracts(self, traits: tuple[Trait, ...]) -> tuple[Contract, ...]:
        return tuple(contract_for(self._spec(traits), d, self.device).but(spec="") for d in self.dtypes)

    def _by_dtype(self, traits: tuple[Trait, ...]) -> dict[str, Contract]:
        return dict(zip(self.dtypes, self._contracts(traits), strict=True))

    def _state(self, traits: tuple[Trait, ...]) -> _State:
        key = tuple(sorted(traits, key=TRAITS.index))
        if key not in self.states:
            beyond = self._beyond(key, self.suspects)
            loss = (
                self._misfit(key, self.measured)
                + VIOLATION * self.share * len(beyond)
                + sum(CAUTIOUS if t.tightens else COST for t in key)
            )
            self.states[key] = _State(key, self._logs(key, self.measured), beyond, loss)
        return self.states[key]

    def _misfit(self, traits: tuple[Trait, ...], runs: Sequence[Sample]) -> float:
        return sum(_misfit(n, d, x) for (d, n), values in self._logs(traits, runs).items() for x in values)

    def _beyond(self, traits: tuple[Trait, ...], runs: Iterable[int]) -> frozenset[tuple[int, str]]:
        """(run, tensor) pairs beyond a limit."""
        contracts, out = self._by_dtype(traits), set()
        for i in runs:
            key = (i, contracts[self.samples[i].dtype])
            if key not in self.outside:
                self.outside[key] = outside(self.samples[i], key[1])
            out |= {(i, n) for n in self.outside[key]}
        return frozenset(out)

    def _logs(self, traits: tuple[Trait, ...], runs: Sequence[Sample]) -> dict[tuple[str, str], list[float]]:
        """Per (dtype, tensor) the log of errors over what a conforming implementation's would be, one a measured run."""
        contracts = self._by_dtype(traits)
        out: dict[tuple[str, str], list[float]] = {}
        for s in runs:
            key = (id(s), contracts[s.dtype])
            if key not in self.sizes:
                self.sizes[key] = log_sizes(s, s.errors, key[1])
            for name, x in self.sizes[key].items():
                factor = 0.0 if _unrounded(name, key[1]) else self.base.get((s.dtype, name, s.kind), 0.0)
                out.setdefault((s.dtype, name), []).append(x - factor)
        return out

    def _conforming(self) -> dict[tuple[str, str, str], float]:
        """Per (dtype, tensor, kind of data) the mean log of the size of a conforming implementation's errors."""
        contracts = self._by_dtype(())
        found: dict[tuple[str, str, str], list[float]] = {}
        for s in self.measured:
            for name, x in log_sizes(s, s.conforming_errors, contracts[s.dtype]).items():
                if _kind(name, s.dtype) == "16 bit":
                    found.setdefault((s.dtype, name, s.kind), []).append(x)
        return {key: _mean(values) for key, values in found.items()}

    def _fit(self, first: _State, state: _State) -> Fit:
        left = self._beyond(state.traits, range(len(self.samples)))
        out = Fit(samples=len(self.samples), measured=len(self.measured))
        out.traits = [self._seen(t, state) for t in state.traits]
        declared = [t.declared for t in state.traits if not t.assumed]
        out.spec = ",".join(filter(None, [self.kept, *declared]))
        out.preset = self._preset(out.spec)
        out.tighter = self._tighter(state)
        out.beyond = (len({i for i, _ in self.start}), len({i for i, _ in left}))
        for (dtype, name), logs in state.logs.items():
            before, after = math.exp(_mean(first.logs.get((dtype, name), [0.0]))), math.exp(_mean(logs))
            out.sizes.setdefault(dtype, {})[name] = (round(before, 3), round(after, 3))
        out.unexplained = [*self._left(left), *self._large(state)]
        return out

    def _seen(self, trait: Trait, state: _State) -> Seen:
        """What the trait explains: the fitted contract against the same without it."""
        without = self._state(tuple(t for t in state.traits if t is not trait))
        names = [n for n in TENSORS if any(k[1] == n for k in state.logs) or any(n == x for _, x in without.beyond)]
        evidence = {}
        for n in names:
            pairs = [(k, without.logs[k]) for k in without.logs if k[1] == n]
            pairs = [(k, logs) for k, logs in pairs if k in state.logs]
            changed = [k for k, logs in pairs if abs(_mean(logs) - _mean(state.logs[k])) > EVIDENCE / 2] or [
                k for k, _ in pairs
            ]
            sizes = [
                math.exp(_mean([x for k in changed for x in s.logs[k]])) if changed else 0.0 for s in (without, state)
            ]
            counts = [sum(x == n for _, x in s.beyond) for s in (without, state)]
            evidence[n] = (counts[0], counts[1], round(sizes[0], 3), round(sizes[1], 3))
        return Seen(trait, evidence)

    def _preset(self, spec: str) -> str:
        """A preset that declares the same arithmetic, tiles aside."""

        def alike(words: str) -> list[Contract]:
            return [contract_for(words, d, self.device).but(spec="", kv_tile=8, q_tile=16) for d in self.dtypes]

        wanted = alike(spec)
        names = [n for n in PRESETS if alike(",".join(filter(None, [n, *self.kept.split(",")]))) == wanted]
        return next((n for n in names if n != spec), "") if wanted != alike(self.kept) else ""

    def _tighter(self, state: _State) -> str:
        """Items that take back what the default allows and no run shows, where runs could have shown it."""
        chosen = {t.name for t in state.traits} | (
            {"gqa", "dbias"} if any(t.name == "lowp" for t in state.traits) else set()
        )
        could = {
            "gqa": any(s.problem.sizes[1] > s.problem.sizes[2] and "dk" in s.errors for s in self.measured),
            "dbias": any("dbias" in s.errors and s.problem.bias is not None for s in self.measured),
        }
        narrow = set(self.dtypes) & {"float16", "bfloat16"}
        gone = [n for n, seen in could.items() if seen and narrow and n not in chosen]
        return ",".join(f"{n}_u=0,{n}_eta=0" for n in gone)

    def _left(self, left: frozenset[tuple[int, str]]) -> list[str]:
        """A line for each tensor that is still beyond a limit, with an example."""
        out = []
        for name in TENSORS:
            runs = sorted(i for i, n in left if n == name)
            if runs:
                many = f"{len(runs)} run{'s' * (len(runs) > 1)}"
                out.append(
                    f"{name}: {many} of {len(self.samples)} still beyond the limit, as in {self.samples[runs[0]].words}"
                )
        return out

    def _large(self, state: _State) -> list[str]:
        """A line for each tensor whose errors are still larger than expected."""
        return [
            f"{name} in {dtype}: errors {math.exp(_mean(logs)):.2f} times as large as expected"
            for (dtype, name), logs in state.logs.items()
            if _mean(logs) > UNEXPLAINED[_kind(name, dtype)]
        ]


def _measured(samples: Sequence[Sample]) -> list[Sample]:
    """The first MEASURED runs of each dtype that have a conforming answer beside them."""
    out, counts = [], dict.fromkeys({s.dtype for s in samples}, 0)
    for s in samples:
        if s.conforming is not None and s.errors and counts[s.dtype] < MEASURED:
            counts[s.dtype] += 1
            out.append(s)
    return out


def _unrounded(name: str, contract: Contract) -> bool:
    """Whether nothing is rounded on the way to a tensor but the tensor itself: its expected size needs no factor then."""
    return not (contract.p_u if name in ("o", "dv") else contract.ds_u)


def _with(traits: Iterable[Trait], new: Trait) -> tuple[Trait, ...]:
    """The traits with one more, in the place of one of its group."""
    return (*(t for t in traits if t.group != new.group), new)


def _distinct(traits: Iterable[Trait], contracts: Callable[[tuple[Trait, ...]], tuple[Contract, ...]]) -> list[Trait]:
    """Traits that change some contract, each in a way of its own; the first of those that say the same."""
    seen, out = {contracts(())}, []
    for t in traits:
        if (made := contracts((t,))) not in seen:
            seen.add(made)
            out.append(t)
    return out


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _kind(name: str, dtype: str) -> str:
    return "16 bit" if dtype in ("float16", "bfloat16") and name != "lse" else "witness"


def _misfit(name: str, dtype: str, log_size: float) -> float:
    """What the size of one run's errors counts: the square of how far it is off, beyond the dead zone."""
    low, high = DEAD_ZONE[_kind(name, dtype)]
    off = log_size - min(max(log_size, low), high)
    return (TOO_LARGE if off > 0 else TOO_SMALL) * off * off
