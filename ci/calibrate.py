"""The false-alarm campaign: conforming implementations on seeded adversarial cases, none of which may be rejected.

`python -m flashproof.ci.calibrate --cases 20000` prints runs, tensors, violations and a tightness table, and exits 1 on a
violation. `--kill-rates` prints instead which share of faulty runs the limits reject, per fault.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..impls.emulation import Arithmetic, run
from ..oracles.contract import TENSORS, contract_for
from ..oracles.elements import judge_problem
from ..oracles.exact import Problem
from ..oracles.finding import Finding
from .draw import DTYPES, Drawn, Source, draw, with_extras

FIRST_SEED = 2_000_000
LAZY = "rescale_slack=5.6"  # 8 ln 2


@dataclass(frozen=True)
class Job:
    """One conforming implementation of a case, and the contract that describes its arithmetic."""

    name: str
    spec: str
    compute: Callable[[Problem], dict[str, Tensor] | None]


def emulated(name: str, arithmetic: Arithmetic, spec: str = "") -> Job:
    """A job of the emulation, which sums the heads of a group in float32 unless the spec says otherwise."""
    return Job(name, f"gqa_u=0,{spec}", lambda p: run(p, arithmetic))


def jobs(drawn: Drawn, index: int) -> Iterator[Job]:
    """The implementations that a case is given to: three on every case, one of six special kinds, torch where it applies."""
    s = Source(drawn.seed + (1 << 41))
    q_tile, kv_tile = _random_tiles(s, drawn.problem)
    stored = ("do.o", "do.o32")
    yield emulated(
        "flash 16x16", Arithmetic(order=s.choice(["forward", "reverse"]), delta=s.choice(stored)), "kv_tile=16"
    )
    loose = Arithmetic(
        q_tile=q_tile,
        kv_tile=kv_tile,
        order="random",
        seed=drawn.seed,
        delta=s.choice([*stored, "p.dp"]),
        exp=s.choice(["exp2", "exp"]),
    )
    yield emulated("flash any tiles", loose, f"kv_tile={min(kv_tile, 16)}")
    yield emulated("textbook", Arithmetic(algorithm="textbook", delta=s.choice([*stored, "p.dp"])), "kv_tile=16")
    yield from _special(s, drawn, index % 6)
    p = drawn.problem
    if p.softcap == 0 and all(x is None for x in (p.dlse, p.dropout, p.alibi, p.sinks)):
        yield Job("torch math", "torch-cpu-math,kv_tile=16", lambda p: torch_sdpa(p, SDPBackend.MATH, drawn.diagonal))
        yield Job(
            "torch flash",
            "torch-cpu-flash,kv_tile=16",
            lambda p: torch_sdpa(p, SDPBackend.FLASH_ATTENTION, drawn.diagonal),
        )


def _random_tiles(s: Source, p: Problem) -> tuple[int, int]:
    """Tile sizes down to one element, but not more than forty tiles."""
    q_tile, kv_tile = s.choice([1, 5, 8, 16, 32, 64]), s.choice([1, 3, 8, 16, 32, 64])
    _, _, _, Lq, Lk, _, _ = p.sizes
    while (Lq / q_tile) * (Lk / kv_tile) > 40:
        q_tile, kv_tile = 2 * q_tile, 2 * kv_tile
    return q_tile, kv_tile


def _special(s: Source, drawn: Drawn, pick: int) -> Iterator[Job]:
    narrow = drawn.dtype != "float32"
    if pick == 0:
        yield emulated("l from rounded P", Arithmetic(l_rounded=True), "kv_tile=16,l_from_rounded_p=true")
    elif pick == 1:
        yield emulated("lazy rescale, cubic exp2", Arithmetic(lazy=8.0, exp="cubic"), f"kv_tile=16,exp_u=9e-5,{LAZY}")
    elif pick == 2 and not narrow:
        for dots in ("tf32", "tf32_rz", "bf16"):
            yield emulated(f"{dots} dots", Arithmetic(dots=dots, kv_tile=32), f"kv_tile=16,{dots}")
    elif pick == 2:
        yield emulated("q scaled, then rounded", Arithmetic(q_prescaled=True), "kv_tile=16,q_u=io")
    elif pick == 3 and drawn.problem.q.numel() < 20_000:
        yield emulated("Hopper dots", Arithmetic(fused_bits=25, q_tile=32, kv_tile=32), "kv_tile=16,hopper")
    elif pick == 4 and narrow:
        arithmetic = Arithmetic(algorithm="narrow", delta=s.choice(["do.o", "p.dp"]))
        yield emulated("narrow intermediates", arithmetic, "kv_tile=16,lowp")
    elif pick == 5:
        yield emulated("lazy rescale", Arithmetic(lazy=8.0, order="random", seed=drawn.seed), f"kv_tile=16,{LAZY}")


def torch_sdpa(p: Problem, backend: SDPBackend, diagonal: int | None = None) -> dict[str, Tensor] | None:
    """o and the gradients of torch's scaled_dot_product_attention; None where the backend refuses."""
    q, k, v = (x.clone().requires_grad_() for x in (p.q, p.k, p.v))
    bias = None if p.bias is None else p.bias.clone()
    causal = diagonal == 0 and bias is None
    mask = None if causal else p.keep
    if bias is not None:
        bias = bias if p.keep is None else torch.where(p.keep, bias, torch.tensor(float("-inf"), dtype=bias.dtype))
        mask = bias = bias.requires_grad_(backend == SDPBackend.MATH)
    grouped = q.shape[1] != k.shape[1]
    if backend == SDPBackend.FLASH_ATTENTION and (q.shape[3] != v.shape[3] or (causal and p.scale <= 0)):
        return None  # torch 2.13 masks before it scales: with is_causal, a scale of 0 or less makes NaN of -inf
    try:
        with sdpa_kernel(backend), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # why the backend refuses
            o = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=p.scale, enable_gqa=grouped
            )
            leaves = [q, k, v] + ([bias] if bias is not None and bias.requires_grad else [])
            gradients = torch.autograd.grad(o, leaves, p.do)
    except RuntimeError:
        return None
    out = {"o": o.detach()} | dict(zip(("dq", "dk", "dv", "dbias"), gradients, strict=False))
    if p.bias is not None and "dbias" in out and out["dbias"].shape != p.bias.shape:
        out["dbias"] = out["dbias"].sum_to_size(p.bias.shape)
    return out


