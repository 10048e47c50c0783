"""Fit a contract: the fewest named traits under which every run stays within its limits with errors of the expected size.

It begins with the default contract, which every target has. Three things are weighed. A tensor beyond its limit in a run counts
VIOLATION. The size of the errors counts by how far their root mean square is from the scale that the contract predicts
(oracles/spread.py), so that a contract that is too wide loses as one that is too narrow does; what the predicted scale is worth is
measured on the same problem by a conforming implementation. Each trait costs COST, so that only what is seen is named. At the end
what the default allows and no run needs is taken back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import numpy as np

from .contract import POLICIES, PRESETS, TENSORS, Contract, contract_for
from .fitted import EVIDENCE, Fit, Seen
from .sample import Sample, log_sizes, outside, special
from .traits import ALLOWANCES, INSIDE, TRAITS, Trait

VIOLATION, COST, SIZE = 10.0, 0.5, 200.0
TOO_LARGE, TOO_SMALL = 1.0, 0.25
"""Errors larger than expected speak against a contract; smaller ones less so, since expectations err on that side."""
DEAD_ZONE = {"16 bit": (-0.04, 0.04), "witness": (-1.2, 0.45), "told": (-0.3, 0.15), "told gradient": (-1.0, 0.15)}
"""How far the size may be off at no cost. A tensor that holds float32 is a witness: its errors show the order of additions,
which nobody declares, and the default leaves room for an exponential of the hardware. Where the roundings that a contract
declares are DOMINANT times as large as those, its size is told again; a gradient may stay below, since the roundings of the
forward pass return in the backward pass and cancel in part."""
DOMINANT = math.log(4.0)
UNEXPLAINED = {"16 bit": math.log(1.15), "witness": math.log(2.5)}
SMALLER = math.log(1.1)
"""What is taken back must not make errors larger than expected by more than this."""
UNTOLD = 0.02
"""Of a target with a larger share of runs beyond its limits under every contract no trait is told: it is wrong, not narrow."""
NOISE = 5.0
"""A preset under which the runs lose no more than this above the fit describes them as well."""
MEASURED = 36
"""Runs of each dtype whose errors are measured; all are held to their limits."""
FEW = 6
"""Of those, runs of each dtype by which the LIKELY traits are picked that are tried on all."""
LIKELY, BEAM, ROUNDS, AGAIN = 6, 2, 8, 2
VIOLATING = 30
"""Runs beyond a limit on which traits are tried; the fitted contract is held against all."""
KEPT_FIELDS = ("kv_tile", "q_tile", "rescale_slack", "delta", "forward_only", "deterministic")
"""Items of a declared contract that no fit can see; they stay."""

BESIDE = {"kv_tile", "q_tile", "exp_u", "gqa_u", "gqa_eta", "deterministic", *POLICIES}
"""Fields by which a preset may differ from the fit: they say nothing of the kind of a rounding, or the default allows them."""


def fit(
    samples: Sequence[Sample], device: str = "cpu", kept: str = "", over: Callable[[], bool] = lambda: False
) -> Fit:
    """The contract that describes the runs. `kept` are items that no fit can see; `over` says that time is up."""
    with np.errstate(all="ignore"):
        return _Fitting(samples, device, kept, over).run()


Logs = dict[tuple[str, str], dict[int, float]]
"""(dtype, tensor) -> run -> the log of its errors over their expected size."""


@dataclass(frozen=True)
class _State:
    """A set of traits and how badly it does: the sizes of the measured runs' errors, and (run, tensor) pairs beyond a limit."""

    traits: tuple[Trait, ...]
    logs: Logs
    beyond: frozenset[tuple[int, str]]
    loss: float


