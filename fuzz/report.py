"""The text of failures and of a campaign, and the same as JSON. At most WIDTH columns."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from tabulate import tabulate

from ..oracles.finding import Finding
from .case import Case
from .found import MIN_CASES, Campaign, Failure, blind_because, verdict_and_exit_code
from .judge import Verdict
from .learn import differences
from .region import narrowing
from .simpler import DEFAULT, FEATURES
from .words import parts, sentence

WIDTH = 100
_LABEL = 10
WORST = 5
LIKELIEST = 3
TRACE_LINES = 12
FATAL = "Fatal Python error"
OURS = ("/flashproof/fuzz/", "/flashproof/oracles/", "<frozen runpy>", "Extension modules:")
"""Lines of a fatal error that say nothing about the target."""
LEAK = (
    "NaN or Inf in keys that every row masks reaches the output, as in 0 * NaN; mask v (or skip those keys), or declare "
    "--contract masked_nonfinite=may_leak"
)
Replay = Callable[[Failure], str]


def failure_text(failure: Failure, replay: str = "", heading: str = "") -> str:
    """One distinct failure: the smallest case, what is wrong, where, what passes, how often, the line to paste."""
    if failure.behind:
        return _consequence(failure, replay, heading)
    body = failure_block(failure.verdict, failure.key)
    rows = [
        ("where", failure.pattern),
        ("first in", _first_seen(failure)),
        ("there", _there(failure)),
        ("passes", "; ".join(n.words for n in failure.nearest)),
        ("declare", _declare(failure)),
        ("repeats", repeats(failure)),
        ("shrunk", _unshrunk(failure)),
        ("not seen", f"{', '.join(failure.left_out)}: the time for it was over" if failure.left_out else ""),
        ("replay", replay),
        ("continue", continuing(replay) if not failure.shrunk or failure.left_out else ""),
    ]
    title = heading or f"FAILURE {failure.key}"
    return "\n".join([title, body, *_preceding(failure), *(labelled(n, text) for n, text in rows if text)])


def failure_block(verdict: Verdict, key: str = "") -> str:
    """What is wrong with one case: the case in a sentence, every finding, the worst elements, what would explain them."""
    failing = sorted(verdict.failures, key=lambda f: f.key != key)
    lines = [labelled("case", sentence(verdict.case))]
    for finding in failing:
        lines.append(labelled("finding", str(finding)))
        if finding is failing[0]:
            lines += _worst(finding) + _printed(finding)
    wrong = {f.tensor for f in failing}
    lines += [
        labelled("warning", str(f)) for f in verdict.findings if f.severity == "warning" and f.tensor not in wrong
    ]
    return "\n".join(lines + _deviations(verdict))


def labelled(label: str, text: str) -> str:
    """`  label     text`, wrapped with a hanging indent. A line to paste is never broken."""
    first = f"  {label:{_LABEL - 2}} "
    if label in ("replay", "continue"):
        return first + text
    if not label:
        return " " * len(first) + text
    blank = " " * len(first)
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=blank, break_on_hyphens=False)


def _worst(finding: Finding) -> list[str]:
    """A table of the worst elements, where the finding has more than one."""
    worst = finding.details.get("worst", [])[:WORST]
    if len(worst) < 2:
        return []
    rows = [(str(w["index"]), _number(w["got"]), _number(w["want"]), _error(w), _number(w["limit"])) for w in worst]
    text = tabulate(rows, headers=["index", "got", "want", "error", "limit"], disable_numparse=True, tablefmt="plain")
    count, of = finding.details.get("count", len(worst)), finding.details.get("of", 0)
    title = f"{count} of {of} elements; the worst" if of else "the worst"
    return [labelled("worst", title), *(" " * (_LABEL + 1) + line for line in text.splitlines())]


def _number(x: Any) -> str:
    return f"{float(x):.6g}"


def _error(worst: dict[str, Any]) -> str:
    return f"{abs(float(worst['got']) - float(worst['want'])):.2g}"


def _printed(finding: Finding) -> list[str]:
    """The end of a traceback or of what a dead process printed; of a fatal signal its own frames, newest first."""
    text = str(finding.details.get("traceback") or finding.details.get("printed") or "").rstrip()
    lines = text.splitlines()
    fatal = next((n for n, line in enumerate(lines) if line.startswith(FATAL)), None)
    if fatal is None:
        lines = lines[-TRACE_LINES:]
    else:
        current = next((n for n, line in enumerate(lines) if line.startswith("Current thread")), fatal)
        frames = [line for line in lines[current:] if not any(word in line for word in OURS)]
        lines = [lines[fatal], *frames][:TRACE_LINES]
    return [" " * (_LABEL + 1) + line[: WIDTH - _LABEL - 1] for line in lines if line.strip()]


def _deviations(verdict: Verdict) -> list[str]:
    """The likeliest single departures from the contract that explain every wrong value, and what settles each."""
    still = "still a failure under the declared contract"
    out = [labelled("explains", f"{d}; {still}") for d in verdict.deviations[:LIKELIEST]]
    leaks = verdict.case.data == "nonfinite_masked" and any(f.oracle == "nonfinite" for f in verdict.failures)
    return out + ([labelled("explains", LEAK)] if leaks else [])


def _first_seen(failure: Failure) -> str:
    if failure.original == failure.case:
        return ""
    more = f"; {failure.count} cases failed so" if failure.count > 1 else ""
    return sentence(failure.original) + more


def _there(failure: Failure) -> str:
    """Where the first case was wrong, if that says more than the smallest one."""
    first, smallest = (text.replace(" everywhere", "") for text in (failure.original_pattern, failure.pattern))
    return failure.original_pattern if first != smallest else ""


def repeats(failure: Failure) -> str:
    """How often the case fails when it is run again."""
    seen, times = failure.reproduced
    if not times:
        return ""
    text = f"fails {seen} of {times} times"
    if failure.preceding:
        return f"{text}; in a new process only after {_cases(len(failure.preceding))}: the target keeps state between calls"
    if failure.fresh is None:
        return text
    if failure.fresh:
        return f"{text}, in a new process too"
    if failure.varies:
        return f"{text}; new processes answer differently: a race, or memory that was not initialised"
    return f"{text}; not in a new process: it depends on earlier calls, so the target keeps state between calls"


def _declare(failure: Failure) -> str:
    """Which field of the declared region leaves out a case that was refused inside it."""
    fields = narrowing(failure.case) if failure.key.startswith("refusal:") else []
    few = " or ".join(f"Region({f})" for f in fields[:3])
    return f"{few} leaves this case out, if the target does not mean to serve it" if few else ""


def _unshrunk(failure: Failure) -> str:
    """That a smaller case may exist, and why it was not looked for."""
    because = f" ({failure.reason})" if failure.reason else ""
    return "" if failure.shrunk else f"not to the end{because}; a smaller case may exist"


def continuing(replay: str) -> str:
    """The line to paste that goes on shrinking, from the one that replays."""
    return replay.replace("flashproof replay", "flashproof shrink", 1)


def _cases(n: int) -> str:
    return "the case above" if n == 1 else f"the {n} cases above"


def _preceding(failure: Failure) -> list[str]:
    return [labelled("before", sentence(c)) for c in failure.preceding]


def _consequence(failure: Failure, replay: str, heading: str) -> str:
    """A failure that the case of an earlier one shows too, in few lines."""
    finding = next(f for f in failure.verdict.failures if f.key == failure.key)
    lines = [
        heading or f"FAILURE {failure.key}",
        labelled("case", sentence(failure.case)),
        labelled("finding", str(finding)),
    ]
    lines.append(labelled("behind", f"the same case fails {failure.behind}, which may be the cause"))
    return "\n".join([*lines, *([labelled("replay", replay)] if replay else [])])


def failures_text(campaign: Campaign, replay: Replay = lambda _: "") -> str:
    """Every failure under its number, those that its cause may explain in a line below it, then those only counted."""
    heads = [f for f in campaign.failures if not _in_a_line(f, campaign.failures)]
    blocks = []
    for n, failure in enumerate(heads, 1):
        oracle, _, tensor = failure.key.partition(":")
        rest = [f for f in campaign.failures if _in_a_line(f, [failure]) and not _told(f, failure)]
        below = [_also(f, failure, replay(f)) for f in rest]
        title = f"FAILURE {n} of {len(heads)}: {tensor} ({oracle})"
        caused = [k for k, cause in campaign.caused.items() if cause == failure.key]
        if caused:
            told = f"{len(caused)} more, probably caused by it: {', '.join(caused)}; mend it, then hunt again"
            below.append(labelled("and", told))
        blocks.append("\n".join([failure_text(failure, replay(failure), title), *below]))
    blocks += _uncounted(campaign)
    return "\n\n".join(blocks)


def _uncounted(campaign: Campaign) -> list[str]:
    """A line for the failures that were not shrunk and that no block names."""
    named = {k for k, cause in campaign.caused.items() if any(f.key == cause for f in campaign.failures)}
    rest = [k for k in campaign.unshrunk if k not in named]
    because = f" ({campaign.unshrunk_because})" if campaign.unshrunk_because else ""
    return [labelled("also", f"{len(rest)} more, not shrunk{because}: {', '.join(rest)}")] if rest else []


INHERENT = {"sequence": "sequence", "bias": "dbias", "sinks": "dsinks"}
"""Features that every case of an oracle or tensor has."""


def _in_a_line(failure: Failure, others: Sequence[Failure]) -> bool:
    """Whether a failure is told in a line below its cause: it has one among the others, and needs nothing that it does not."""
    cause = next((f for f in others if f.key == failure.behind), None)
    inherent = {word for word, name in INHERENT.items() if name in failure.key.split(":")}
    return cause is not None and (_leaked(failure) or _features(failure.case) - inherent <= _features(cause.case))


def _told(failure: Failure, cause: Failure) -> bool:
    """Whether the block of the cause says all there is to say: the same case has both findings."""
    return failure.case == cause.case and failure.preceding == cause.preceding and failure.key in cause.verdict.keys


def _leaked(failure: Failure) -> bool:
    """Whether a failure was seen after other calls only, and not tied to certain ones."""
    return failure.fresh is False and not failure.preceding and bool(failure.behind)


def _features(case: Case) -> set[str]:
    """What a case has besides sizes and gradients."""
    return {n for n in (*FEATURES, "mask") if getattr(case, n) != getattr(DEFAULT, n)}


def _also(failure: Failure, cause: Failure, replay: str) -> str:
    """A consequence in a line: what fails, its case as far as it differs from the cause's, the line to paste."""
    oracle, _, tensor = failure.key.partition(":")
    if _leaked(failure):
        return labelled("also", f"{tensor} ({oracle}): only after other calls, as above")
    shared = [p for p in parts(cause.case) if p != "forward only"]
    own = parts(failure.case)
    case = "; ".join(["the same case", *(p for p in own if p not in shared)] if set(shared) <= set(own) else own)
    line = labelled("also", f"{tensor} ({oracle}): {case}")
    if not replay:
        return line
    fits = "\n" not in line and len(line) + 2 + len(replay) <= WIDTH
    return f"{line}; {replay}" if fits else f"{line}\n{labelled('', replay)}"


