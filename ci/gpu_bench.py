"""Speed of attention on a GPU, all implementations side by side in one run: `python -m flashproof.ci.gpu_bench --help`.

Numbers of different runs do not compare: a GPU's clock follows its temperature and power. So every cell of a table is measured in
the same process, the implementations in turn, round after round; what counts is the ratio to the first column after ours.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn import functional

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v (B, H, L, D) -> o."""

SETS = 2
"""Sets of inputs used in turn: each is larger than the L2 cache, so nothing of a set is left there when its turn comes."""
ROUNDS, CALLS = 4, 5
"""A column is timed CALLS times in each of ROUNDS rounds, after one round that warms up."""
BACKWARD_FLOPS = 2.5
"""Products of a backward pass over those of a forward pass: 5 over 2."""


@dataclass(frozen=True)
class Setting:
    """One row of a table."""

    D: int
    causal: bool
    L: int
    B: int
    H: int
    backward: bool

    @property
    def flops(self) -> float:
        """What the definition needs, half of it where half of the pairs are masked."""
        return 4.0 * self.B * self.H * self.L**2 * self.D * (BACKWARD_FLOPS if self.backward else 1) / (1 + self.causal)

    def __str__(self) -> str:
        mask, pas = "causal" if self.causal else "full", "backward" if self.backward else "forward"
        return f"D={self.D} {mask} {pas} L={self.L}"


def _hopper(causal: bool) -> Call:
    from ..fuzz.masks import Causal, Full
    from ..impls.hopper import hopper

    return lambda q, k, v: hopper(q, k, v, mask=Causal() if causal else Full())


def _triton_flash(causal: bool) -> Call:
    from ..fuzz.masks import Causal, Full
    from ..impls.triton_flash import triton_flash

    return lambda q, k, v: triton_flash(q, k, v, mask=Causal() if causal else Full())


def _sdpa(backend: str) -> Callable[[bool], Call]:
    def make(causal: bool) -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

        return call

    return make


def _flex(causal: bool) -> Call:
    """Compiled anew for each setting: at its limit of recompilations dynamo silently calls the uncompiled function."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # noqa: SLF001 (torch.compiler.reset does not exist in every version that is supported)
    compiled = torch.compile(flex_attention, dynamic=False)
    masks: dict[int, Any] = {}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        L = q.shape[2]
        if causal and L not in masks:
            masks[L] = create_block_mask(lambda b, h, i, j: i >= j, None, None, L, L, device=q.device)
        return compiled(q, k, v, block_mask=masks.get(L))

    return call


def _standard(causal: bool) -> Call:
    """The textbook's three steps, scores and probabilities in memory."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.mT * q.shape[3] ** -0.5
        if causal:
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), float("-inf"))
        return s.softmax(-1) @ v

    return call


def _flash_attn_4(causal: bool) -> Call:
    from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found,unused-ignore]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
        return (o[0] if isinstance(o, tuple) else o).transpose(1, 2)

    return call


COLUMNS: dict[str, Callable[[bool], Call]] = {
    "hopper": _hopper,
    "cudnn": _sdpa("CUDNN_ATTENTION"),
    "flash": _sdpa("FLASH_ATTENTION"),
    "flex": _flex,
    "standard": _standard,
    "flash_attn_4": _flash_attn_4,
    "triton_flash": _triton_flash,
}


def _inputs(s: Setting, seed: int) -> list[Tensor]:
    """q, k, v and do, normal and random."""
    g = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(s.B, s.H, s.L, s.D, device="cuda", dtype=torch.bfloat16, generator=g) for _ in range(4)]


def _calls(s: Setting, call: Call) -> list[Callable[[], object]]:
    """What is timed, for each set of inputs."""
    made: list[Callable[[], object]] = []
    for seed in range(SETS):
        q, k, v, do = _inputs(s, seed)
        if not s.backward:
            made.append(lambda q=q, k=k, v=v: call(q, k, v))  # type: ignore[misc]
            continue
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o = call(*leaves)
        made.append(lambda o=o, x=leaves, do=do: torch.autograd.grad(o, x, do, retain_graph=True))  # type: ignore[misc]
    return made


