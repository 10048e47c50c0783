"""A target made ready to be judged: its runner, its judge, the region its cases come from, and the lines that say so."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from ..impls.loading import TargetError
from ..oracles.contract import TENSORS, contract_for
from .commands import Exit, Options, Stop
from .execute import DeviceAbsent, Runner, region_from_json
from .fleet import crew, devices
from .judge import Judge
from .nursery import WorkerError
from .region import MASKS, Region
from .rooted import Tree
from .worker import Worker

WIDTH = 100
UNBOUNDED = 1 << 20
"""A size that no target means as a bound."""
UNTOLD = ("_eta", "_max", "ftz")
"""Endings of contract fields that follow from the dtype and that no reader looks for."""
TOLD_IN_WORDS = ("dead_rows", "dead_lse", "nonfinite", "masked_nonfinite", "may_leak", "deterministic", "forward_only")
"""Items of a contract that are policies, not arithmetic."""


@dataclass(frozen=True)
class Session:
    """One target that runs, and what was understood of it."""

    target: str
    options: Options
    runner: Runner | Worker
    judge: Judge
    region: Region
    declared: Region | None

    @property
    def info(self) -> dict[str, Any]:
        """What the runner understood of the target, as JSON."""
        return self.runner.info

    @contextmanager
    def workers(self) -> Iterator[None]:
        """Within it the judge has all the workers that were asked for; Stop says why it cannot."""
        o = self.options
        try:
            with crew(self.judge, devices(o.device or "cpu"), o.jobs, o.log):
                yield
        except WorkerError as e:
            raise Stop(str(e), Exit.INFRASTRUCTURE) from None


@contextmanager
def opened(target: str, options: Options, *, arch: str = "", tree: Tree | None = None) -> Iterator[Session]:
    """The session of a target; Stop says in one sentence why there is none. Its worker ends with it.

    `arch` is an architecture to pretend, for what the target compiles (see offline). `tree` is the source that the target is
    loaded from, where it is a certain revision of a repository.
    """
    runner = _runner(target, options, arch, tree)
    try:
        declared = region_from_json(runner.info["supports"])
        region = narrowed(region_from_json(runner.info["expressible"]) or Region(), declared, options)
        yield Session(target, options, runner, Judge(runner, options.contract, declared), region, declared)
    finally:
        if isinstance(runner, Worker):
            runner.close()


def _runner(target: str, options: Options, arch: str, tree: Tree | None) -> Runner | Worker:
    dialect, contract = options.dialect, options.contract
    try:
        device = "cuda" if arch else _first_device(options)  # a device that is pretended need not be there
        contract_for(contract, "float32", "cpu")  # a wrong spec is told before a child is started
        if options.in_process:
            return Runner(target, dialect=dialect, device=device, contract=contract, configs=options.configs)
        return Worker(
            target,
            dialect=dialect,
            device=device,
            contract=contract,
            log=options.log,
            arch=arch,
            configs=options.configs,
            tree=tree,
        )
    except DeviceAbsent as e:
        raise Stop(str(e), Exit.BLIND) from None
    except TargetError as e:
        raise Stop(str(e), Exit.USAGE, e.traceback) from None
    except ValueError as e:
        raise Stop(f"{target}: {e}" if "callable" in str(e) or "parameter" in str(e) else str(e), Exit.USAGE) from None
    except WorkerError as e:
        raise Stop(str(e), Exit.INFRASTRUCTURE) from None


def _first_device(options: Options) -> str:
    """The device of the session's own worker; ValueError where several workers are asked for and there can be one only."""
    first, *more = devices(options.device or "cpu")
    if options.in_process and (more or options.jobs > 1):
        raise ValueError("--in-process runs the target in this process: --jobs must be 1 and --device one device")
    return first


def narrowed(region: Region, declared: Region | None, options: Options) -> Region:
    """The region with the dtypes and lengths that were asked for; Stop if the target declares none of them."""
    if options.dtypes:
        dtypes = tuple(d for d in options.dtypes if declared is None or d in declared.dtypes)
        if not dtypes:
            served = ", ".join(declared.dtypes) if declared else ""
            raise Stop(f"--dtype must be one that the target declares ({served}), got {', '.join(options.dtypes)}")
        region = replace(region, dtypes=dtypes)
    if options.modes:
        region = replace(region, modes=tuple(dict.fromkeys(options.modes)))
    if options.max_len is not None:
        if options.max_len < region.min_len:
            raise Stop(
                f"--max-len must be at least {region.min_len}, the shortest length that the target declares, got {options.max_len}"
            )
        region = replace(region, max_len=min(region.max_len, options.max_len))
    return region


