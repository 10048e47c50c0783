"""Compile the kernels of triton_flash as its host side would launch them, without a GPU; prints JSON. Run as a script."""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from flashproof.fuzz.masks import Causal, Random, Window
from flashproof.impls import triton_backward, triton_flash, triton_forward

TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "u8"}
MASKS = {"causal": Causal(), "random": Random(), "window": Window(7, 3)}
launches = []


class Recorder:
    """Stands for a kernel and keeps what it is launched with."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, _grid):
        return lambda *args, **options: launches.append((self.kernel, args, options))


def type_of(x):
    """The signature entry of an argument, as the launcher specialises it."""
    if isinstance(x, torch.Tensor):
        return f"*{TYPES[x.dtype]}"
    return "fp32" if isinstance(x, float) else "constexpr" if x is None else "i32"


def build(kernel, args, options, architecture):
    """The compiled kernel's name and its shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource

    launch = {n: options[n] for n in ("num_warps", "num_stages")}
    constants = {n: v for n, v in options.items() if n not in launch}
    names = kernel.arg_names
    signature = dict(zip(names, map(type_of, args), strict=False)) | dict.fromkeys(constants, "constexpr")
    values = {(at,): None for at, x in enumerate(args) if x is None} | {
        (names.index(n),): v for n, v in constants.items()
    }
    aligned = [(at,) for at, x in enumerate(args) if isinstance(x, torch.Tensor)]
    source = ASTSource(kernel, signature, values, {at: [["tt.divisibility", 16]] for at in aligned})
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=launch)
    return {"kernel": kernel.__name__, "architecture": architecture, "shared": made.metadata.shared}


def main(what):
    """Record one forward and backward pass, then compile what was recorded."""
    for module, name in (
        (triton_forward, "forward_kernel"),
        (triton_backward, "dq_kernel"),
        (triton_backward, "dkdv_kernel"),
    ):
        setattr(module, name, Recorder(getattr(module, name)))
    dtype = getattr(torch, what["dtype"])
    shapes = ((2, 4, 128, what["D"]), (2, 2, 128, what["D"]), (2, 2, 128, what["Dv"]), (1, 4, 128, 128))
    q, k, v, bias = (torch.zeros(shape, dtype=dtype) for shape in shapes)
    bias = bias if what.get("bias") else None
    problem = triton_flash.Problem.of(q, k, MASKS[what["mask"]], 0.1, what.get("softcap", 0.0))
    o, lse = triton_flash.forward(problem, q, k, v, bias)
    triton_flash.backward(problem, q, k, v, bias, o, lse, o, lse, bias is not None)
    made = [build(*launch, architecture) for architecture in what.get("architectures", (80, 90)) for launch in launches]
    print(json.dumps(made))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