@dataclass
class Tally:
    """What a campaign saw: budgets per (implementation, dtype, tensor), violations, warnings of the statistical tier."""

    budgets: dict[tuple[str, str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    zrms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    violations: list[tuple[str, Drawn, Finding]] = field(default_factory=list)
    warnings: int = 0
    cases: int = 0
    runs: int = 0

    @property
    def tensors(self) -> int:
        return sum(map(len, self.budgets.values()))


def campaign(
    cases: int, first_seed: int = FIRST_SEED, *, per_case: int = 0, report: Callable[[str], object] = lambda line: None
) -> Tally:
    """Give `cases` seeded cases to their conforming implementations and judge every run; half of them carry extras.

    `per_case` limits the implementations of one case, taken in turn; 0 means all of them.
    """
    tally, started = Tally(), time.monotonic()
    for index in range(cases):
        drawn = draw(
            first_seed + index,
            tuple(DTYPES)[index % 3],
            longest=130 if Source(first_seed + index).integer(0, 9) == 0 else 52,
        )
        drawn = with_extras(drawn) if index % 2 else drawn
        every = list(jobs(drawn, index // 3))
        for job in [every[(index + i) % len(every)] for i in range(per_case)] or every:
            _judge(tally, drawn, job, report)
        tally.cases += 1
        if index % 500 == 499:
            report(
                f"{tally.cases} cases, {tally.runs} runs, {len(tally.violations)} violations, {time.monotonic() - started:.0f} s"
            )
    return tally


def _judge(tally: Tally, drawn: Drawn, job: Job, report: Callable[[str], object]) -> None:
    outputs = job.compute(drawn.problem)
    if outputs is None:
        return
    verdict = judge_problem(drawn.problem, outputs, contract_for(job.spec, drawn.dtype), generic=drawn.generic)
    tally.runs += 1
    for name, budget in verdict.budget.items():
        tally.budgets[job.name, drawn.dtype, name].append(budget)
    if drawn.data == "normal":
        for name, z in verdict.zrms.items():
            tally.zrms[name].append(z)
    for finding in verdict.findings:
        if finding.severity == "warning":
            tally.warnings += 1
            continue
        tally.violations.append((job.name, drawn, finding))
        report(f"VIOLATION {job.name}: {drawn}: {finding}")


def tightness(tally: Tally) -> str:
    """A table: median / 99th percentile / largest of the per-case budget, max |error| / limit, for every implementation."""
    names = sorted({key[:2] for key in tally.budgets})
    lines = [f"| implementation | dtype | {' | '.join(TENSORS)} |", "|---|---|" + "---|" * len(TENSORS)]
    for name, dtype in names:
        cells = [_quantiles(tally.budgets.get((name, dtype, tensor), [])) for tensor in TENSORS]
        lines.append(f"| {name} | {dtype} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _quantiles(values: Sequence[float]) -> str:
    if not values:
        return "-"
    ordered = sorted(values)
    return f"{ordered[len(ordered) // 2]:.3f} / {ordered[int(0.99 * (len(ordered) - 1))]:.3f} / {ordered[-1]:.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 when a conforming run was rejected (or, with --kill-rates, a rate fell), else 0."""
    parser = argparse.ArgumentParser(
        prog="flashproof calibrate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1000, help="seeded cases (default 1000)")
    parser.add_argument("--seed", type=int, default=FIRST_SEED, help="the first seed")
    parser.add_argument(
        "--kill-rates", action="store_true", help="the share of faulty runs that are rejected, per fault"
    )
    parser.add_argument(
        "--active", type=int, default=40, help="with --kill-rates: cases on which the fault changes the result"
    )
    parser.add_argument("--data", default="normal", choices=["normal", "mixture"], help="with --kill-rates: the data")
    parser.add_argument("--only", default="", help="with --kill-rates: comma-separated faults")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.kill_rates:
        from .kill_rates import table

        return table(options.active, options.data, options.only.split(",") if options.only else None)
    started = time.monotonic()
    tally = campaign(options.cases, options.seed, report=lambda line: print(line, flush=True))
    print(tightness(tally))
    z = {name: f"{max(values):.2f}" for name, values in tally.zrms.items()}
    print(f"largest z-rms on normal data: {z}; {tally.warnings} warnings of the statistical tier on generic data")
    print(
        f"{tally.cases} cases, {tally.runs} runs, {tally.tensors} tensors, {len(tally.violations)} violations, "
        f"{time.monotonic() - started:.0f} s"
    )
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