def summary(campaign: Campaign, command: str = "fuzz", min_cases: int = MIN_CASES) -> str:
    """Counts, what was accepted, what was learnt, and the verdict in the last line."""
    verdict, code = verdict_and_exit_code(campaign, command, min_cases)
    last = _last_line(campaign, verdict, blind_because(campaign, command, min_cases))
    return "\n".join([*(labelled(n, t) for n, t in _summary_rows(campaign) if t), f"{last} (exit {code})"])


def _summary_rows(c: Campaign) -> Iterable[tuple[str, str]]:
    judging = c.seconds - c.compiled.seconds
    rate = f", {c.cases / judging:.0f}/s" if judging > 0 and not c.failures else ""
    refused = "refused" + (f" ({c.outside} rightly, drawn outside the declared region)" if c.outside else "")
    told = (
        (c.accepted, "accepted"),
        (c.refused, refused if c.declared else "refused"),
        (c.inexpressible, "inexpressible"),
    )
    counts = ", ".join(f"{n} {word}" for n, word in told if n)
    lost = f", {c.infrastructure} lost ({c.trouble})" if c.infrastructure else ""
    first = (
        f"; first failure at case {c.cases_to_first_failure} after {c.seconds_to_first_failure:.1f} s"
        if c.seconds_to_first_failure is not None
        else ""
    )
    yield "cases", f"{c.cases}: {counts}{lost}; {c.seconds:.1f} s{rate}; seed {c.seed}{first}"
    yield "stopped", f"{c.because}; --seed {c.seed + 1} draws other cases" if c.because else ""
    yield "shrink", _shrinking(c)
    yield "compiled", str(c.compiled)
    yield "refused", "; ".join(f"{text} ({n})" for text, n in c.refusals.most_common(4))
    if c.declared is None:
        yield "serves", _served(c)
    yield "never", _never(c)
    yield "warnings", "; ".join(f"{text} ({n})" for text, n in c.warnings.most_common(6))
    if not c.failures:
        used = sorted(c.budget.items(), key=lambda item: -item[1][0])
        told_of = ", ".join(f"{t} {share:.0%}" for t, (share, _) in used)
        yield "closest", told_of + (" of the limit" if used else "")


