"""The shrinker reaches the case a person would write, with few calls of the predicate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashproof.fuzz.case import SIZES, Case
from flashproof.fuzz.masks import (
    And,
    BlockSparse,
    Causal,
    Document,
    Full,
    Mask,
    Not,
    Or,
    Padding,
    Prefix,
    Random,
    Strided,
    Window,
)
from flashproof.fuzz.shrink import Budget, Shrinker, shrink
from flashproof.fuzz.simpler import (
    NUMBERS,
    ORDERED,
    edges,
    feature_count,
    heads,
    mask_rank,
    resets,
    simpler_masks,
    simpler_values,
    size,
)

BIG = Case(
    B=3, Hq=12, Hkv=4, Lq=77, Lk=131, D=40, Dv=24, dtype="bfloat16", mask=And(Causal("bottom_right"), Padding((5, 90, 0))),
    mask_form="additive", mask_fill="min", mask_axes="bh", bias="large", bias_axes="hqk", scale=0.37, softcap=17.5, dropout=0.1,
    data="outlier", grad="scaled", lse_grad=True, requires_grad="qkvb", layout_q="packed", layout_k="blhd", layout_v="strided",
    layout_do="transposed", layout_mask="expand", sequence="scale", seed=912345,
)  # fmt: skip
SMALLEST = Case(requires_grad="")
UNBOUNDED = Budget(probes=5000, seconds=60)
Predicate = Callable[[Case], bool]


@dataclass(frozen=True)
class Bug:
    """A switch, the case it must shrink to, and the calls of the predicate that may take."""

    fails: Predicate
    want: Case
    probes: int
    start: Case = BIG


def dead_row(case: Case) -> bool:
    return case.Lk > 0 and not bool(case.mask.dense(case.B, case.Hq, case.Lq, case.Lk).any(-1).all())


def has(case: Case, kind: type[Mask]) -> bool:
    return any(isinstance(m, kind) for m in case.mask.walk())


def forward(**changes: object) -> Case:
    """The simplest case without a backward pass, with these changes."""
    return SMALLEST.but(**changes)


BOTTOM_RIGHT = Causal("bottom_right")
TALL = BIG.but(Lq=131, Lk=77)
EXACT: dict[str, Bug] = {
    "everything fails": Bug(lambda _: True, SMALLEST, 5),
    "a partial last tile, when there is more than one": Bug(lambda c: c.Lk > 16 and c.Lk % 16 != 0, forward(Lk=17), 60),
    "a partial tile of 64": Bug(lambda c: c.Lk > 64 and c.Lk % 64 != 0, forward(Lk=65), 90),
    "lengths above a hundred": Bug(lambda c: c.Lk > 100, forward(Lk=101), 110),
    "the wrong key head": Bug(lambda c: c.Hkv > 1 and c.G > 1, forward(Hq=4, Hkv=2), 65),
    "any grouped heads": Bug(lambda c: c.G > 1, forward(Hq=2), 40),
    "a ratio of three": Bug(lambda c: c.G % 3 == 0, forward(Hq=3), 50),
    "several heads": Bug(lambda c: c.Hq > 1, forward(Hq=2, Hkv=2), 30),
    "value width is not key width": Bug(lambda c: c.Dv != c.D, forward(Dv=2), 30),
    "value width above key width": Bug(lambda c: c.Dv > c.D, forward(Dv=2), 30, BIG.but(D=24, Dv=40)),
    "width that is not a power of two": Bug(lambda c: c.D & (c.D - 1) != 0, forward(D=3), 40),
    "causal bottom-right when the lengths differ": Bug(
        lambda c: BOTTOM_RIGHT in c.mask.walk() and c.Lq != c.Lk, forward(mask=BOTTOM_RIGHT, Lk=2), 75
    ),
    "more queries than keys under causal": Bug(
        lambda c: has(c, Causal) and c.Lq > c.Lk > 0, forward(mask=Causal(), Lq=2), 95, TALL
    ),
    "a row without a key": Bug(dead_row, forward(mask=Padding((0,))), 75),
    "grad_output that is not contiguous": Bug(
        lambda c: c.layout_do == "transposed" and "v" in c.requires_grad, Case(layout_do="transposed", requires_grad="v"), 95
    ),
    "softcap forgotten in dq": Bug(lambda c: c.softcap > 0 and "q" in c.requires_grad, Case(softcap=1.0, requires_grad="q"), 45),
    "scale remembered from the call before": Bug(lambda c: c.sequence == "scale", forward(sequence="scale"), 30),
    "packed inputs": Bug(lambda c: "packed" in (c.layout_q, c.layout_k), forward(layout_q="packed"), 40),
    "bfloat16 and outliers": Bug(
        lambda c: c.dtype != "float32" and c.data in ("outlier", "heavy"), forward(dtype="float16", data="outlier"), 80
    ),
    "gradient through lse with a bias": Bug(
        lambda c: c.lse_grad and "b" in c.requires_grad, Case(lse_grad=True, requires_grad="b"), 75
    ),
    "a product of lengths": Bug(lambda c: c.Lq * c.Lk > 100, forward(Lk=101), 110),
    "an index over the whole tensor": Bug(lambda c: c.B * c.Hq * c.Lq * c.D > 200, forward(D=201), 260),
    "fewer queries than keys, both above five": Bug(lambda c: 5 < c.Lq < c.Lk, forward(Lq=6, Lk=7), 130),
    "lengths that are equal and above five": Bug(lambda c: c.Lq == c.Lk > 5, forward(Lq=6, Lk=6), 150, BIG.but(Lq=77, Lk=77)),
    "a constant distance of the widths": Bug(lambda c: c.D - c.Dv == 16, forward(D=17), 105),
    "a constant distance of the lengths": Bug(lambda c: c.Lk - c.Lq == 54, forward(Lk=55), 170),
    "no keys at all": Bug(lambda c: c.Lk == 0, forward(Lk=0), 30, BIG.but(Lk=0)),
    "the second batch": Bug(lambda c: c.B > 1 and c.Lk > 1, forward(B=2, Lk=2), 45),
    "any declared scale": Bug(lambda c: c.scale is not None, forward(scale=1.0), 40),
    "one seed in four": Bug(lambda c: c.seed % 4 == 1, forward(seed=1), 20),
    "small sizes only with another seed": Bug(lambda c: c.Lk > 60 or c.seed == 2, forward(seed=2), 110),
    "a window of three": Bug(
        lambda c: any(isinstance(m, Window) and m.left >= 3 for m in c.mask.walk()) and c.Lk > 4,
        forward(mask=Window(3, -1), Lk=5), 145, BIG.but(mask=Or(Window(9, 4, "bottom_right"), Document((3, 7)))),
    ),
    "a padding one below the length": Bug(
        lambda c: any(isinstance(m, Padding) and max(m.lengths) == c.Lk - 1 for m in c.mask.walk()),
        forward(mask=Padding((0,))), 105, BIG.but(mask=Padding((5, 90, 130, 0))),
    ),
    "an empty tile of a block mask": Bug(
        lambda c: any(isinstance(m, BlockSparse) and m.percent < 100 for m in c.mask.walk()),
        forward(mask=BlockSparse(1, 1, 0)), 90, BIG.but(mask=Not(BlockSparse(64, 16, 30, 9, "bhqk"))),
    ),
}  # fmt: skip


STUCK: dict[str, tuple[Predicate, Case, Case]] = {
    "a strange layout of two heads, where another of two columns does": (
        lambda c: (c.layout_do == "expand" and c.Hq > 1) or (c.layout_do == "strided" and c.Dv > 1),
        forward(Hq=2, Hkv=2, layout_do="expand"), forward(Dv=2, layout_do="strided"),
    ),
    "a feature, where a second batch does": (
        lambda c: c.Lk * c.B > 1 and (c.bias_axes == "" or c.B > 1),
        forward(Lk=2, bias_axes=""), forward(B=2),
    ),
    "half a tile of two sizes, where one whole tile does": (
        lambda c: c.Lk > (32 if c.Dv > 64 else 64), forward(Lk=33, Dv=65), forward(Lk=65),
    ),
    "D and Dv that change places": (
        lambda c: c.D != c.Dv and c.Lk >= (3 if c.D > c.Dv else 2), forward(Lk=3, D=2), forward(Lk=2, Dv=2),
    ),
    "batches, where keys do": (lambda c: c.Dv > 1 and max(c.B, c.Lk) > 1, forward(B=2, Dv=2), forward(Lk=2, Dv=2)),
    "a seed that only a longer tail shows": (
        lambda c: c.seed >= 5 and c.Lk >= (17 if c.seed == 28 else 21), forward(Lk=21, seed=5), forward(Lk=17, seed=28),
    ),
}  # fmt: skip
"""A start where every single step passes, and the smaller case that a person would write."""


@pytest.mark.parametrize("name", STUCK)
def test_shrinking_leaves_a_dead_end(name: str) -> None:
    fails, start, want = STUCK[name]
    assert fails(start)
    assert shrink(start, fails, UNBOUNDED) == want


@pytest.mark.parametrize("name", EXACT)
def test_shrinking_reaches_the_minimum_worked_out_by_hand(name: str) -> None:
    bug = EXACT[name]
    assert bug.fails(bug.start)
    assert shrink(bug.start, bug.fails, UNBOUNDED) == bug.want


@pytest.mark.parametrize("name", EXACT)
def test_shrinking_asks_few_times(name: str) -> None:
    bug = EXACT[name]
    s = Shrinker(bug.start, bug.fails, UNBOUNDED)
    s.run()
    assert s.complete and s.probes <= bug.probes, s.probes


ATOMS: tuple[tuple[str, Callable[[Case, int], bool]], ...] = (
    ("Lk above", lambda c, n: c.Lk > n),
    ("Lq residue", lambda c, n: c.Lq % (n + 2) != 0),
    ("D above", lambda c, n: c.D - n % 30 > 0),
    ("grouped", lambda c, _: c.G > 1),
    ("heads", lambda c, n: c.Hkv > n % 4),
    ("dtype", lambda c, _: c.dtype == "bfloat16"),
    ("mask", lambda c, _: c.mask != Full()),
    ("dead", lambda c, _: dead_row(c)),
    ("softcap", lambda c, _: c.softcap > 0),
    ("layout", lambda c, _: c.layout_v != "contiguous"),
    ("gradient", lambda c, n: "qkvb"[n % 4] in c.requires_grad),
    ("product", lambda c, n: c.Lq * c.Lk > 10 * n),
    ("luck", lambda c, _: sum(map(ord, c.key)) % 2 == 0),
)
atoms = st.tuples(st.sampled_from(ATOMS), st.integers(0, 40)).map(lambda a: (a[0][0], a[1], a[0][1]))
predicates = st.lists(st.lists(atoms, min_size=1, max_size=3), min_size=1, max_size=2)


def holds(predicate: list[list[tuple[str, int, Callable[[Case, int], bool]]]]) -> Predicate:
    """True where every atom of some conjunction holds, and for the big case."""
    return lambda c: c == BIG or any(all(test(c, n) for _, n, test in part) for part in predicate)


QUICK = settings(max_examples=25, deadline=None, database=None, derandomize=True)


@QUICK
@given(predicates)
def test_shrinking_twice_changes_nothing(predicate: list[list[tuple[str, int, Callable[[Case, int], bool]]]]) -> None:
    fails = holds(predicate)
    once = shrink(BIG, fails, UNBOUNDED)
    assert fails(once) and shrink(once, fails, UNBOUNDED) == once


@QUICK
@given(predicates, st.integers(0, 60))
def test_an_interrupted_shrink_has_a_failing_case_no_larger_than_the_start(
    predicate: list[list[tuple[str, int, Callable[[Case, int], bool]]]], probes: int
) -> None:
    fails = holds(predicate)
    s = Shrinker(BIG, fails, Budget(probes=probes))
    best = s.run()
    assert fails(best) and size(best) <= size(BIG) and s.probes <= probes


def test_an_interruption_by_the_user_keeps_the_best_case() -> None:
    asked: list[Case] = []

    def fails(case: Case) -> bool:
        asked.append(case)
        if len(asked) == 20:
            raise KeyboardInterrupt
        return case.Lk > 16

    s = Shrinker(BIG, fails)
    with pytest.raises(KeyboardInterrupt):
        s.run()
    assert s.best.Lk > 16 and size(s.best) < size(BIG)


def test_shrinking_stops_when_its_seconds_are_over() -> None:
    now = iter(range(1000))
    s = Shrinker(BIG, lambda c: c.Lk > 16, Budget(seconds=5), clock=lambda: float(next(now)))
    s.run()
    assert not s.complete and s.probes <= 5


def test_the_same_case_is_never_asked_twice() -> None:
    asked: list[str] = []

    def fails(case: Case) -> bool:
        asked.append(case.key)
        return case.Lk > 16 and case.Hkv > 1

    shrink(BIG, fails, UNBOUNDED)
    assert len(asked) == len(set(asked))


def test_a_luck_that_depends_on_the_values_does_not_stop_a_shrink() -> None:
    best = shrink(
        BIG.but(seed=0), lambda c: c == BIG.but(seed=0) or (c.Lk > 16 and sum(map(ord, c.key)) % 2 == 0), UNBOUNDED
    )
    assert best.but(seed=0) == forward(Lk=17)


MASKS: tuple[Mask, ...] = (
    Full(), Causal(), Window(3, 4), Padding((3, 9)), Document((2, 5)), Prefix(4), Strided(3), BlockSparse(), Random(20, 30, 7, "bq"),
    And(Causal(), Padding((3,))), Or(Window(1, 1), Random()), Not(And(Causal(), Not(Random(axes="k")))),
)  # fmt: skip


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.kind)
def test_a_mask_can_be_replaced_by_none(mask: Mask) -> None:
    assert mask == Full() or Full() in simpler_masks(mask)


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.kind)
def test_following_simpler_masks_ends(mask: Mask) -> None:
    steps = 0
    while lower := [m for m in simpler_masks(mask) if mask_rank(m) < mask_rank(mask)]:
        mask, steps = lower[-1], steps + 1
        assert steps < 60
    assert mask == Full()


def test_a_default_field_is_no_feature() -> None:
    assert feature_count(SMALLEST) == 0 and feature_count(Case()) == 3


def test_an_empty_tensor_is_a_feature() -> None:
    assert size(forward(Lk=0)) > size(forward(Lk=200))


def test_a_feature_outweighs_any_size() -> None:
    assert size(forward(softcap=1.0)) > size(forward(Lk=4000, Lq=4000))


def test_every_field_has_a_way_back_to_its_default() -> None:
    reset = {name for changes in resets(BIG) for name in changes}
    changed = {f.name for f in fields(Case) if getattr(BIG, f.name) != getattr(Case(), f.name)}
    assert reset >= changed - {*SIZES, "seed"}


def test_head_candidates_keep_the_ratio_whole() -> None:
    assert all(q % k == 0 for q, k in heads(BIG)) and (6, 2) in heads(BIG)


def test_size_candidates_are_below_and_ascending() -> None:
    assert (found := list(edges(70))) == sorted(set(found)) and {2, 17, 65, 69} <= set(found) and max(found) < 70


def test_plainer_values_are_tried_for_every_named_field() -> None:
    big = BIG.but(alibi="large", sinks="-inf", mode="opcheck")
    names = {name for changes in simpler_values(big) for name in changes}
    assert names >= {*ORDERED, *NUMBERS, "bias_axes", "mask_axes", "requires_grad"} - {
        "layout_k",
        "mask_fill",
    }  # blhd is the plainest