class _Fitting:
    """One fit. What a run says under a contract is remembered: many traits leave the contract of a dtype as it is."""

    def __init__(self, samples: Sequence[Sample], device: str, kept: str, over: Callable[[], bool]) -> None:
        self.samples, self.device, self.kept, self.over = samples, device, kept, over
        self.dtypes = sorted({s.dtype for s in samples})
        self.measured = _measured(samples)
        self.few = [i for d in self.dtypes for i in [m for m in self.measured if samples[m].dtype == d][:FEW]]
        self.sizes: dict[tuple[int, Contract], dict[str, float]] = {}
        self.outside: dict[tuple[int, Contract], list[str]] = {}
        self.states: dict[tuple[Trait, ...], _State] = {}
        tight = self._by_dtype(ALLOWANCES)
        self.conforming = {
            i: log_sizes(samples[i], samples[i].conforming_errors, tight[samples[i].dtype]) for i in self.measured
        }
        self.start = self._beyond(self._by_dtype(()), range(len(samples)))
        wrong = sorted({i for i, _ in self.start})
        self.suspects = wrong[:: max(1, -(-len(wrong) // VIOLATING))]
        self.share = len(wrong) / max(1, len(self.suspects))

    def run(self) -> Fit:
        """Policies first, which show in few runs; then traits, again while runs on which none was tried are left beyond a limit."""
        candidates = _distinct((*ALLOWANCES, *TRAITS), self._by_dtype)
        policies, first = self._policies([t for t in candidates if t.policy]), self._state(())
        state = self._searched(policies, candidates)
        for _ in range(AGAIN):
            left = {i for i, _ in self._beyond(self._by_dtype(state.traits), range(len(self.samples)))}
            if not left - set(self.suspects) or self.over():
                break
            self.suspects = sorted({*self.suspects, *sorted(left - set(self.suspects))[:VIOLATING]})
            self.states.clear()
            state = self._searched(state.traits, candidates)
        return self._fit(first, state)

    def _searched(self, traits: tuple[Trait, ...], candidates: list[Trait]) -> _State:
        """From these traits on: add the one that helps most or put one in the place of another, the BEAM best sets side by side."""
        starts = [self._state((*traits, *some)) for some in _hiding(candidates)]
        beam = sorted({s.traits: s for s in starts}.values(), key=lambda s: s.loss)[:BEAM]
        for _ in range(ROUNDS):
            found = {s.traits: s for state in beam for s in (*self._changed(state, candidates), state)}
            best = sorted(found.values(), key=lambda s: s.loss)[:BEAM]
            if best == beam or self.over():
                break
            beam = best
        return self._pruned(self._refined(min([*beam, *found.values()], key=lambda s: s.loss), candidates))

    def _refined(self, state: _State, candidates: list[Trait]) -> _State:
        """The best state with others of the same groups, with and without what hides them: two changes that help together only."""
        kept = [t for t in state.traits if t not in ALLOWANCES]
        sets = [_with(kept, t) for old in kept if not old.policy for t in candidates if t.group == old.group]
        several = [(*traits, *some) for traits in sets for some in _hiding(candidates)]
        return min([state, *(self._state(traits) for traits in several if not self.over())], key=lambda s: s.loss)

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
        wrong = sorted({i for i, _ in state.beyond})
        some = wrong[:: max(1, len(wrong) // FEW)][:FEW]
        weight = VIOLATION * self.share * len(wrong) / max(1, len(some))
        bar = self._quick(state.traits, some, weight) - 1e-6
        free = [t for t in candidates if not t.policy and t not in state.traits]
        bounds = [
            (self._quick(_with(state.traits, t), some, weight), n, t) for n, t in enumerate(free) if not self.over()
        ]
        return [t for bound, _, t in sorted(bounds) if bound < bar][:LIKELY]

    def _quick(self, traits: tuple[Trait, ...], wrong: Sequence[int], weight: float) -> float:
        """What a state would lose, judged by few runs and by some that are wrong."""
        contracts = self._by_dtype(traits)
        return self._misfit(contracts, self.few) + weight * len(self._beyond(contracts, wrong))

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
        return ",".join(filter(None, [self.kept, *(t.declared for t in traits)]))

    def _declared(self, spec: str) -> dict[str, Contract]:
        """The contract of each dtype under a spec."""
        return {d: contract_for(spec, d, self.device).but(spec="") for d in self.dtypes}

    def _by_dtype(self, traits: Sequence[Trait]) -> dict[str, Contract]:
        return self._declared(self._spec(traits))

    def _state(self, traits: tuple[Trait, ...]) -> _State:
        key = tuple(sorted(set(traits), key=(*ALLOWANCES, *TRAITS).index))
        if key not in self.states:
            contracts = self._by_dtype(key)
            beyond = self._beyond(contracts, self.suspects)
            loss = (
                self._misfit(contracts, self.measured)
                + VIOLATION * self.share * len(beyond)
                + COST * sum(t not in ALLOWANCES for t in key)
            )
            self.states[key] = _State(key, self._logs(contracts, self.measured), beyond, loss)
        return self.states[key]

    def _misfit(self, contracts: dict[str, Contract], runs: Sequence[int]) -> float:
        """What the sizes of the errors cost: per dtype and tensor how far the middle run is off, the fewer runs the less."""
        plain, total = self._logs(self._by_dtype(()), runs), 0.0
        for key, sizes in self._logs(contracts, runs).items():
            wider = _middle([plain[key][i] - x for i, x in sizes.items() if i in plain.get(key, ())])
            off = _off(key[1], key[0], _middle(sizes.values()), wider > DOMINANT)
            paired = _kind(key[1], key[0]) == "16 bit"  # of two that agree, the one that agrees more
            total += min(1.0, len(sizes) / FEW) * (SIZE * off + (_middle(sizes.values()) ** 2 if paired else 0.0))
        return total

    def _beyond(self, contracts: dict[str, Contract], runs: Iterable[int]) -> frozenset[tuple[int, str]]:
        """(run, tensor) pairs beyond a limit."""
        out = set()
        for i in runs:
            key = (i, contracts[self.samples[i].dtype])
            if key not in self.outside:
                self.outside[key] = outside(self.samples[i], key[1])
            out |= {(i, n) for n in self.outside[key]}
        return frozenset(out)

    def _logs(self, contracts: dict[str, Contract], runs: Iterable[int]) -> Logs:
        """Per (dtype, tensor) and run the log of errors over what a conforming implementation's would be."""
        out: Logs = {}
        for i in runs:
            s = self.samples[i]
            contract = contracts[s.dtype]
            if (i, contract) not in self.sizes:
                self.sizes[i, contract] = log_sizes(s, s.errors, contract)
            for name, x in self.sizes[i, contract].items():
                paired = _kind(name, s.dtype) == "16 bit" and not _unrounded(name, contract)
                out.setdefault((s.dtype, name), {})[i] = x - (self.conforming[i].get(name, 0.0) if paired else 0.0)
        return out

    def _fit(self, first: _State, state: _State) -> Fit:
        """What is told of a state; of one that leaves too much unexplained, no traits."""
        named = tuple(t for t in state.traits if t not in ALLOWANCES)
        left = self._beyond(self._by_dtype(named), range(len(self.samples)))
        out = Fit(samples=len(self.samples), measured=len(self.measured))
        if len({i for i, _ in left}) > max(FEW, UNTOLD * len(self.samples)):
            named, left = tuple(t for t in named if t.policy), self.start
            state = self._state(named)
        out.traits = [self._seen(t, state) for t in named]
        out.spec = self._spec(named)
        tensor_cores = "hopper" if self.device.startswith("cuda") and self.dtypes != ["float32"] else "ieee"
        out.arithmetic = " + ".join([tensor_cores, *(t.name for t in named if not t.policy)])
        out.preset = self._preset(named)
        out.tighter = self._tighter(state, left)
        out.beyond = (len({i for i, _ in self.start}), len({i for i, _ in left}))
        for (dtype, name), logs in state.logs.items():
            before, after = (math.exp(_middle(x.values())) for x in (first.logs.get((dtype, name), {}), logs))
            out.sizes.setdefault(dtype, {})[name] = (round(before, 3), round(after, 3))
        out.unexplained = [*self._left(left), *self._large(state)]
        return out

    def _seen(self, trait: Trait, state: _State) -> Seen:
        """What the trait explains: the fitted contract against the same without it, by the runs that it makes a difference for."""
        without = self._state(tuple(t for t in state.traits if t is not trait))
        evidence = {}
        for n in TENSORS:
            sizes = [
                (x, state.logs[key][i])
                for key, logs in without.logs.items()
                for i, x in logs.items()
                if key[1] == n and i in state.logs.get(key, ()) and abs(x - state.logs[key][i]) > EVIDENCE / 2
            ]
            counts = [sum(x == n for _, x in s.beyond) for s in (without, state)]
            if sizes or counts[0] != counts[1]:
                before, after = (math.exp(_middle(x)) for x in (zip(*sizes, strict=True) if sizes else ((), ())))
                evidence[n] = (counts[0], counts[1], round(before, 3), round(after, 3))
        return Seen(trait, evidence)

    def _preset(self, traits: Sequence[Trait]) -> str:
        """A preset that names the same fields of the arithmetic, tiles and a wide exponential aside, under which the runs do as well."""
        if all(t.policy for t in traits):
            return ""
        spec = self._spec(traits)
        wanted, best = self._deviations(spec), ("", self._raw(self._by_dtype(traits)) + NOISE)
        for name in sorted(PRESETS, key=_of_a_backend):
            said = ",".join(filter(None, [name, self.kept]))
            if spec != said and self._deviations(said) == wanted:
                loss = self._raw(self._declared(said))
                best = (name, loss) if loss < best[1] - 1e-9 else best
        return best[0]

    def _deviations(self, spec: str) -> set[tuple[str, str]]:
        """(dtype, field) where the arithmetic of a spec differs from the default; of 16 bit where there is any."""
        default, said = self._declared(self.kept), self._declared(spec)
        dtypes = [d for d in self.dtypes if d != "float32"] or self.dtypes
        fields = set(vars(default[dtypes[0]])) - BESIDE
        return {(d, n) for d in dtypes for n in fields if getattr(said[d], n) != getattr(default[d], n)}

    def _raw(self, contracts: dict[str, Contract]) -> float:
        """What contracts lose in 16 bit where there is any, their traits not counted."""
        runs = [i for i in self.measured if self.samples[i].dtype != "float32"] or self.measured
        return self._misfit(contracts, runs) + VIOLATION * self.share * len(self._beyond(contracts, self.suspects))

    def _tighter(self, state: _State, left: frozenset[tuple[int, str]]) -> str:
        """Items that take back what the default allows and no run needs, where runs could have shown it."""
        chosen = [t for t in state.traits if t in ALLOWANCES and self._told((), t)]
        for t in INSIDE:
            after, contracts = self._told(chosen, t), self._by_dtype((*state.traits, t))
            small = after and max(map(_middle, after)) < SMALLER
            if small and self._beyond(contracts, range(len(self.samples))) <= left:
                return ",".join(x.declared for x in (t, *chosen))
        return ",".join(t.declared for t in chosen)

    def _told(self, traits: Sequence[Trait], new: Trait) -> list[list[float]]:
        """Per dtype and tensor the sizes of errors with a further trait, of the runs that it makes a difference for, if enough."""
        before, after = (self._logs(self._by_dtype(t), self.measured) for t in (traits, (*traits, new)))
        moved = [
            [x for i, x in logs.items() if abs(x - before.get(key, {}).get(i, x)) > EVIDENCE / 2]
            for key, logs in after.items()
        ]
        return [x for x in moved if len(x) >= FEW]

    def _left(self, left: frozenset[tuple[int, str]]) -> list[str]:
        """A line for each tensor that is still beyond a limit, with an example."""
        runs = {n: sorted(i for i, x in left if x == n) for n in TENSORS}
        return [
            f"{n}: {len(r)} run{'s' * (len(r) > 1)} of {len(self.samples)} still beyond the limit, as in {self.samples[r[0]].words}"
            for n, r in runs.items()
            if r
        ]

    def _large(self, state: _State) -> list[str]:
        """A line for each tensor whose errors are still larger than expected."""
        return [
            f"{name} in {dtype}: errors {math.exp(_middle(logs.values())):.2f} times as large as expected"
            for (dtype, name), logs in state.logs.items()
            if _middle(logs.values()) > UNEXPLAINED[_kind(name, dtype)]
        ]


def _measured(samples: Sequence[Sample]) -> list[int]:
    """The first MEASURED runs of each dtype that have a conforming answer beside them."""
    out, counts = [], dict.fromkeys({s.dtype for s in samples}, 0)
    for i, s in enumerate(samples):
        if s.conforming is not None and s.errors and counts[s.dtype] < MEASURED:
            counts[s.dtype] += 1
            out.append(i)
    return out


def _unrounded(name: str, contract: Contract) -> bool:
    """Whether nothing is rounded on the way to a tensor but the tensor itself: its expected size needs no factor then."""
    return not (contract.p_u if name in ("o", "dv") else contract.ds_u)


def _of_a_backend(preset: str) -> bool:
    """Whether a preset is named for one implementation; those that are not come first."""
    return preset.startswith("torch") or preset in ("cudnn", "efficient")


def _hiding(candidates: Iterable[Trait]) -> list[tuple[Trait, ...]]:
    """Every choice among the candidates that hide others."""
    free = [t for t in candidates if t in ALLOWANCES]
    return [some for n in range(len(free) + 1) for some in combinations(free, n)]


def _with(traits: Iterable[Trait], new: Trait) -> tuple[Trait, ...]:
    """The traits with one more, in the place of one of its group."""
    return (*(t for t in traits if t.group != new.group), new)


def _distinct(traits: Iterable[Trait], contracts: Callable[[Sequence[Trait]], dict[str, Contract]]) -> list[Trait]:
    """Traits that change some contract, each in a way of its own; the first of those that say the same."""
    seen, out = [contracts(())], []
    for t in traits:
        if (made := contracts((t,))) not in seen:
            seen.append(made)
            out.append(t)
    return out


def _middle(values: Iterable[float]) -> float:
    """The median; 0, the log of 1, of none."""
    listed = list(values)
    return median(listed) if listed else 0.0


def _kind(name: str, dtype: str) -> str:
    return "16 bit" if dtype in ("float16", "bfloat16") and name != "lse" else "witness"


def _off(name: str, dtype: str, log_size: float, told: bool) -> float:
    """How far errors are from their expected size beyond the dead zone: the square while that is small, then in proportion."""
    kind = _kind(name, dtype)
    if told and kind == "witness":
        kind = "told" if name in ("o", "lse") else "told gradient"
    low, high = DEAD_ZONE[kind]
    off = log_size - min(max(log_size, low), high)
    return (TOO_LARGE if off > 0 else TOO_SMALL) * 2 * (math.sqrt(1 + off * off) - 1)
