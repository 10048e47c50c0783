"""What the rules and grids of peers catch of the planted bugs, and what they say of right implementations.

`python -m flashproof.ci.comparison --jobs 2` prints, for each peer, how many planted bugs its grid and rule reject, and how many of its
own cases it rejects of right implementations.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import torch
from tabulate import tabulate
from torch import Tensor

from ..fuzz.execute import Runner
from ..fuzz.masks import Causal, Full, Mask, Window
from ..fuzz.tensors import TORCH_DTYPES
from ..impls import REGISTRY, load_registry
from ..impls.planted import PLANTED
from .peer_rules import GRADS, PEERS, Answers, Call, Peer, Tried

RIGHT = ("textbook", "blockwise", "split_keys", "packed_loop", "triton_flash")
"""Implementations that every rule should pass."""
PATIENCE = 90.0
"""Seconds after which the run of one peer on one target ends; what it had not caught by then it did not catch."""


def drawn(call: Call) -> dict[str, Tensor]:
    """q, k, v and do from the call's distribution, in its dtype."""
    generator = torch.Generator().manual_seed(call.seed)
    shapes = {
        "q": (call.B, call.Hq, call.Lq, call.D), "k": (call.B, call.Hkv, call.Lk, call.D),
        "v": (call.B, call.Hkv, call.Lk, call.D), "do": (call.B, call.Hq, call.Lq, call.D),
    }  # fmt: skip

    def one(shape: tuple[int, ...]) -> Tensor:
        match call.data:
            case "uniform":
                return torch.rand(shape, generator=generator)
            case "sparse":
                some = torch.rand(shape, generator=generator) < 0.2
                return some * torch.randint(-2, 3, shape, generator=generator).float()
        return {"half": 0.5, "three": 3.0, "tenth": 0.1}.get(call.data, 1.0) * torch.randn(shape, generator=generator)

    return {name: one(shape).to(TORCH_DTYPES[call.dtype]) for name, shape in shapes.items()}


