"""A failing case of an adapted target as a standalone script: it calls the function under the decorator, without flashproof."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .adapted import Calls
from .adapter import BACKWARD, FORWARD, GRADIENTS, LN2, LSE, OUTPUTS, PACKED, SIZES, Adapter
from .case import Case
from .corpus import CorpusError
from .repro import Script
from .tensors import TORCH_DTYPES, Inputs, build

STUB = (
    "def declare(fn=None, **declared):  # the decorator of the file, without flashproof: it remembers what it is given",
    "    return setattr(fn, 'declared', declared) or fn if fn else lambda f: declare(f, **declared)",
    "sys.modules['flashproof'] = types.SimpleNamespace(target=declare, Region=dict, Refuse=NotImplementedError)",
)
IDLE: dict[str, Any] = {
    "causal": False,
    "window": None,
    "mask": None,
    "attn_mask": None,
    "bias": None,
    "softcap": 0.0,
    "dropout": 0.0,
}
"""What a parameter is given that says nothing."""


class AdaptedScript(Script):
    """A Script that calls as an adapter declares."""

    @property
    def adapter(self) -> Adapter:
        """The declaration, as the record tells it; CorpusError if it could not have been written by us."""
        told = self.record.environment.get("adapter")
        try:
            return _adapter(told)
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise CorpusError(f"environment.adapter must say how the target was declared ({e})") from None

    def target(self) -> list[str]:
        """Lines that put a stub in the place of flashproof, then bind `target`."""
        self.imports.add("types")
        return [*STUB, *super().target(), *self._factories()]

    def _factories(self) -> list[str]:
        if not self.adapter.factory:
            return []
        self.imports.add("functools")
        return [
            "",
            "@functools.cache  # what a factory makes is kept from call to call",
            "def built(name, **sizes):",
            "    torch.manual_seed(0)",
            '    return (make if callable(make := target.declared["factory"]) else make[name])(**sizes)',
        ]

    def call_function(self) -> list[str]:
        """`call`: the target's outputs and gradients as (B, H, L, D), lse as natural logarithm (B, H, L)."""
        a = self.adapter
        body = [*self._forward(a), *self._gradients(a)]
        if a.out:
            body = [
                "for used in (False, True):  # the answer must not depend on what the buffers hold",
                "    for x in out.values():",
                "        x.copy_(1 - x.nan_to_num(2.0, 3.0, 4.0)) if used else x.fill_(torch.nan)",
                *("    " + line for line in body),
            ]
        sizes = ["B, Lq, Lk = sizes"] if a.layout == PACKED else []
        lines = [*sizes, *body, *self._back(a), "return got"]
        head = f"def call({'sizes, ' * bool(sizes)}{'out, ' * bool(a.out)}wanted, **given):"
        return [
            head,
            *("    " + x for x in lines),
        ]

    def _forward(self, a: Adapter) -> list[str]:
        passed = (
            ", ".join(f'given["{n}"]' for n in a.takes) if a.positional else f"**{{n: given[n] for n in {a.takes!r}}}"
        )
        buffers = (
            [f"given |= {{{', '.join(f'{a.out[n]!r}: out[{n!r}]' for n in a.out if n in OUTPUTS)}}}"] if a.out else []
        )
        if a.bwd is None:
            lines = ["given |= {n: given[n].detach().requires_grad_() for n in wanted}"]
            lines += ["with torch.set_grad_enabled(bool(wanted)):", f"    returned = target({passed})"]
        else:
            lines = ["with torch.no_grad():", f"    returned = target({passed})"]
        return [*buffers, *lines, *_named("got", "returned", a.returns, a)]

    def _gradients(self, a: Adapter) -> list[str]:
        through = any(c.lse_grad for c in (self.case, *self.record.preceding))
        if a.bwd is None:
            ends = 'list(map(got.get, ("o", "lse")))' if through else 'got["o"]'
            seeds = '[given["do"], given["dlse"]]' if through else 'given["do"]'
            names = '"dbias" if n in ("bias", "attn_mask") else "d" + n'
            grads = f"torch.autograd.grad({ends}, [given[n] for n in wanted], {seeds})"
            return ["if wanted:", f"    got |= zip([{names} for n in wanted], {grads})"]
        held = {a.out[n]: n for n in a.out if n not in OUTPUTS}
        buffers = ", ".join(f"{p!r}: out[{n!r}]" for p, n in held.items())
        lines = ["given = {'dlse': None} | given | got" + (f" | {{{buffers}}}" if buffers else "")]
        lines += [f'returned = target.declared["bwd"](**{{n: given[n] for n in {a.bwd_takes!r}}})']
        return [
            "if wanted:",
            *("    " + x for x in (*lines, *_named("grads", "returned", a.bwd_returns, a), "got = got | grads")),
        ]

    def _back(self, a: Adapter) -> list[str]:
        """Lines that turn what the target gave into (B, H, L, D)."""
        if a.layout == PACKED:
            lines = [
                "for n in [n for n in got if n in ('o', 'dq', 'dk', 'dv')]:",
                "    L, rows = (Lk, given.get('keys')) if n in ('dk', 'dv') else (Lq, None)",
                "    x = got[n] if rows is None else got[n].new_zeros(B * L, *got[n].shape[1:]).index_copy(0, rows, got[n])",
                "    got[n] = x.unflatten(0, (B, L)).transpose(1, 2)",
            ]
            lse = f"got['lse']{'.T' * (a.lse_shape == 'hl')}.unflatten(0, (B, Lq)).transpose(1, 2)"
        else:
            order = [a.layout.index(axis) for axis in "bhld"]
            moved = f"got |= {{n: got[n].permute{tuple(order)} for n in ('o', 'dq', 'dk', 'dv') if n in got}}"
            lines = [moved] if order != [0, 1, 2, 3] else []
            lse = f"got['lse'].permute{tuple(a.lse_shape.index(axis) for axis in 'bhl')}"
        natural = f".double() * {LN2!r}" if a.lse == "log2" else ""
        plain = a.lse_shape == "bhl" and not natural
        return [*lines, *([f"got['lse'] = {lse}{natural}"] if "lse" in a.returns and not plain else [])]

    def arguments(self, case: Case, leave_out: str = "") -> str:
        """The arguments of one call, after the lines that define them."""
        a, inputs = self.adapter, build(case, "cpu", guards=False)
        given, arrangement = Calls(a).telling.given(inputs)
        rows = arrangement.sequences.keys if arrangement.sequences else None
        out = [f"sizes={(case.B, case.Lq, case.Lk)}"] if a.layout == PACKED else []
        out += [self._buffers(Calls(a).shapes(inputs), inputs)] if a.out else []
        wanted = Calls(a).wanted(inputs, given, backward=True)
        out.append(f"wanted={tuple(wanted)!r}")
        for name in ("q", "k", "v", "do"):
            base = self.tensor(name, getattr(inputs, name), case, name)
            out.append(f"{name}={base}{self._moved(a, name if rows is not None else '')}")
        if rows is not None:
            keys = self.writer.define("keys", rows)
            out.append(f"keys={keys}")
        names = [n for n in dict.fromkeys((*a.takes, *a.bwd_takes)) if n in FORWARD and n not in ("q", "k", "v")]
        for name in names:
            value = self._idle(name, inputs) if name == leave_out else given[name]
            out.append(f"{name}={self._argument(name, value, inputs)}")
        if inputs.dlse is not None:
            dlse = arrangement.lse(inputs.dlse * (LN2 if a.lse == "log2" else 1.0), a.lse_shape)
            out.append(f"dlse={self.writer.define('dlse_given', dlse.contiguous())}")
        return ", ".join(out + [self._made(n, asked, inputs) for n, asked in self._asked().items()])

    def _idle(self, name: str, inputs: Inputs) -> Any:
        return inputs.case.but(scale=None).resolved_scale if name == "scale" else IDLE.get(name)

    def _argument(self, name: str, value: Any, inputs: Inputs) -> str:
        if isinstance(value, Tensor) and name in ("mask", "attn_mask", "bias"):
            return (
                self.bias(inputs) if value is inputs.bias and value.is_contiguous() else self.dense(name, value, inputs)
            )
        if isinstance(value, Tensor):
            return f"torch.tensor({value.tolist()}, dtype={value.dtype})"
        return repr(value)

    def _moved(self, a: Adapter, rows_of: str) -> str:
        """What brings a (B, H, L, D) tensor into the layout of the target."""
        if a.layout == PACKED:
            return ".transpose(1, 2).flatten(0, 1).contiguous()" + (
                "[keys]" if rows_of in ("k", "v") and rows_of else ""
            )
        order = tuple("bhld".index(axis) for axis in a.layout)
        return "" if order == (0, 1, 2, 3) else f".permute{order}"

    def _buffers(self, shapes: dict[str, tuple[int, ...]], inputs: Inputs) -> str:
        dtype = TORCH_DTYPES[inputs.case.dtype]
        texts = [f"{n!r}: torch.empty({shapes[n]}, dtype={'torch.float32' if n == 'lse' else dtype})" for n in shapes]
        return f"out={{{', '.join(texts)}}}"

    def _asked(self) -> dict[str, list[str]]:
        told: dict[str, list[str]] = self.record.environment["adapter"]["factory"]
        return told

    def _made(self, name: str, asked: list[str], inputs: Inputs) -> str:
        known = {"dtype": str(TORCH_DTYPES[inputs.case.dtype]), "device": repr(self.record.device)}
        sizes = [f"{n}={known.get(n) or getattr(inputs.case, n)}" for n in asked]
        return f"{name}=built({', '.join([repr(name), *sizes])})"


