"""What a user's own tests import: `cases` draws cases, `check` holds a callable to one, `Refuse` declines one.

from hypothesis import given, settings
from flashproof import cases, check

@settings(deadline=None)
@given(cases(dtypes=["bfloat16"], max_len=300))
def test_my_kernel(case):
    check(my_attention, case)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

from .dialects import Refuse
from .execute import Runner
from .judge import Judge, Verdict
from .report import failure_block
from .strategies import cases

__all__ = ["CheckFailed", "Refuse", "Verdict", "cases", "check"]


class CheckFailed(AssertionError):
    """A callable is wrong on a case. Each kind of finding raises a subclass of its own, so that Hypothesis keeps them apart."""


def check(fn: Callable[..., Any], case: Any, *, dialect: str = "", contract: str = "", device: str = "cpu") -> Verdict:
    """The verdict on `fn` for one case, run in this process; raises CheckFailed with the report if it is wrong.

    A case that the callable refuses (NotImplementedError, ValueError, Refuse) or cannot express is not a failure: the
    verdict's `status` then is "refused" or "inexpressible". A test that must not pass by refusing asserts on it.
    Raises ValueError when the callable's parameters fit no dialect.
    """
    runner = _runner(fn, dialect, contract, device)
    verdict = Judge(runner, contract).check(case)
    if verdict.failures:
        raise failure_class(verdict.failures[0].key)(failure_block(verdict))
    return verdict


@lru_cache(maxsize=64)
def _runner(fn: Callable[..., Any], dialect: str, contract: str, device: str) -> Runner:
    return Runner(fn, dialect=dialect, device=device, contract=contract)


@cache
def failure_class(key: str) -> type[CheckFailed]:
    """The exception class of one kind of finding: `CheckFailed_value_dk`."""
    name = "".join(c if c.isalnum() else "_" for c in key)
    return type(f"CheckFailed_{name}", (CheckFailed,), {"__doc__": f"Finding {key}.", "__module__": __name__})
