"""What would make the failing cases of an inspection right: another dialect, another convention, a wider contract."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from .alternatives import Cause, causes
from .binding import DIALECTS
from .case import Case
from .commands import Stop
from .judge import Verdict
from .learn import declaration, kinds
from .region import Region
from .session import Session, opened


def likely(session: Session, verdicts: Sequence[Verdict]) -> list[str]:
    """What would make failing cases right: another dialect, another convention, a wider contract."""
    failing = [v for v in verdicts if v.status == "fail"]
    if not failing:
        return []
    other = _other_dialect(session, verdicts)
    if other:
        return [other]
    found: list[Cause] = causes(session.judge, failing)
    best = [c for c in found if c.explained == found[0].explained and 2 * c.explained > c.of] if found else []
    lines = [f"{c} ({c.explained} of {c.of} failing cases)" for c in best[:2]]
    deviations = Counter(str(v.deviations[0]) for v in failing if v.deviations)
    most = [(text, n) for text, n in deviations.most_common(2) if 2 * n > len(failing)]
    lines += [f"{text} ({n} of {len(failing)} failing cases)" for text, n in most if not lines]
    lines += raising(verdicts) if not lines else []
    errors = Counter(f"raises {f.tensor}" for v in failing for f in v.failures if f.oracle == "exception")
    few = [(str(c), c.explained, c.of) for c in found[:1]]
    few += [(text, n, len(failing)) for text, n in [*deviations.most_common(1), *errors.most_common(1)]]
    unsure = "no single cause explains most failures; --characterise tries several together. The best explains"
    return lines or [f"{unsure} {n} of {of}: {text}" for text, n, of in sorted(few, key=lambda c: -c[1])[:1]]


def raising(verdicts: Sequence[Verdict]) -> list[str]:
    """The kind of case in which a target raises, and in no other, so that a refusal is missing; else its commonest error."""
    failing = [v for v in verdicts if v.status == "fail"]
    raised = {v.case: f for v in failing for f in v.failures if f.oracle == "exception"}
    errors = Counter(f.tensor for f in raised.values())
    answered = [v.case for v in verdicts if v.status in ("pass", "fail") and v.case not in raised]
    for error, n in errors.items():
        cases = [c for c, f in raised.items() if f.tensor == error]
        for kind in kinds():
            if n > 1 and all(map(kind.has, cases)) and not any(map(kind.has, answered)):
                lost = declaration(kind.without(Region()))
                return [f"raises {error} in each case with {kind.name} ({n}): refuse them, and declare {lost}"]
    common = [(f"raises {error}", n) for error, n in errors.most_common(1) if 2 * n > len(failing)]
    return [f"{text} ({n} of {len(failing)} failing cases)" for text, n in common]


def _other_dialect(session: Session, verdicts: Sequence[Verdict]) -> str:
    """Whether unmasked cases, all of them wrong as bound, are right in a dialect with the heads elsewhere."""
    plain = [v for v in verdicts if v.case.mask == Case().mask and not v.case.bias and v.status in ("pass", "fail")]
    trial = [v.case for v in plain if v.case.Lq > 1][:3]
    own = DIALECTS.get(session.info["dialect"])
    if own is None or not trial or any(v.status == "pass" for v in plain if v.case in trial):
        return ""
    for name, dialect in DIALECTS.items():
        if (
            name in ("sdpa", "flash_attn")
            and dialect.heads_inside != own.heads_inside
            and _passes(session, name, trial)
        ):
            layout = "(B, L, H, D)" if dialect.heads_inside else "(B, H, L, D)"
            corner = dialect.align.replace("_", "-")
            return f"right if the layout were {layout}: use --dialect {name} (it aligns causal {corner})"
    return ""


def _passes(session: Session, dialect: str, trial: Sequence[Case]) -> bool:
    """Whether the cases are right in another dialect."""
    try:
        with opened(session.target, replace(session.options, dialect=dialect, log=None)) as other:
            return all(other.judge.check(c, explain=False).status == "pass" for c in trial)
    except Stop:
        return False