def answered(
    fn: Callable[..., Any], dialect: str, call: Call, given: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """o, lse and gradients of an implementation on the inputs in a dtype, as (B, H, L, D)."""
    q, k, v, do = (given[n].to(dtype, copy=True) for n in ("q", "k", "v", "do"))
    leaves = [x.requires_grad_(call.backward) for x in (q, k, v)]
    keywords: dict[str, Any] = {"return_lse": True} | ({"softcap": call.softcap} if call.softcap else {})
    if dialect == "native":
        o, lse = fn(q, k, v, mask=call.mask, scale=call.scale, **keywords)
    else:
        o, lse = _packed(fn, call, q, k, v, keywords)
    out = {"o": o.detach(), "lse": lse.detach()}
    if call.backward:
        out |= dict(zip(GRADS, torch.autograd.grad(o, leaves, do), strict=True))
    return out


def _packed(
    fn: Callable[..., Any], call: Call, q: Tensor, k: Tensor, v: Tensor, keywords: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The call as packed sequences, one for each batch; ValueError where it cannot say the mask."""
    window, causal = (-1, -1), isinstance(call.mask, Causal)
    if isinstance(call.mask, Window):
        window = (call.mask.left, call.mask.right)
    if call.mask != Full() and call.mask.align != "bottom_right" and call.Lq != call.Lk:  # type: ignore[attr-defined]
        raise ValueError("the packed dialect aligns at the bottom right")
    flat = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    ends = (torch.arange(call.B + 1, dtype=torch.int32) * n for n in (call.Lq, call.Lk))
    o, lse = fn(*flat, *ends, call.Lq, call.Lk, softmax_scale=call.scale, causal=causal, window_size=window, **keywords)
    return o.unflatten(0, (call.B, call.Lq)).transpose(1, 2), lse.unflatten(1, (call.B, call.Lq)).transpose(0, 1)


def plain(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float | None, softcap: float = 0.0, return_lse: bool = True
) -> tuple[Tensor, Tensor]:
    """Three steps in the dtype of the inputs, softmax in float32: what peers measure their tolerance with."""
    assert return_lse
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = (q * (q.shape[3] ** -0.5 if scale is None else scale)) @ k.mT
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s.masked_fill(~mask.dense(q.shape[0], q.shape[1], q.shape[2], k.shape[2]), -math.inf).float()
    dead = (s == -math.inf).all(-1, keepdim=True)
    p = torch.softmax(s.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    return p.to(q.dtype) @ v, torch.logsumexp(s, -1)


def caught(peer: Peer, target: str) -> tuple[int, int, int]:
    """(calls made, calls rejected, calls that the target cannot be asked); for a planted bug the first rejection is enough."""
    runner = Runner(target)
    declared, textbook = REGISTRY[target], REGISTRY["textbook"].call
    made = rejected = silent = 0
    for call in peer.calls:
        if call.softcap and declared.supports is not None and not declared.supports.softcap:
            silent += 1
            continue
        given = drawn(call)
        made += 1
        try:
            got, again = (
                answered(runner.implementation.call, declared.dialect, call, given, TORCH_DTYPES[call.dtype])
                for _ in range(2)
            )
        except ValueError as e:
            if "aligns" in str(e):
                made, silent = made - 1, silent + 1
                continue
            got = again = {}
        except Exception:  # noqa: BLE001 (a peer's test fails on any exception)
            got = again = {}
        want = answered(textbook, "native", call, given, torch.float64)
        low = answered(plain, "native", call, given, TORCH_DTYPES[call.dtype])
        if _malformed(got, want, call) or peer.rejects(Tried(call, got, want, low, again)):
            rejected += 1
            if target not in RIGHT:
                break
    return made, rejected, silent


def _malformed(got: Answers, want: Answers, call: Call) -> bool:
    """Missing answers, or shapes and dtypes that a comparison trips over."""
    if not set(want) <= set(got):
        return True
    return any(got[n].shape != want[n].shape for n in want) or got["o"].dtype != TORCH_DTYPES[call.dtype]


def _in_process(peer: int, target: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    load_registry()
    pipe.send(caught(PEERS[peer], target))


def outcome(peer: int, target: str) -> tuple[int, int, int] | str:
    """What `caught` says in a process of its own; "died" or "late" where it says nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"{__package__}.peer_rules", "flashproof.fuzz.execute", "flashproof.impls.planted"])
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_in_process, args=(peer, target, theirs))
    process.start()
    theirs.close()
    try:
        result: tuple[int, int, int] | str = mine.recv() if mine.poll(PATIENCE) else "late"
    except EOFError:
        result = "died"
    process.kill()
    process.join()
    return result


@click.command()
@click.option("--jobs", default=1, show_default=True, help="Processes at a time.")
@click.option("--only", default="", help="Peers whose name contains this.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), default=None, help="Where to write all outcomes.")
def main(jobs: int, only: str, json_file: Path | None) -> None:
    """The rules and grids of peers on the planted bugs and on right implementations: killed, false alarms, seconds."""
    load_registry()
    rows, document = [], {}
    for n, peer in enumerate(PEERS):
        if only.lower() not in peer.name.lower():
            continue
        began = time.monotonic()
        targets = [*RIGHT, *(b.target for b in PLANTED.values())]
        with ThreadPoolExecutor(jobs) as pool:
            results = dict(zip(targets, pool.map(lambda t, n=n: outcome(n, t), targets), strict=True))
        killed = [
            t
            for t in targets
            if t not in RIGHT and (results[t] == "died" or (not isinstance(results[t], str) and results[t][1]))
        ]
        right = [r for t, r in results.items() if t in RIGHT and not isinstance(r, str)]
        alarms, asked = sum(r[1] for r in right), sum(r[0] for r in right)
        seconds = time.monotonic() - began
        late = sum(r == "late" for r in results.values())
        rows.append(
            (
                peer.name,
                len(peer.calls),
                f"{len(killed)} of {len(PLANTED)}",
                f"{alarms} of {asked}",
                late,
                f"{seconds:.0f}",
            )
        )
        document[peer.name] = {
            "results": results,
            "killed": killed,
            "alarms": alarms,
            "asked": asked,
            "seconds": seconds,
            "cut": peer.cut,
        }
        click.echo(f"{peer.name}: {rows[-1][2]} killed, {rows[-1][3]} false alarms, {seconds:.0f} s", err=True)
    click.echo(
        tabulate(rows, headers=("peer", "cases", "killed", "false alarms", "late", "seconds"), tablefmt="github")
    )
    if json_file:
        json_file.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
