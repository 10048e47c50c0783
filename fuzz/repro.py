"""A failing case as a standalone script: torch and the target, nothing of flashproof, short enough to read in an issue."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..oracles.finding import Finding
from .calling import IMPORTS, PACK, Caller, block_mask, packed, plain, score_function
from .case import Case, case_from_json
from .corpus import CorpusError, Record
from .definition import Check, agrees, answers, comparison, definition, elements
from .dialects import DIALECTS, Binding, keywords
from .literals import LITERAL, WIDTH, Writer, formula, same_bits, source
from .masks import Mask
from .tensors import Inputs, autocast_dtype, build, soft

LINES = 90
HANG_SECONDS = 60
"""After this a script that reproduces a hang gives up and exits 1."""


@dataclass
class Script:
    """A script under construction for one record and the way its target is called."""

    record: Record
    binding: Binding
    writer: Writer = field(default_factory=Writer)
    imports: set[str] = field(default_factory=lambda: {"sys", "torch"})

    @property
    def case(self) -> Case:
        """The case that fails."""
        return self.record.case

    def text(self) -> str:
        """The whole script."""
        target, calls = self.target(), self.calls()
        if self.case.mode == "compile":
            target = [*target, "target = torch.compile(target, dynamic=False)"]
        ending = self.ending()
        functions = [source(name) for name in sorted(self.writer.uses)]
        self.imports |= {"zlib", "base64"} if "unpack" in self.writer.uses else set()
        if "normal" in self.writer.uses:
            self.imports.add("statistics.NormalDist")
        parts = [
            self.docstring(),
            self.header(),
            target,
            *functions,
            PACK if DIALECTS[self.binding.dialect].rows else [],
            self.writer.lines,
            self.call_function(),
            calls,
            *ending,
        ]
        return "\n".join(line for part in parts if part for line in [*part, ""]).rstrip("\n") + "\n"

    def docstring(self) -> list[str]:
        """What is wrong, where it was found, and what the exit code means."""
        record, found = self.record, self.record.findings
        place = Path(record.target).name if ".py" in record.target else record.target
        versions = ", ".join(f"{n} {v}" for n in ("torch", "triton", "device") if (v := record.environment.get(n)))
        lines = [f"{place} is wrong: {found[0] if found else 'see below'}"[:240]]
        lines += [f"Also wrong: {', '.join(f.tensor for f in found[1:])}."] if found[1:] else []
        where = f"Found {record.found} on {record.device}{' with ' + versions if versions else ''}."
        promised = f" Arithmetic promised: {record.contract}." if record.contract else ""
        lines += [f"{where} Exits 1 while wrong, 0 when right.{promised}"]
        text = "\n".join(w for line in lines for w in textwrap.wrap(line, WIDTH) or [""])
        safe = text.encode("ascii", "replace").decode().replace("\\", "/").replace('"""', "'''")
        return ['"""' + safe.strip() + '"""']

    def header(self) -> list[str]:
        """Imports and settings that must come first."""
        early = 'os.environ["TRITON_INTERPRET"] = "1"  # Triton kernels run on the CPU; set before triton is imported'
        lines = ["import os", "", early, ""] if self.interpreted() else []
        modules = sorted(self.imports - {"statistics.NormalDist", "torch", *IMPORTS})
        lines += [f"import {', '.join(modules)}"]
        lines += ["from statistics import NormalDist"] if "statistics.NormalDist" in self.imports else []
        lines += ["", "import torch", *(line for name, line in IMPORTS.items() if name in self.imports)]
        if "faulthandler" in self.imports:
            lines += ["", f"faulthandler.dump_traceback_later({HANG_SECONDS}, exit=True)  # the target hangs"]
        if self.record.device != "cpu":
            lines += ["", f"torch.set_default_device({self.record.device!r})"]
        return lines

    def interpreted(self) -> bool:
        """Whether the target's Triton kernels ran interpreted."""
        return self.record.device == "cpu" and bool(self.record.environment.get("triton_kernels", True))

    def target(self) -> list[str]:
        """Lines that bind `target`."""
        head, colon, attr = self.record.target.rpartition(":")
        place = head if colon else self.record.target
        if place.endswith(".py"):
            self.imports |= {"importlib.util"}
            return from_file(place, attr if colon else self.record.environment.get("attr", ""))
        if colon and all(part.isidentifier() for part in (*head.split("."), *attr.split("."))):
            first, _, rest = attr.partition(".")
            lines = ['sys.path.insert(0, "")  # packages of the current folder', f"from {head} import {first}"]
            return [*lines, "", f"target = {attr}"] if rest or first != "target" else lines
        return [
            "from flashproof.impls.loading import load",
            "",
            f"target = load({json.dumps(self.record.target)}).call",
        ]

    def call_function(self) -> list[str]:
        """`call`: the target's outputs and gradients, whatever its layout."""
        through_lse = any(c.lse_grad for c in (self.case, *self.record.preceding))
        sinks = self.binding.name("sinks") if "s" in self.case.requires_grad and self.case.sinks else ""
        device = self.record.device.partition(":")[0]
        return Caller(
            self.binding, through_lse, self.bias_name(), sinks, autocast_dtype(self.case), device or "cpu"
        ).lines()

    def bias_name(self) -> str:
        """The keyword that carries a bias whose gradient is asked for; empty without."""
        if "b" not in self.case.requires_grad or not self.case.bias:
            return ""
        if self.binding.dialect == "flex":
            return "leaf"
        return self.binding.name("bias") or self.binding.name("mask")

    def calls(self) -> list[str]:
        """The lines that call the target; the last call is the one that is judged."""
        before = [c for case in self.record.preceding for c in steps(case)]
        *earlier, last = [*before, *steps(self.case)]
        lines = [f"call({self.arguments(case)})" for case in earlier]
        given = self.arguments(last)
        if self.case.sequence == "refill":
            lines += self.refilled(given)
        return [*lines, f"got = call({given})"]

    def refilled(self, given: str) -> list[str]:
        """Lines that call the target with other values in the memory of q, k and v, and put theirs back."""
        same = ", ".join(given.split(", ")[:3])
        inputs = build(self.case.varied().but(sequence=""), "cpu", guards=False)
        others = ", ".join(self.given(n, inputs) for n in ("q", "k", "v"))
        return [
            f"same, kept = ({same}), [x.clone() for x in ({same})]",
            f"for x, y in zip(same, ({others})):",
            "    x.copy_(y)  # other values at the same address",
            f"call({given})",
            "for x, y in zip(same, kept):",
            "    x.copy_(y)",
        ]

    def arguments(self, case: Case, leave_out: str = "") -> str:
        """The arguments of one call, after the lines that define them."""
        inputs = build(case, "cpu", guards=False)
        names = [self.given(n, inputs) for n in ("q", "k", "v", "do")]
        if any(c.lse_grad for c in (self.case, *self.record.preceding)):
            dlse = torch.zeros(case.B, case.Hq, case.Lq) if inputs.dlse is None else inputs.dlse
            names.append(self.tensor("dlse", dlse, case, ""))
        wanted = "".join(c for c in case.requires_grad if c != "s" and (c != "b" or inputs.bias is not None))
        names += [f"B={case.B}"] if DIALECTS[self.binding.dialect].rows and case.B != 1 else []
        names += [f'wanted="{wanted}"'] if wanted != "qkv" else []
        given = keywords(self.binding, inputs)
        return ", ".join([*names, *(f"{n}={self.value(n, x, inputs)}" for n, x in given.items() if n != leave_out)])

    def given(self, name: str, inputs: Inputs) -> str:
        """Text for q, k, v or do as the dialect's `call` takes it."""
        x = getattr(inputs, name)
        if not DIALECTS[self.binding.dialect].rows:
            return self.tensor(name, x, inputs.case, name)
        return packed(self.writer, self.writer.define(name, x, inputs.case, name), name, inputs)

    def value(self, name: str, value: Any, inputs: Inputs) -> str:
        """A keyword argument as text."""
        if isinstance(value, Tensor) and value.dtype != torch.int32:
            return self.dense(name, value, inputs)
        if name == self.binding.name("lse") == "return_aux":
            self.imports.add(f"AuxRequest {self.binding.dialect}")
            return "AuxRequest(lse=True)"
        if self.binding.dialect == "flex" and name == self.binding.name("score"):
            return self.score(inputs)
        if self.binding.dialect == "flex" and name == self.binding.name("mask") and inputs.keep is not None:
            self.imports.add("create_block_mask")
            return block_mask(inputs.case, self.keep(inputs), tuple(inputs.keep.shape), self.record.device)
        if isinstance(value, Mask):
            self.imports.add("flashproof.fuzz.masks")  # the native dialect hands its targets Mask objects
            return f"flashproof.fuzz.masks.mask_from_json({value.to_json()!r})"
        return plain(value)

    def score(self, inputs: Inputs) -> str:
        """The name of the score function of a flex target."""
        bias, shape = self.bias(inputs), () if inputs.bias is None else tuple(inputs.bias.shape)
        if self.bias_name():
            bias = self.writer.say("leaf", f"{bias}.detach().requires_grad_()", None)
        return score_function(self.writer, inputs.case, bias, shape)

    def tensor(self, name: str, x: Tensor, case: Case, made_as: str) -> str:
        """The name of a variable that holds x in its layout."""
        return self.laid(self.writer.define(name, x, case if made_as else None, made_as), x)

    def laid(self, name: str, x: Tensor) -> str:
        """The name of a variable with the values of `name` in the layout of x; itself where they agree."""
        once = x[tuple(slice(0, 1) if s == 0 else slice(None) for s in x.stride())].contiguous().expand(x.shape)
        if once.stride() == x.stride() and not x.storage_offset():
            return name
        self.writer.uses.add("place")
        line = f"place({name}, {x.stride()}, {x.storage_offset()})"
        laid = next((known.partition(" = ")[0] for known in self.writer.lines if known.endswith(f" = {line}")), "")
        return laid or self.writer.say(f"{name}_laid", line, None)

    def dense(self, name: str, x: Tensor, inputs: Inputs) -> str:
        """The name of a variable that holds a dense mask or bias, made from `keep` and `bias` where that gives it."""
        keep, bias = self.keep(inputs), self.bias(inputs)
        if inputs.keep is not None and x.is_floating_point():
            base = torch.zeros((), dtype=x.dtype) if inputs.bias is None else inputs.bias
            merged = torch.where(inputs.keep, base, -torch.inf)
            if merged.shape == x.shape and same_bits(merged, x):
                text = f"torch.where({keep}, {bias if inputs.bias is not None else f'torch.zeros((), dtype={x.dtype})'}, -torch.inf)"
                return self.laid(self.writer.say(name, text, x), x)
        return self.laid(self.writer.define(name, x), x)

    def keep(self, inputs: Inputs) -> str:
        """The name of the boolean mask, or None."""
        if inputs.keep is None:
            return "None"
        keep, case = inputs.keep.contiguous(), inputs.case
        text = formula(case.mask, case)
        if not text or self.writer.known(keep):
            return self.writer.define("keep", keep)
        self.writer.index(text, case)
        return self.writer.say("keep", f"({text}).expand{tuple(keep.shape)}.contiguous()", keep)

    def bias(self, inputs: Inputs) -> str:
        """The name of the finite additive tensor, or None."""
        if inputs.bias is None:
            return "None"
        made_as = "bias" if inputs.case.bias and not soft(inputs.case) else ""
        return self.writer.define("bias", inputs.bias, inputs.case if made_as else None, made_as)

    def ending(self) -> list[list[str]]:
        """What is compared, printed and returned to the shell."""
        kinds = {finding.oracle for finding in self.record.findings}
        if "hang" in kinds:
            self.imports.add("faulthandler")
        checks = self.checks()
        if checks:
            return [*self.reference(checks), comparison(checks)]
        if kinds & {"repeat", "sequence"}:
            return [self.again()]
        if "ignored-keyword" in kinds:
            return [self.without(next(f for f in self.record.findings if f.oracle == "ignored-keyword"))]
        what = "; ".join(f"{f.oracle} finding on {f.tensor}" for f in self.record.findings) or "finding"
        note = f"# What was found ({what}) shows as an exception, a crash or a hang of the call above"
        if kinds & {"buffer", "printed", "memory", "guard", "purity", "allocation", "exact", "statistical", "opcheck"}:
            note = f"# What was found ({what}) needs instruments: flashproof replay {self.record.name} shows it"
        return [[note + ".", 'print("the call returned:", {n: tuple(x.shape) for n, x in got.items()})']]

    def again(self) -> list[str]:
        """Lines that call the target once more and compare bits."""
        return [
            f"again = call({self.arguments(steps(self.case)[-1])})",
            "differ = [n for n in got if not torch.equal(got[n].nan_to_num(), again[n].nan_to_num())]",
            'print("differs from call to call:", ", ".join(differ) or "nothing")',
            "sys.exit(1 if differ else 0)",
        ]

    def without(self, finding: Finding) -> list[str]:
        """Lines that call the target without a keyword, or with what the finding was compared with, and compare bits."""
        keyword, against = finding.tensor, finding.details.get("against")
        case = case_from_json(against) if against else steps(self.case)[-1]
        return [
            f"plain = call({self.arguments(case, leave_out='' if against else keyword)})",
            'same = torch.equal(got["o"].nan_to_num(), plain["o"].nan_to_num())',
            f'print("{keyword}", "changes nothing" if same else "changes the answer")',
            "sys.exit(1 if same else 0)",
        ]

    def checks(self) -> list[Check]:
        """The elements whose values were wrong, with the answer where the plain definition does not give it."""
        each = 3 if len(self.record.findings) == 1 else 1
        wrong = [c for finding in self.record.findings for c in islice(elements(finding), each)][:6]
        if not wrong:
            return []
        inputs = build(self.case, "cpu", guards=False)
        plain = answers(inputs, {c.tensor for c in wrong})
        return [Check(c.tensor, c.index, c.limit, None if agrees(plain, c) else c.want) for c in wrong]

    def reference(self, checks: list[Check]) -> list[list[str]]:
        """The float64 definition and `want` for the tensors that are checked."""
        if all(c.want is not None for c in checks):
            return []
        inputs, case = build(self.case, "cpu", guards=False), self.case
        names = [self.writer.define(n, getattr(inputs, n), case, n) for n in ("q", "k", "v", "do")]
        keep, bias = self.keep(inputs), self.bias(inputs)
        drop = "None" if inputs.dropout_keep is None else self.writer.define("dropout", inputs.dropout_keep)
        alibi = "None" if inputs.alibi is None else self.writer.define("alibi", inputs.alibi)
        sinks = [] if inputs.sinks is None else [self.writer.define("sinks", inputs.sinks)]
        given = ", ".join([*names[:3], *([bias] if bias != "None" else []), *sinks])
        lines = [
            f"x = [t.double().requires_grad_() for t in ({given})]",
            'want = dict(zip(("o", "lse"), attention(*x)))',
        ]
        if any(c.tensor.startswith("d") for c in checks):
            ends = f'want["o"], x, {names[3]}.double()'
            if inputs.dlse is not None:
                dlse = self.writer.define("dlse", inputs.dlse)
                ends = f"list(want.values()), x, ({names[3]}.double(), {dlse}.double())"
            grads = ["dq", "dk", "dv", *(["dbias"] if bias != "None" else []), *(["dsinks"] if sinks else [])]
            lines.append(f"want |= zip({tuple(grads)}, torch.autograd.grad({ends}))".replace("'", '"'))
        return [definition(case, keep, bias, drop, alibi), lines]