def _shrinking(c: Campaign) -> str:
    """How long what was found was shrunk and studied, the bound on that, and how much came to its end."""
    if not (c.failures or c.unshrunk) or not c.shrink_seconds:
        return ""
    done, of = sum(f.shrunk and not f.left_out for f in c.failures), len(c.failures) + len(c.unshrunk)
    return f"{c.studied:.1f} s of at most {c.shrink_seconds:g} (--shrink-seconds); {done} of {of} failures to the end"


def _never(c: Campaign) -> str:
    """Kinds of case inside the region of which none was accepted."""
    names = [name for name, accepted, _, _ in c.table if accepted == 0]
    return f"accepted: {', '.join(names)}" if names else ""


def _served(c: Campaign) -> str:
    """The region learnt from refusals, in words."""
    lacks = differences(c.learnt, c.drawn)
    return "all that was drawn" if not lacks else f"learnt from refusals: {'; '.join(lacks)}"


def _last_line(c: Campaign, verdict: str, blind: Sequence[str]) -> str:
    if verdict == "fail":
        distinct = len(c.failures) + len(c.unshrunk)
        shown = sum(not _in_a_line(f, c.failures) for f in c.failures)
        apart = f": {shown} shown in full, {distinct - shown} more named below them, each with a file"
        text = f"FAIL: {distinct} distinct failure{'s' if distinct > 1 else ''}{apart if shown < distinct else ''}"
    elif verdict == "error":
        text = f"ERROR: {c.infrastructure} cases were lost through no fault of the target: {c.trouble}"
    elif verdict == "blind":
        text = f"BLIND: {'; '.join(blind)}"
    else:
        text = f"PASS: {c.accepted} cases right"
    return text + (" (interrupted)" if c.stopped == "interrupted" else "")


