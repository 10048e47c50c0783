"""A failing case as a standalone script: torch and the target, nothing of flashproof, short enough to read in an issue."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..oracles.finding import Finding
from .case import Case
from .corpus import CorpusError, Record
from .dialects import DIALECTS, Binding, keywords
from .literals import LITERAL, WIDTH, Writer, formula, same_bits, source
from .masks import Mask
from .tensors import TORCH_DTYPES, Inputs, build, soft

TENSORS = ("o", "lse", "dq", "dk", "dv", "dbias")
LINES = 90
HANG_SECONDS = 60
"""After this a script that reproduces a hang gives up and exits 1."""


def attention(q: Tensor, k: Tensor, v: Tensor, case: Case, keep: Tensor | None, bias: Tensor | None, dropout: Tensor | None) -> tuple[Tensor, Tensor]:
    """o and lse as the script of the case defines them: what `definition` writes."""
    k, v = k.repeat_interleave(case.G, 1), v.repeat_interleave(case.G, 1)
    s = case.resolved_scale * (q @ k.mT)
    s = case.softcap * torch.tanh(s / case.softcap) if case.softcap else s
    s = s if bias is None else s + bias
    s = s if keep is None else s.masked_fill(~keep, -torch.inf)
    p = s.softmax(-1).nan_to_num()
    return (p if dropout is None else p * dropout / (1 - case.dropout)) @ v, s.logsumexp(-1)


def definition(case: Case, keep: str, bias: str, dropout: str) -> list[str]:
    """The lines of `attention` that the case needs; the last arguments are names of variables, or None."""
    lines = ["def attention(q, k, v, bias=None):", '    """o and lse by definition; a row with no allowed key gives zeros and -inf."""']
    lines += [f"    k, v = k.repeat_interleave({case.G}, 1), v.repeat_interleave({case.G}, 1)"] if case.G > 1 else []
    lines.append(f"    s = {case.resolved_scale!r} * (q @ k.mT)")
    lines += [f"    s = {case.softcap!r} * torch.tanh(s / {case.softcap!r})"] if case.softcap else []
    lines += ["    s = s + bias"] if bias != "None" else []
    lines += [f"    s = s.masked_fill(~{keep}, -torch.inf)"] if keep != "None" else []
    lines.append("    p = s.softmax(-1).nan_to_num()")
    lines += [f"    p = p * {dropout} / {1 - case.dropout!r}"] if dropout != "None" else []
    return [*lines, "    return p @ v, s.logsumexp(-1)"]


@dataclass(frozen=True)
class Check:
    """One element that was wrong and the limit of its error; `want` is given where the plain definition cannot give it."""

    tensor: str
    index: tuple[int, ...]
    limit: float
    want: float | None = None


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
        ending = self.ending()
        functions = [source(name) for name in sorted(self.writer.uses)]
        self.imports |= {"zlib", "base64"} if "unpack" in self.writer.uses else set()
        if "normal" in self.writer.uses:
            self.imports.add("statistics.NormalDist")
        parts = [self.docstring(), self.header(), target, *functions, self.writer.lines, self.call_function(), calls, *ending]
        return "\n".join(line for part in parts if part for line in [*part, ""]).rstrip("\n") + "\n"

    def docstring(self) -> list[str]:
        """What is wrong, where it was found and which case it is."""
        lines = [f"{self.record.target}: {finding.tensor}: {finding.message}"[:300] for finding in self.record.findings[:3]]
        versions = ", ".join(f"{n} {self.record.environment[n]}" for n in ("torch", "triton", "device") if self.record.environment.get(n))
        lines += ["", f"Found {self.record.found} on {self.record.device}{' with ' + versions if versions else ''}. Exits 1 while wrong, 0 when right."]
        lines += [f"Arithmetic promised: {self.record.contract}."] if self.record.contract else []
        text = "\n".join(w for line in lines for w in textwrap.wrap(line, WIDTH) or [""])
        safe = text.encode("ascii", "replace").decode().replace("\\", "/").replace('"""', "'''")
        return ['"""' + safe.strip(), '"""']

    def header(self) -> list[str]:
        """Imports and settings that must come first."""
        early = ["import os", "", 'os.environ["TRITON_INTERPRET"] = "1"  # Triton kernels run on the CPU; set before triton is imported', ""]
        lines = early if self.interpreted() else []
        modules = sorted(m for m in self.imports if m != "statistics.NormalDist")
        lines += [f"import {m}" for m in modules]
        lines += ["from statistics import NormalDist"] if "statistics.NormalDist" in self.imports else []
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
        return ["from flashproof.impls.loading import load", "", f"target = load({json.dumps(self.record.target)}).call"]

    def call_function(self) -> list[str]:
        """`call`: the target's outputs and gradients, whatever its layout."""
        swap = ".transpose(1, 2)" if DIALECTS[self.binding.dialect].heads_inside else ""
        lse, bias = self.binding.returns_lse, self.bias_name()
        through_lse = any(c.lse_grad for c in (self.case, *self.record.preceding))
        lines = [
            f'def call(q, k, v, do, {"dlse, " * through_lse}wanted="qkv", **keywords):',
            '    """Outputs and gradients of the target by name, (B, H, L, D)."""',
            f'    x = {{n: t{swap}.detach().requires_grad_(n in wanted) for n, t in zip("qkv", (q, k, v))}}',
        ]
        lines += [f'    x["bias"] = keywords["{bias}"] = keywords["{bias}"].detach().requires_grad_()'] if bias else []
        ends = f"(o, lse), leaves, (do{swap}, dlse)" if through_lse else f"o, leaves, do{swap}"
        turned = '{n: t.transpose(1, 2) if n in ("o", "dq", "dk", "dv") else t for n, t in got.items()}'
        return [
            *lines,
            "    leaves = [t for t in x.values() if t.requires_grad]",
            "    with torch.set_grad_enabled(bool(leaves)):",
            f'        {"o, lse" if lse else "o"} = target(x["q"], x["k"], x["v"], **keywords)',
            f"    grads = torch.autograd.grad({ends}) if leaves else ()",
            f'    got = {{"o": o{", " + chr(34) + "lse" + chr(34) + ": lse" if lse else ""}}}',
            '    got |= {f"d{n}": g for n, g in zip([n for n in x if x[n].requires_grad], grads)}',
            f"    return {turned if swap else 'got'}",
        ]

    def bias_name(self) -> str:
        """The keyword that carries a bias whose gradient is asked for; empty without."""
        if "b" not in self.case.requires_grad or not self.case.bias:
            return ""
        return self.binding.name("bias") or self.binding.name("mask")

    def calls(self) -> list[str]:
        """The lines that call the target; the last call is the one that is judged."""
        before = [c for case in self.record.preceding for c in steps(case)]
        *earlier, last = [*before, *steps(self.case)]
        lines = [f"call({self.arguments(case)})" for case in earlier]
        return [*lines, f"got = call({self.arguments(last)})"]

    def arguments(self, case: Case) -> str:
        """The arguments of one call, after the lines that define them."""
        inputs = build(case, "cpu", guards=False)
        names = [self.tensor(n, getattr(inputs, n), case, n) for n in ("q", "k", "v", "do")]
        if any(c.lse_grad for c in (self.case, *self.record.preceding)):
            dlse = torch.zeros(case.B, case.Hq, case.Lq) if inputs.dlse is None else inputs.dlse
            names.append(self.tensor("dlse", dlse, case, ""))
        wanted = "".join(c for c in case.requires_grad if c != "b" or inputs.bias is not None)
        names += [f'wanted="{wanted}"'] if wanted != "qkv" else []
        given = keywords(self.binding, inputs)
        return ", ".join([*names, *(f"{n}={self.value(n, x, inputs)}" for n, x in given.items())])

    def value(self, name: str, value: Any, inputs: Inputs) -> str:
        """A keyword argument as text."""
        if isinstance(value, Tensor):
            return self.dense(name, value, inputs)
        if isinstance(value, Mask):
            self.imports.add("flashproof.fuzz.masks")  # the native dialect hands its targets Mask objects
            return f"flashproof.fuzz.masks.mask_from_json({value.to_json()!r})"
        return repr(value)

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
        if kinds & {"repeat", "determinism"}:
            return [self.again()]
        what = "; ".join(f"{f.oracle} finding on {f.tensor}" for f in self.record.findings) or "finding"
        note = f"# What was found ({what}) shows as an exception, a crash or a hang of the call above"
        if kinds & {"memory", "guard", "purity", "allocation"}:
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

    def checks(self) -> list[Check]:
        """The elements whose values were wrong, with the answer where the plain definition does not give it."""
        wrong = [c for finding in self.record.findings for c in elements(finding)]
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
        given = ", ".join([*names[:3], *([bias] if bias != "None" else [])])
        lines = [f"x = [t.double().requires_grad_() for t in ({given})]", "o, lse = attention(*x)", 'want = {"o": o, "lse": lse}']
        if any(c.tensor.startswith("d") for c in checks):
            through = inputs.dlse is not None
            ends = f"(o, lse), x, ({names[3]}.double(), {self.writer.define('dlse', inputs.dlse)}.double())" if through else f"o, x, {names[3]}.double()"
            lines.append(f'want |= zip(("dq", "dk", "dv", "dbias"), torch.autograd.grad({ends}))')
        return [definition(case, keep, bias, drop), lines]


