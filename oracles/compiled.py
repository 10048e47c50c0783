"""What a Triton or Gluon kernel compiles to on a machine without a GPU: registers, spills, stack, shared memory, warnings.

A spill, or products of the tensor cores that the assembler had to put in a row, cost more than most changes of a kernel gain, and
nothing that the kernel answers shows them.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAUNCH = ("num_warps", "num_stages")
"""Options of a launch that are no arguments of the kernel."""

SERIALISED = {"C7510", "C7511", "C7512", "C7514"}
"""The assembler's warnings that asynchronous products wait for one another, each with another reason (ptxas 12.8 to 13.4)."""


@dataclass(frozen=True)
class Compiled:
    """Of one kernel, per thread: registers, bytes spilled and of stack; per block: bytes of shared memory; and warnings."""

    kernel: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int
    warnings: tuple[str, ...]

    @property
    def serialised(self) -> bool:
        """Whether products of the tensor cores wait for one another where the source has them overlap."""
        return bool(SERIALISED & set(self.warnings))


def compile_launch(kernel: Any, args: tuple[Any, ...], options: dict[str, Any], capability: int) -> Compiled:
    """What the launch kernel[grid](*args, **options) runs on a GPU of the compute capability, such as 90."""
    import triton
    from triton.backends.compiler import GPUTarget

    source = _source(kernel, args, {n: v for n, v in options.items() if n not in LAUNCH})
    launch = {n: v for n, v in options.items() if n in LAUNCH}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch)
    log = _assembled(made.asm["ptx"], capability)
    return Compiled(
        kernel=kernel.__name__,
        registers=_number(log, r"Used (\d+) registers"),
        spill_stores=_number(log, r"(\d+) bytes spill stores"),
        spill_loads=_number(log, r"(\d+) bytes spill loads"),
        stack=_number(log, r"(\d+) bytes stack frame"),
        shared=made.metadata.shared,
        warnings=tuple(sorted(set(re.findall(r"\((C\d{4})\)", log)))),
    )


def _source(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """What Triton's launcher would compile: types of the arguments, 16 bytes as what is known of every pointer."""
    names = kernel.arg_names
    signature = dict(zip(names, map(_type, args), strict=False)) | dict.fromkeys(constants, "constexpr")
    values = {(at,): None for at, x in enumerate(args) if x is None} | {
        (names.index(n),): v for n, v in constants.items()
    }
    aligned = {(at,): [["tt.divisibility", 16]] for at, x in enumerate(args) if _type(x).startswith("*")}
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler.compiler import ASTSource as Source
    return Source(kernel, signature, values, aligned)


def _type(x: Any) -> str:
    """The entry of a signature for an argument: a tensor, a descriptor of one, a number, or None."""
    from triton._utils import canonicalize_dtype

    match x:
        case None:
            return "constexpr"
        case int():
            return "i32"
        case float():
            return "fp32"
    if "block_shape" in dir(x):
        block = ",".join(map(str, x.block_shape))
        return f"tensordesc<{canonicalize_dtype(x.base.dtype)}[{block}],{x.layout!r}>"
    return f"*{canonicalize_dtype(x.dtype)}"


def _assembled(ptx: str, capability: int) -> str:
    """What the assembler of Triton's wheel says of it."""
    import triton

    programs = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        for program in (
            "ptxas",
            "ptxas-blackwell",
        ):  # Triton 3.9 writes a version of PTX that only the second one reads
            command = [
                f"{programs / program}",
                "-v",
                f"--gpu-name=sm_{capability}a",
                f"{source}",
                "-o",
                f"{folder}/kernel.cubin",
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if "Unsupported .version" not in done.stderr + done.stdout:
                break
    return done.stdout + done.stderr


def _number(log: str, pattern: str) -> int:
    found = re.search(pattern, log)
    if found is None:
        raise RuntimeError(f"the assembler's report must say {pattern!r}, got {log[-500:]!r}")
    return int(found[1])
