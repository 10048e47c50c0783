"""Tensors beside a case file, as safetensors: the real inputs of a captured call, and what a failing target answered."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .case import Case
from .corpus import CorpusError, write_whole
from .layouts import Guarded, Layout, layout
from .masks import Grid, Mask
from .tensors import TORCH_DTYPES, Inputs, build

if TYPE_CHECKING:
    from ..oracles.contract import Contract

GAPS = 8
"""Strides are applied again where the memory they reach over is at most this many times the elements; else the nearest layout."""
INPUTS = ("q", "k", "v", "do")


@dataclass(frozen=True)
class Kept(Mask):
    """What a stored tensor allows: bool, 4-D, of size 1 on the axes that it does not depend on."""

    file: str = ""
    table: Tensor = field(default_factory=lambda: torch.ones(1, 1, 1, 1, dtype=torch.bool), compare=False, repr=False)
    kind: ClassVar[str] = "stored"

    @property
    def axes(self) -> str:
        return "".join(a for a, n in zip("bhqk", self.table.shape, strict=True) if n > 1)

    def keep(self, at: Grid) -> Tensor:
        index = [
            x if n > 1 else torch.zeros_like(x) for x, n in zip((at.b, at.h, at.i, at.j), self.table.shape, strict=True)
        ]
        return self.table.to(at.i.device)[tuple(index)]

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "file": self.file}


def packed(tensors: Mapping[str, Tensor], strides: Mapping[str, tuple[int, ...]] | None = None) -> bytes:
    """A safetensors file of contiguous values, with the strides that they had, else have, in its metadata."""
    from safetensors.torch import save

    kept = {n: list((strides or {}).get(n, x.stride())) for n, x in tensors.items()}
    values = {n: x.detach().cpu().clone(memory_format=torch.contiguous_format) for n, x in tensors.items()}
    return save(values, metadata={"strides": json.dumps(kept)})


def digest(data: bytes) -> str:
    """The hash of a file's bytes, short."""
    return hashlib.sha256(data).hexdigest()[:16]


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]]]:
    """(tensors, their strides when they were stored); CorpusError says in one sentence what is wrong with the file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118 (the file is no mapping)
        strides = {n: tuple(map(int, s)) for n, s in json.loads(metadata.get("strides", "{}")).items()}
    except FileNotFoundError:
        raise CorpusError(f"{path} must hold the tensors of a captured case, but there is no such file") from None
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as e:
        raise CorpusError(f"{path} must be a safetensors file with strides in its metadata: {e}") from None
    return tensors, strides


def inputs(case: Case, path: Path, device: str = "cpu", guards: bool = True) -> Inputs:
    """The inputs of a case with the stored tensors in place of drawn ones, in their own strides on guarded storages."""
    tensors, strides = read(path)
    if "keep" in tensors:
        case = case.but(mask=Kept(path.name, _checked(path, "keep", tensors["keep"], _mask_sizes(case), torch.bool)))
    made = build(case, device, guards)
    made.stored = True
    for name in (n for n in INPUTS if n in tensors):
        old = getattr(made, name)
        x = _checked(path, name, tensors[name], tuple(old.shape), TORCH_DTYPES[case.dtype])
        setattr(made, name, _hold(made, name, x, strides.get(name, x.stride())))
    if made.bias is not None and "bias" in tensors:
        bias = _checked(path, "bias", tensors["bias"], _mask_sizes(case), made.bias.dtype)
        made.bias = made.hold("bias", bias.expand(made.bias.shape), made.bias.dtype)
    used = {"q", "k", "v", "do", "bias"} & set(tensors)
    made.blocks = [b for b in made.blocks if any(_is_held(made, n, b) for n in b.names) or not set(b.names) & used]
    return made


def _is_held(made: Inputs, name: str, block: Guarded) -> bool:
    x = getattr(made, name, None)
    return x is not None and x.untyped_storage().data_ptr() == block.storage.untyped_storage().data_ptr()


def _mask_sizes(case: Case) -> tuple[int, ...]:
    return case.B, case.Hq, case.Lq, case.Lk


def _checked(path: Path, name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor if its shape is the case's (a mask's axes may have size 1) and its dtype the wanted one; CorpusError if not."""
    ones = name in ("keep", "bias")
    fits = len(x.shape) == len(shape) and all(n == m or (ones and n == 1) for n, m in zip(x.shape, shape, strict=True))
    if not fits or x.dtype is not dtype:
        raise CorpusError(
            f"{path} must hold {name} as {dtype} of shape {shape}, got {x.dtype} of shape {tuple(x.shape)}"
        )
    return x


def _hold(made: Inputs, name: str, x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The values in their own strides, or in the case's layout where those cannot be made again."""
    shape = tuple(x.shape)
    where = restrided(shape, strides) or layout(getattr(made.case, f"layout_{name}"), shape)
    value = x[tuple(slice(0, 1) if s == 0 else slice(None) for s in where.strides)]
    block = Guarded.hold((name,), (where,), (value,), x.dtype, made.device, made.guards)
    made.blocks.append(block)
    return block.tensor(name)


def restrided(shape: tuple[int, ...], strides: tuple[int, ...]) -> Layout | None:
    """The layout of these strides; None where elements share memory other than by stride 0, or lie too far apart."""
    if len(strides) != len(shape) or 0 in shape or min(strides) < 0:
        return None
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1 and s):
        if stride <= reach:
            return None
        reach += (size - 1) * stride
    held = int(np.prod([n for n, s in zip(shape, strides, strict=True) if s])) if shape else 1
    return Layout(shape, strides, 0, reach + 1) if reach < GAPS * held + GAPS else None


def answer_file(path: Path) -> Path:
    """Where `--save-tensors` writes beside a case file."""
    return path.with_suffix(".answer.safetensors")


def save_answer(
    path: Path, made: Inputs, outputs: Mapping[str, Tensor], names: set[str], contract: Contract
) -> Path | None:
    """Write got, want and limit of the named outputs beside the case file; None where there is nothing to write."""
    from ..oracles.exact import Problem, Reference
    from ..oracles.limits import limits
    from ..oracles.taint import separate

    names = {n for n in names if n in outputs}
    if not names:
        return None
    with np.errstate(all="ignore"):
        clean, _ = separate(Problem.of(made), contract)
        reference = Reference(clean)
        allowed = limits(reference, contract, backward=bool(names - {"o", "lse"})).b
        tensors: dict[str, Tensor] = {}
        for n in sorted(names):
            want = torch.from_numpy(reference.arrays[n].copy())
            limit = torch.from_numpy(np.broadcast_to(allowed[n], want.shape).copy())
            tensors |= {f"{n}.got": outputs[n], f"{n}.want": want, f"{n}.limit": limit}
    write_whole(answer_file(path), packed(tensors))
    return answer_file(path)