def elements(finding: Finding) -> Iterator[Check]:
    """The wrong elements that a finding about values names, worst first; none for findings of other kinds."""
    if finding.tensor in TENSORS and finding.oracle in ("value", "nonfinite", "dead-row"):
        for row in finding.details.get("worst", [])[:3]:
            yield Check(finding.tensor, tuple(row["index"]), float(row["limit"]), float(row["want"]))


def answers(inputs: Inputs, tensors: set[str]) -> dict[str, Tensor]:
    """What the script's own definition gives for a case."""
    x = [t.double().requires_grad_() for t in (inputs.q, inputs.k, inputs.v, *([] if inputs.bias is None else [inputs.bias]))]
    o, lse = attention(*x[:3], inputs.case, inputs.keep, x[3] if len(x) > 3 else None, inputs.dropout_keep)
    want = {"o": o.detach(), "lse": lse.detach()}
    if any(t.startswith("d") for t in tensors):
        dlse = torch.zeros_like(lse) if inputs.dlse is None else inputs.dlse.double()
        want |= zip(("dq", "dk", "dv", "dbias"), torch.autograd.grad((o, lse), x, (inputs.do.double(), dlse)))
    return want


def agrees(plain: dict[str, Tensor], check: Check) -> bool:
    """Whether the plain definition gives the oracle's answer, to far less than the limit."""
    value = float(plain[check.tensor][check.index]) if check.tensor in plain else math.nan
    want = math.nan if check.want is None else check.want
    return value == want or abs(value - want) <= 1e-3 * check.limit + 1e-12 * abs(want)


