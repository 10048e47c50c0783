"""Compile the kernels of hopper as its host side launches them, without a GPU; prints JSON. Run as a script, with a head dim."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from flashproof.fuzz.masks import Causal, Full, Window
from flashproof.impls import hopper, hopper_backward, hopper_forward
from flashproof.oracles.compiled import compile_launch

MASKS = {"full": Full(), "causal": Causal(), "window": Window(100, 20)}
launches = []


class Recorder:
    """Stands for a kernel and keeps what it is launched with."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, _grid):
        return lambda *args, **options: launches.append((self.kernel, args, options))


class Silent:
    """Stands for a kernel that is not looked at."""

    def __getitem__(self, _grid):
        return lambda *args, **options: None


def main(D, mask):
    """Record one forward and backward pass, then compile what was recorded."""
    from flashproof.impls import hopper_rows

    hopper_forward.forward_kernel = Recorder(hopper_forward.forward_kernel)
    hopper_backward.backward_kernel = Recorder(hopper_backward.backward_kernel)
    hopper_rows.prepare_kernel = hopper_rows.round_kernel = Silent()
    hopper._multiprocessors = lambda _device: 132
    hopper._counter = lambda _x: torch.zeros(1, dtype=torch.int32)
    q, k, v = (torch.zeros(1, heads, 256, D, dtype=torch.bfloat16) for heads in (4, 2, 2))
    problem = hopper.Problem(*hopper.band(MASKS[mask], 256, 256), 0.1)
    o, lse = hopper.forward(problem, q, k, v)
    if D in hopper.BACKWARD:
        hopper.backward(problem, q, k, v, o, lse, o, None)
    print(json.dumps([asdict(compile_launch(*launch, 90)) for launch in launches]))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