def _named(to: str, returned: str, names: tuple[str, ...], a: Adapter) -> list[str]:
    """Lines that name what a function returned."""
    held = [n for n in names if n in a.out]
    rest = tuple(n for n in names if n not in held)
    if not rest:
        return [f"{to} = {{n: out[n] for n in {names!r}}}"]
    pair = f"{returned} if isinstance({returned}, (tuple, list)) else ({returned},)"
    lines = [f"{to} = dict({returned} if isinstance({returned}, dict) else zip({rest if held else names!r}, {pair}))"]
    return [*lines, *([f"{to} |= {{n: out[n] for n in {tuple(held)!r}}}"] if held else [])]


def _adapter(told: Any) -> Adapter:
    """The declaration that a record tells, each word checked: it goes into a script."""
    for name in (*told["takes"], *told["bwd_takes"], *told["out"].values(), *told["factory"]):
        if not name.isidentifier():
            raise ValueError(f"{name!r} is no name")
    for known, words in (
        (told["returns"], OUTPUTS), (told["bwd_returns"], GRADIENTS), (told["out"], OUTPUTS + GRADIENTS), ([told["lse"]], LSE),
        ([n for names in told["factory"].values() for n in names], SIZES),
        (told["layout"] if told["layout"] != PACKED else "", "bhld"), (told["lse_shape"], "bhl"),
    ):  # fmt: skip
        for word in known:
            if word not in words:
                raise ValueError(f"{word!r} is none of {', '.join(words)}")
    fields: dict[str, Any] = {n: tuple(told[n]) for n in ("takes", "returns", "bwd_takes", "bwd_returns")}
    plain = {n: told[n] for n in ("positional", "layout", "align", "lse", "lse_shape", "out")}
    unknown = [n for n in fields["takes"] if n not in {*FORWARD, *BACKWARD, *told["out"].values(), *told["factory"]}]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no parameter with a meaning")
    made = dict.fromkeys(told["factory"], _never)
    return Adapter(name="", bwd=_never if told["bwd"] else None, factory=made, **fields, **plain)


def _never(**_: Any) -> None:
    """Stands for a function of the target, which only the script has."""
