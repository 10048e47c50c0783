"""Which configuration of an autotuned Triton kernel is launched, and which one was.

first and each launch the configuration `Choice.index` of those that the kernel's own pruning leaves; tuned is Triton's own choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

HOW = ("first", "each", "tuned")


@dataclass
class Choice:
    """The configuration to launch, how many there were to choose from since `begin`, and who hears what was launched."""

    index: int = 0
    count: int = 1
    chose: Callable[[str, str], None] = lambda _kernel, _config: None

    def begin(self, index: int) -> None:
        """Launch this one from now on; kernels that have fewer launch their last."""
        self.index, self.count = index, 1


CHOICE = Choice()


def run_chosen(tuner: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of Autotuner.run: launch the chosen configuration; nothing is timed."""
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    left = _left_by_pruning(tuner, kwargs)
    CHOICE.count = max(CHOICE.count, len(left))
    config = tuner.best_config = left[min(CHOICE.index, len(left) - 1)]
    CHOICE.chose(tuner.base_fn.__name__, str(config))
    if config.pre_hook is not None:
        config.pre_hook({**tuner.nargs, **kwargs, **config.all_kwargs()})
    result = tuner.fn.run(*args, **kwargs, **config.all_kwargs())
    tuner.nargs = None
    return result


def _left_by_pruning(tuner: Any, kwargs: dict[str, Any]) -> list[Any]:
    if tuner.early_config_prune is None:
        return list(tuner.configs)
    try:
        left = tuner.early_config_prune(tuner.configs, tuner.nargs, **kwargs)
    except (RuntimeError, AssertionError):
        # A pruning that asks the GPU for its properties cannot be followed without one.
        return list(tuner.configs)
    return list(left) or list(tuner.configs)


def install(how: str) -> None:
    """Have compiled kernels launch the chosen configuration (first, each), or Triton's choice be told (tuned)."""
    from triton.runtime.autotuner import Autotuner

    if getattr(Autotuner.run, "how", "") == how:
        return
    if how == "tuned":
        tune = Autotuner.run

        def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            result = tune(tuner, *args, **kwargs)
            CHOICE.chose(tuner.base_fn.__name__, str(tuner.best_config))
            return result
    else:

        def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            return run_chosen(tuner, *args, **kwargs)

    run.how = how  # type: ignore[attr-defined]
    Autotuner.run = run