def campaign_json(
    campaign: Campaign,
    command: str = "fuzz",
    min_cases: int = MIN_CASES,
    target: str = "",
    replay: Replay = lambda _: "",
) -> dict[str, Any]:
    """The JSON document of a campaign."""
    c, info = campaign, campaign.info
    return {
        "schema": 1,
        "target": target or info.get("target", ""),
        "dialect": info.get("dialect", ""),
        "device": info.get("device", ""),
        "contract": info.get("contract", ""),
        "supports": info.get("supports"),
        "verdict": verdict_and_exit_code(c, command, min_cases)[0],
        "warnings": [f"{text} ({n})" for text, n in c.warnings.most_common()],
        "cases": c.cases,
        "accepted": c.accepted,
        "refused": c.refused,
        "inexpressible": c.inexpressible,
        "seconds": round(c.seconds, 3),
        "seconds_to_first_failure": c.seconds_to_first_failure,
        "failures": [failure_json(f, replay(f)) for f in c.failures],
        "environment": info.get("environment", {}),
        "compiled": c.compiled.to_json(),
        "seed": c.seed,
        "stopped": c.stopped,
        "blind": blind_because(c, command, min_cases),
        "unshrunk": {key: case.to_json() for key, case in c.unshrunk.items()},
        "by_kind": {name: asdict(count) for name, count in c.by_kind.items()},
        "learnt": asdict(c.learnt) if c.declared is None else None,
    }


def failure_json(failure: Failure, replay: str = "") -> dict[str, Any]:
    """The JSON object of one failure."""
    return {
        "key": failure.key,
        "case": failure.case.to_json(),
        "preceding": [case.to_json() for case in failure.preceding],
        "findings": [f.to_json() for f in failure.verdict.failures],
        "replay": replay,
        "pattern": failure.pattern,
        "passes": [{"words": n.words, "case": n.case.to_json()} for n in failure.nearest],
        "reproduced": list(failure.reproduced),
        "fresh": failure.fresh,
        "behind": failure.behind,
        "shrunk": failure.shrunk,
        "reason": failure.reason,
        "left_out": list(failure.left_out),
        "found_in": failure.original.to_json(),
        "count": failure.count,
    }