def _time(calls: list[Callable[[], object]]) -> list[float]:
    """Milliseconds of CALLS calls each; the GPU sleeps first, so that the host is ahead of it from the first on."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(CALLS)]
    torch.cuda._sleep(2_000_000)  # noqa: SLF001 (about a millisecond; torch has no public name for it)
    for n, (start, end) in enumerate(marks):
        start.record()
        calls[n % len(calls)]()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in marks]


def measure(s: Setting, columns: list[str]) -> dict[str, float | str]:
    """Teraflop a second of each column, the median over all calls; the error's first line where one cannot run."""
    ready: dict[str, list[Callable[[], object]]] = {}
    result: dict[str, float | str] = {}
    with torch.set_grad_enabled(s.backward):
        for name in columns:
            try:
                ready[name] = _calls(s, COLUMNS[name](s.causal))
                _time(ready[name])
            except Exception as error:  # noqa: BLE001 (a peer may raise anything: memory, a missing package, a shape it declines)
                result[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
                ready.pop(name, None)
                torch.cuda.empty_cache()
        times: dict[str, list[float]] = {name: [] for name in ready}
        for _, name in itertools.product(range(ROUNDS), ready):
            times[name] += _time(ready[name])
    return result | {name: s.flops / statistics.median(t) / 1e9 for name, t in times.items()}


def settings(
    dims: list[int], masks: list[str], lengths: list[int], passes: list[str], tokens: int, hidden: int
) -> Iterator[Setting]:
    """Every combination, batch x length and heads x head dim kept."""
    for pas, D, mask, L in itertools.product(passes, dims, masks, lengths):
        yield Setting(D, mask == "causal", L, max(1, tokens // L), hidden // D, pas == "backward")


def _cell(value: float | str, reference: float | str | None) -> str:
    if isinstance(value, str):
        return "-"
    return f"{value:.0f}" + (f" ({value / reference:.2f})" if isinstance(reference, float) else "")


def _integers(_c: click.Context, _p: click.Parameter, text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _words(_c: click.Context, _p: click.Parameter, text: str) -> list[str]:
    return text.split(",")


@click.command()
@click.option("--dims", default="64,128", callback=_integers, help="Head dims, comma separated.")
@click.option("--masks", default="full,causal", callback=_words, help="full, causal or both.")
@click.option("--lengths", default="1024,2048,4096,8192,16384", callback=_integers, help="Lengths, comma separated.")
@click.option("--passes", default="forward,backward", callback=_words, help="forward, backward or both.")
@click.option(
    "--columns",
    default=",".join(COLUMNS),
    callback=_words,
    help="Implementations, the one that others are compared to second.",
)
@click.option("--tokens", default=16384, help="Batch times length.")
@click.option("--hidden", default=2048, help="Heads times head dim.")
@click.option("--seconds", default=280.0, help="No further row is begun after this time.")
@click.option("--json", "path", default="", help="Write every number to this file.")
def main(
    dims: list[int], masks: list[str], lengths: list[int], passes: list[str], columns: list[str], tokens: int, hidden: int, seconds: float,
    path: str,
) -> None:  # fmt: skip
    """Print teraflop a second in bfloat16, and the ratio to the second column.

    Example: python -m flashproof.ci.gpu_bench --dims 128 --masks causal --columns hopper,cudnn
    """
    began, rows = time.monotonic(), []
    click.echo(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, {tokens} tokens, hidden {hidden}")
    click.echo(" " * 34 + "".join(f"{name:>15}" for name in columns))
    for s in settings(dims, masks, lengths, passes, tokens, hidden):
        if time.monotonic() - began > seconds:
            click.echo(f"stopped after {seconds:.0f} s, before {s}")
            break
        row = measure(s, columns)
        rows.append(asdict(s) | {"tflops": row})
        reference = row.get(columns[1]) if len(columns) > 1 else None
        click.echo(f"{s!s:34}" + "".join(f"{_cell(row[name], reference):>15}" for name in columns))
        torch.cuda.empty_cache()
    if path:
        with open(path, "w") as f:
            json.dump(rows, f, indent=1)


if __name__ == "__main__":
    main()
