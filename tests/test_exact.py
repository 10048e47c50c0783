"""The float64 reference against torch's autograd in float64 and against fifty-digit arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from flashproof.ci.controls import propagation
from flashproof.ci.draw import DATA, Drawn, draw, with_extras
from flashproof.oracles.contract import U32
from flashproof.oracles.exact import Problem, Reference


def autograd(p: Problem) -> dict[str, Tensor]:
    """The definition in torch float64, differentiated by torch; rows with no key are left to the definition."""
    q, k, v = (x.double().requires_grad_() for x in (p.q, p.k, p.v))
    groups = q.shape[1] // k.shape[1]
    bias = None if p.bias is None else p.bias.double().requires_grad_()
    s = p.scale * (q @ k.repeat_interleave(groups, 1).mT)
    s = p.softcap * torch.tanh(s / p.softcap) if p.softcap else s
    s = s if bias is None else s + bias
    s = s if p.alibi is None else s - torch.atleast_2d(p.alibi.double())[..., None, None] * apart(p)
    keep = torch.ones_like(s, dtype=torch.bool) if p.keep is None else p.keep.expand_as(s)
    s = s.masked_fill(~keep, -math.inf)
    sinks = None if p.sinks is None else p.sinks.double().requires_grad_()
    s = s if sinks is None else torch.cat([s, sinks.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    dead = (s == -math.inf).all(-1, keepdim=True)
    lse = torch.logsumexp(s.masked_fill(dead, 0.0), -1, keepdim=True)
    weights = torch.exp(s.masked_fill(dead, -math.inf) - lse)
    weights = weights[..., : p.k.shape[2]]
    dropped = weights if p.dropout is None else weights * p.dropout
    o = dropped @ v.repeat_interleave(groups, 1)
    assert p.do is not None
    loss = (o * p.do.double()).sum()
    if p.dlse is not None:
        loss = loss + (lse.squeeze(-1) * p.dlse.double()).masked_fill(dead.squeeze(-1), 0.0).sum()
    leaves = {"dq": q, "dk": k, "dv": v, "dbias": bias, "dsinks": sinks}
    leaves = {n: x for n, x in leaves.items() if x is not None}
    gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    return {"o": o.detach(), "lse": lse.detach().squeeze(-1).masked_fill(dead.squeeze(-1), -math.inf)} | gradients


def apart(p: Problem) -> Tensor:
    """(Lq, Lk): |i + Lk - Lq - j|, element by element."""
    Lq, Lk = p.q.shape[2], p.k.shape[2]
    return torch.tensor([[abs(i + Lk - Lq - j) for j in range(Lk)] for i in range(Lq)]).view(Lq, Lk)


def assert_agrees(p: Problem) -> None:
    """Equal to autograd up to float64 rounding of the absolute values behind each element."""
    r, other = Reference(p), autograd(p)
    mine, size = r.outputs(), propagation(r, 1e-300, U32)
    for name, x in other.items():
        allowed = 2.0**-44 * torch.from_numpy(np.array(size[name]))
        same = (mine[name] == x) | ((mine[name] - x).abs() <= allowed)
        assert bool(same.all()), f"{name}: {mine[name][~same][0]} {x[~same][0]}"


def tamed(drawn: Drawn) -> Drawn:
    """Without a bias of -inf, whose gradient torch makes NaN."""
    p = drawn.problem
    return replace(drawn, problem=p if p.bias is None else replace(p, bias=p.bias.clamp_min(-1e5)))


@pytest.mark.parametrize("data", DATA)
def test_reference_equals_autograd_on_every_data_regime(data: str) -> None:
    for seed in range(6):
        assert_agrees(tamed(draw(seed, "float32", data=data)).problem)


@pytest.mark.parametrize(
    "kind", ["none", "causal", "pad", "random", "block", "bias", "softcap", "causal_softcap", "deadrows"]
)
def test_reference_equals_autograd_on_every_mask(kind: str) -> None:
    for seed in range(6):
        assert_agrees(draw(seed, "bfloat16", data="normal", kind=kind).problem)


def test_reference_equals_autograd_with_dropout_lse_gradient_and_broadcast_bias() -> None:
    seen: set[str] = set()
    for seed in range(60):
        drawn = tamed(with_extras(draw(seed, "float32", data="normal")))
        seen |= set(drawn.extras)
        if "large_rows" not in drawn.extras:
            assert_agrees(drawn.problem)
    assert {"dlse", "dropout", "broadcast_bias", "fill_min", "scale", "softcap", "alibi", "sinks"} <= seen


def small(**changes: object) -> Problem:
    """B 1, two query heads on one key head, 2 x 3, D 2, Dv 3."""
    g = torch.Generator().manual_seed(4)
    shapes = {"q": (1, 2, 2, 2), "k": (1, 1, 3, 2), "v": (1, 1, 3, 3), "do": (1, 2, 2, 3)}
    tensors = {n: torch.randn(*s, generator=g) for n, s in shapes.items()}
    return replace(Problem(**tensors, scale=0.8), **changes)  # type: ignore[arg-type]


FIFTY_DIGITS = {
    "plain": {},
    "softcap": {"softcap": 0.7},
    "bias": {"bias": torch.tensor([[[[0.3, -2.0, 1.0]]]])},
    "lse gradient": {"dlse": torch.tensor([[[0.5, -1.0], [2.0, 0.1]]])},
    "mask": {"keep": torch.tensor([[[[True, False, True], [False, True, False]]]])},
    "dropout": {"dropout": torch.tensor([1.0, 0.0, 1.0] * 4).view(1, 2, 2, 3).double() * 2},
    "alibi": {"alibi": torch.tensor([0.7, -0.3])},
    "sinks": {"sinks": torch.tensor([0.4, -1.5]), "dlse": torch.tensor([[[0.5, -1.0], [2.0, 0.1]]])},
    "everything": {
        "alibi": torch.tensor([[0.25, 1.3]]),
        "sinks": torch.tensor([-0.6, 2.0]),
        "softcap": 1.5,
        "scale": -3.0,
        "bias": torch.tensor([[[[0.3, -2.0, 1.0]]]]),
        "dlse": torch.tensor([[[0.5, -1.0], [2.0, 0.1]]]),
        "dropout": torch.tensor([1.0, 0.0, 1.0] * 4).view(1, 2, 2, 3).double() * 2,
    },
}


class Digits:
    """Fifty-digit attention, one element at a time; gradients of the loss <o, do> + <lse, dlse> by central differences."""

    def __init__(self, p: Problem) -> None:
        self.p = p
        self.B, self.Hq, self.Hkv, self.Lq, self.Lk, self.D, self.Dv = p.sizes
        self.values = {n: [mpmath.mpf(float(x)) for x in t.flatten()] for n, t in self.inputs().items()}

    def inputs(self) -> dict[str, Tensor]:
        return {n: t for n, t in ((n, getattr(self.p, n)) for n in ("q", "k", "v", "bias", "sinks")) if t is not None}

    def at(self, name: str, *index: int) -> mpmath.mpf:
        shape = self.inputs()[name].shape
        flat = 0
        for i, n in zip(index, shape, strict=True):
            flat = flat * n + (i if n > 1 else 0)
        return self.values[name][flat]

    def score(self, h: int, i: int, j: int) -> mpmath.mpf:
        kv = h * self.Hkv // self.Hq
        s = mpmath.mpf(self.p.scale) * sum(self.at("q", 0, h, i, d) * self.at("k", 0, kv, j, d) for d in range(self.D))
        s = self.p.softcap * mpmath.tanh(s / self.p.softcap) if self.p.softcap else s
        if self.p.alibi is not None:
            s -= mpmath.mpf(float(torch.atleast_2d(self.p.alibi)[0, h])) * abs(i + self.Lk - self.Lq - j)
        return s if self.p.bias is None else s + self.at("bias", 0, h, i, j)

    def row(self, h: int, i: int) -> tuple[list[mpmath.mpf], mpmath.mpf]:
        """o and lse of a row."""
        keep = [self.p.keep is None or bool(self.p.keep[0, 0, i, j]) for j in range(self.Lk)]
        weights = [mpmath.exp(self.score(h, i, j)) if keep[j] else mpmath.mpf(0) for j in range(self.Lk)]
        total = sum(weights) + (0 if self.p.sinks is None else mpmath.exp(self.at("sinks", h)))
        kept = [w if self.p.dropout is None else w * float(self.p.dropout[0, h, i, j]) for j, w in enumerate(weights)]
        kv = h * self.Hkv // self.Hq
        o = [sum(w * self.at("v", 0, kv, j, d) for j, w in enumerate(kept)) / total for d in range(self.Dv)]
        return o, mpmath.log(total)

    def loss(self) -> mpmath.mpf:
        total = mpmath.mpf(0)
        for h in range(self.Hq):
            for i in range(self.Lq):
                o, lse = self.row(h, i)
                total += sum(x * float(self.p.do[0, h, i, d]) for d, x in enumerate(o))  # type: ignore[index]
                total += 0 if self.p.dlse is None else lse * float(self.p.dlse[0, h, i])
        return total

    def gradient(self, name: str) -> list[mpmath.mpf]:
        step, out = mpmath.mpf(10) ** -16, []
        for at, x in enumerate(self.values[name]):
            sides = []
            for sign in (1, -1):
                self.values[name][at] = x + sign * step
                sides.append(self.loss())
            self.values[name][at] = x
            out.append((sides[0] - sides[1]) / (2 * step))
        return out


@pytest.mark.parametrize("name", FIFTY_DIGITS)
def test_reference_equals_fifty_digit_arithmetic(name: str) -> None:
    p = small(**FIFTY_DIGITS[name])
    mine = Reference(p).outputs()
    with mpmath.workdps(50):
        digits = Digits(p)
        rows = [digits.row(h, i) for h in range(digits.Hq) for i in range(digits.Lq)]
        want = {"o": [x for o, _ in rows for x in o], "lse": [lse for _, lse in rows]}
        want |= {f"d{n}": digits.gradient(n) for n in digits.inputs()}
    for tensor, values in want.items():
        torch.testing.assert_close(
            mine[tensor].flatten(),
            torch.tensor([float(x) for x in values], dtype=torch.float64),
            rtol=1e-12,
            atol=1e-13,
        )


def test_rows_without_a_key_give_zero_and_minus_infinity() -> None:
    out = Reference(small(keep=torch.tensor([[[[True, True, True], [False, False, False]]]]))).outputs()
    assert (out["o"][:, :, 1] == 0).all()
    assert (out["lse"][:, :, 1] == -math.inf).all()
    assert (out["dq"][:, :, 1] == 0).all()


@pytest.mark.parametrize(("Lq", "Lk", "B"), [(0, 3, 1), (3, 0, 1), (2, 2, 0), (0, 0, 1)])
def test_empty_problems_have_answers_of_the_right_shape(Lq: int, Lk: int, B: int) -> None:
    q, k, v, do = (torch.ones(B, h, n, d) for h, n, d in ((4, Lq, 5), (2, Lk, 5), (2, Lk, 3), (4, Lq, 3)))
    out = Reference(Problem(q, k, v, do, bias=torch.zeros(1, 1, Lq, Lk))).outputs()
    assert [tuple(out[n].shape) for n in ("o", "lse", "dq", "dk", "dv")] == [
        tuple(t.shape) for t in (do, do[..., 0], q, k, v)
    ]
    assert (out["dk"] == 0).all()
    assert not out["o"].any()


def test_a_key_far_below_the_maximum_has_exactly_no_weight() -> None:
    p = small(bias=torch.tensor([[[[0.0, -3e38, 0.0]]]]))
    without = small(keep=torch.tensor([[[[True, False, True]]]]).expand(1, 1, 2, 3))
    assert torch.equal(Reference(p).outputs()["dq"], Reference(without).outputs()["dq"])


def test_the_gradient_of_a_bias_has_its_shape() -> None:
    for shape in ((1, 1, 1, 1), (1, 2, 1, 3), (1, 1, 2, 1)):
        assert Reference(small(bias=torch.zeros(shape))).outputs()["dbias"].shape == shape