def from_file(place: str, attr: str) -> list[str]:
    """Lines that load a callable from a Python file."""
    if not attr or not all(part.isidentifier() for part in attr.split(".")):
        raise CorpusError(f"the target of a script must be given as path/to/file.py:attr, got {place}:{attr}")
    path = Path(place).expanduser().resolve()
    return [
        f"sys.path.insert(0, {json.dumps(str(path.parent))})",
        f'spec = importlib.util.spec_from_file_location("target_file", {json.dumps(str(path))})',
        'module = sys.modules["target_file"] = importlib.util.module_from_spec(spec)',
        "spec.loader.exec_module(module)",
        f"target = module.{attr}",
    ]


def steps(case: Case) -> list[Case]:
    """The calls of a case: A, then A with one thing changed, then A, for a call sequence; else A."""
    plain = case.but(sequence="")
    if case.sequence in ("", "refill"):
        return [plain]
    return [plain, case.varied().but(sequence=""), plain]


def script(record: Record, binding: Binding, kind: type[Script] = Script) -> str:
    """A script that calls the record's target on its case, prints got, want and limit, and exits 1 while it is wrong.

    Values are written one by one while the script stays short; else large tensors come from the generator.
    """
    texts = (kind(record, binding, Writer(spare)).text() for spare in (LITERAL, LITERAL // 2, LITERAL // 8, 8))
    text = ""
    for text in texts:
        if text.count("\n") < LINES:
            return text
    return text