def header(session: Session, *, whole: bool = False) -> list[str]:
    """The first lines of every command: dialect, keywords, region, contract, device, versions; `whole`: what it lacks too."""
    info, versions = session.info, dict(session.info["environment"])
    device, system = versions.pop("device", ""), versions.pop("system", "")
    interpreted = "; Triton kernels run in the interpreter" if info.get("interpreted") else ""
    lacks = f"; lacks {_names(info['unbound'])}"
    no = "; it returns no lse, so lse and gradients through it are not judged" if whole else "; no lse is returned"
    lse = "" if info["returns_lse"] else no
    rows = (
        ("target", session.target + (f": {info['summary']}" if info.get("summary") else "")),
        ("dialect", f"{info['dialect']}; keywords {_names(info['bound'])}{lacks if whole else ''}{lse}"),
        (
            "region",
            f"declared: {short(session.declared).replace('all masks', 'any mask that it takes')}"
            if session.declared
            else "none declared: learnt from refusals",
        ),
        *([("drawn", short(session.region))] if session.region != session.declared else []),
        ("contract", contract_words(session)),
        ("device", f"{info['device']} ({device}){interpreted}"),
        ("versions", ", ".join(f"{n} {v}" for n, v in versions.items()) + (f"; {system}" if system else "")),
    )
    return [
        line for name, text in rows for line in textwrap.wrap(f"{name:9} {text}", WIDTH, subsequent_indent=" " * 10)
    ]


def _names(names: list[str]) -> str:
    return ", ".join(names) or "none"


def contract_words(session: Session) -> str:
    """The contract as it was declared, then its policies in words; the numbers that follow from it are in `resolved`."""
    contract = session.judge.contract(session.region.dtypes[0])
    items = [item.strip() for item in session.judge.spec.split(",")]
    declared = [item for item in items if item and item.partition("=")[0].strip() not in TOLD_IN_WORDS]
    dead = {"zero": "zeros", "nan": "NaN", "mean": "the mean of v", "any": "anything"}[contract.dead_rows]
    leak = "may" if contract.masked_nonfinite == "may_leak" else "must not"
    loose = [t for t in TENSORS if t not in contract.deterministic]
    told = [f"dead rows give {dead}", f"NaN in masked keys {leak} leak"]
    nonfinite = {"ignore": ["NaN in seen keys may vanish"], "any": ["NaN in seen keys may reach everything"]}
    told += nonfinite.get(contract.nonfinite, [])
    told += [f"{', '.join(loose)} may differ between runs"] * bool(loose)
    told += ["forward only"] * contract.forward_only
    return "; ".join([", ".join(declared) or "default", *told])


def resolved(session: Session) -> dict[str, dict[str, Any]]:
    """Per dtype, the fields of the contract that set it apart from IEEE float32 arithmetic."""
    plain = contract_for("", "float32", "cpu")
    out = {}
    for dtype in session.region.dtypes:
        contract = session.judge.contract(dtype)
        apart = [(f.name, getattr(contract, f.name)) for f in fields(contract) if f.name not in ("io", "spec")]
        out[dtype] = {n: v for n, v in apart if v != getattr(plain, n)}
    return out


def resolved_lines(session: Session) -> list[str]:
    """`resolved` as text, a paragraph for each dtype."""
    rows = []
    for dtype, changed in resolved(session).items():
        told = [f"{n}={_value(v)}" for n, v in changed.items() if not n.endswith(UNTOLD)]
        text = f"  {dtype:9} {', '.join(told) or 'IEEE float32 arithmetic'}"
        rows += textwrap.wrap(text, WIDTH, subsequent_indent=" " * 12)
    return rows


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "none"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def short(region: Region | None) -> str:
    """A region in a few words: what is served, then what is not."""
    if region is None:
        return "not declared"
    widest = f"head dims to {region.max_head_dim}" if region.max_head_dim < UNBOUNDED else "any head dim"
    dims = f"head dims {', '.join(map(str, region.head_dims))}" if region.head_dims else widest
    longest = "any length" if region.max_len >= UNBOUNDED else f"lengths to {region.max_len}"
    shortest = f" from {region.min_len}" if region.min_len else ""
    masks = "all masks" if set(region.masks) == set(MASKS) else f"masks {', '.join(region.masks) or 'none'}"
    lacks = f"; {lacking(region)}" if lacking(region) else ""
    return f"{', '.join(region.dtypes)}; {dims}; {longest}{shortest}; {masks}{lacks}"


LACKS = {
    "dv_differs": "Dv other than D", "gqa": "grouped heads", "lq_differs": "Lq other than Lk", "bias_grad": "gradient of a bias",
    "negative_scale": "scale <= 0", "lse_grad": "gradient through lse", "alibi": "ALiBi",
    "sinks_grad": "gradient of sinks",
}  # fmt: skip
"""Flags of a region in words, where their own names are none."""
IMPLIED = {
    "bias_grad": ("bias", "backward"),
    "negative_scale": ("scale",),
    "lse_grad": ("lse", "backward"),
    "sinks_grad": ("sinks", "backward"),
}
"""Flags that go without saying where another is off."""


def lacking(region: Region) -> str:
    """The features that a region does not serve: "no softcap, dropout"; empty when it serves all."""
    off = [f.name for f in fields(region) if getattr(region, f.name) is False]
    told = [LACKS.get(n, n) for n in off if not any(m in off for m in IMPLIED.get(n, ()))]
    return f"no {', '.join(told)}" if told else ""