def comparison(checks: list[Check]) -> list[str]:
    """Lines that compare the wrong elements, print them and exit."""
    return [
        "wrong = 0  # below: tensor, element, limit of its error for the arithmetic promised, the right answer",
        "for name, at, limit, right in [",
        *(f'    ("{c.tensor}", {c.index}, {c.limit:.9g}, {_want(c)}),' for c in checks),
        "]:",
        "    value = got[name][at].item()",
        "    ok = value == right or abs(value - right) <= limit or (value != value and right != right)",
        '    print(f"{name}{list(at)}: got {value:.9g}, want {right:.9g}, limit {limit:.3g}: {\'ok\' if ok else \'WRONG\'}")',
        "    wrong += not ok",
        "sys.exit(1 if wrong else 0)",
    ]


def _want(check: Check) -> str:
    if check.want is None:
        return f'want["{check.tensor}"]{list(check.index)}.item()'
    return repr(check.want) if math.isfinite(check.want) else f'float("{check.want}")'


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
    return [plain, case.varied().but(sequence=""), plain] if case.sequence else [plain]


def script(record: Record, binding: Binding) -> str:
    """A script that calls the record's target on its case, prints got, want and limit, and exits 1 while it is wrong.

    Values are written one by one while the script stays short; else large tensors come from the generator.
    """
    texts = (Script(record, binding, Writer(spare)).text() for spare in (LITERAL, LITERAL // 2, LITERAL // 8))
    text = ""
    for text in texts:
        if text.count("\n") < LINES:
            return text
    return text
