"""How a kernel is launched when it is interpreted: on monitored memory, from any decorator, with errors that name the cause."""

from __future__ import annotations

import ast
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton
import triton.language as tl
import triton.runtime.interpreter as interp
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import InterpreterError
from triton.runtime.jit import JITFunction

from .. import compat
from .configurations import run_chosen
from .interpreter_patches import Patches
from .monitor import Monitor
from .monitor_memory import Memory
from .monitor_overflow import OverflowWatch


class Unsupported(NotImplementedError):
    """A kernel uses something that Triton's interpreter does not have; the message names it."""


_FEATURES = (
    ("inline_asm", "inline assembly (tl.inline_asm_elementwise)"),
    ("extern_elementwise", "a function of an external library"),
    ("libdevice.", "a libdevice function that numpy does not have"),
    ("@triton.jit ?", "a function of one backend, such as triton.language.extra.cuda.libdevice"),
    ("Block pointers have been removed", "block pointers (tl.make_block_ptr)"),
    ("Unsupported data type", "an atomic on a data type it does not know"),
    ("create_dot_scaled", "tl.dot_scaled"),
    ("'InterpreterBuilder' object has no attribute", "an operation it does not implement"),
)
"""Words of an interpreter's exception, and the feature a person would look for."""


def apply(patches: Patches, memory: Memory, watch: OverflowWatch) -> None:
    """Run every launch through `_launch`, whatever decorator or import order the kernel has."""
    patches.set(interp, "_interpreter", memory)
    convert = interp._implicit_cvt

    def implicit_cvt(arg: Any) -> Any:
        if not hasattr(arg, "data_ptr"):
            return convert(arg)
        out, tensor = convert(arg), arg if isinstance(arg, Tensor) else arg.base
        out.handle.data = np.array([memory.monitor.window(tensor)], np.uint64)
        return out

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            _launch(self, memory.monitor, args, kwargs)
        finally:
            watch.end()

    patches.set(interp, "_implicit_cvt", implicit_cvt)
    patches.set(interp.GridExecutor, "__call__", call)
    patches.set(interp.FunctionRewriter, "_compile_and_exec", _compile_and_exec)
    patches.set(Autotuner, "run", run_chosen)
    _poison_masked_lanes(patches, memory)
    _adopt_compiled_functions(patches)


def _poison_masked_lanes(patches: Patches, memory: Memory) -> None:
    """A lane that a load masks off without `other` is undefined on a GPU: under a monitor it is NaN, or 1 for integers."""
    load = interp.InterpreterBuilder.create_masked_load

    def create_masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
        if other is None and len(memory.stack) > 1 and not np.all(getattr(mask, "data", mask)):
            element = ptrs.get_element_ty()
            dtype = interp._get_np_dtype(element)
            fill = np.nan if element.is_floating() and dtype.itemsize > 1 else 1
            other = interp.TensorHandle(np.full(ptrs.data.shape, fill, dtype), element)
        return load(self, ptrs, mask, other, *rest, **named)

    patches.set(interp.InterpreterBuilder, "create_masked_load", create_masked_load)


# one launch


@functools.cache
def _refuse_versions_that_only_compile() -> None:
    """Raise IncompatibleVersions: a machine with a GPU may have versions whose interpreter is broken."""
    compat.check(gpu=False)


def _launch(executor: Any, monitor: Monitor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _refuse_versions_that_only_compile()
    known = set(executor.arg_names)
    kwargs = {name: value for name, value in kwargs.items() if name in known}
    kernel = executor.fn.__name__
    with _disable_current_modes(), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy's all-NaN slices
        host_args, host_kwargs = args, kwargs
        if not _on_cpu(args) or not _on_cpu(kwargs.values()):
            host_args, host_kwargs = executor._init_args_hst(args, kwargs)
        for hook in executor.pre_run_hooks:
            hook(*host_args, **host_kwargs)
        scope = interp._patch_lang(executor.fn)
        monitor.begin(kernel)
        try:
            _run_grid(executor, monitor, inspect.getcallargs(executor.fn, *host_args, **host_kwargs))
        finally:
            monitor.end()
            scope.restore()
        if host_args is not args:
            executor._restore_args_dev(args, host_args, kwargs, host_kwargs)


def _on_cpu(values: Any) -> bool:
    """Whether every tensor among the arguments lives in memory that the interpreter can use in place."""
    return all(_on_cpu(v) if isinstance(v, tuple) else _device(v) == "cpu" for v in values)


def _device(value: Any) -> str:
    if hasattr(value, "base"):  # a TensorWrapper or a TensorDescriptor
        value = value.base
    return value.device.type if isinstance(value, Tensor) else "cpu"


def _run_grid(executor: Any, monitor: Monitor, bound: dict[str, Any]) -> None:
    converted = {}
    for name, value in bound.items():
        monitor.launch.naming = name
        converted[name] = value if name in executor.constexprs else interp._implicit_cvt(value)
    grid = executor.grid(converted) if callable(executor.grid) else executor.grid
    if len(grid) > 3:
        raise ValueError(f"a grid must have at most 3 dimensions, got {len(grid)}")
    x, y, z = (int(n) for n in (*grid, 1, 1)[:3])
    sizes = x, y, z
    builder, fn = interp.interpreter_builder, executor.fn
    builder.set_grid_dim(*sizes)
    try:
        for index in _programs(sizes, monitor.order):
            builder.set_grid_idx(*index)
            monitor.set_program(index, sizes)
            fn(**converted)
    except Exception as error:  # a kernel may raise anything; Triton wraps it, we name the feature it lacks
        raise _explained(executor.fn.__name__, error) from error


def _programs(grid: tuple[int, int, int], order: np.random.Generator | str | None) -> Iterator[tuple[int, int, int]]:
    """Indices of the grid's programs in the interpreter's own order, reversed, or permuted."""
    numbers: Any = range(grid[0] * grid[1] * grid[2])
    if order == "reverse":
        numbers = reversed(numbers)
    elif order is not None:
        numbers = order.permutation(len(numbers)).tolist()  # type: ignore[union-attr]
    for n in numbers:
        rest, z = divmod(n, grid[2])
        x, y = divmod(rest, grid[1])
        yield x, y, z


def _explained(kernel: str, error: Exception) -> Exception:
    cause: BaseException | None = error
    while cause is not None:
        text = f"{type(cause).__name__}: {cause}"
        for word, feature in _FEATURES:
            if word in text:
                return Unsupported(
                    f"kernel {kernel} uses {feature}; Triton {triton.__version__}'s interpreter does not support it, "
                    f"so it can only run on a GPU ({text})"
                )
        cause = cause.__cause__
    return error if isinstance(error, InterpreterError) else InterpreterError(f"in kernel {kernel}: {error!r}")


# decorators


def _adopt_compiled_functions(patches: Patches) -> None:
    """Interpret kernels that were decorated before TRITON_INTERPRET was set, Triton's own standard library among them."""
    interpreted: dict[Any, Any] = {}

    def twin(function: Any) -> Any:
        if function.fn not in interpreted:
            interpreted[function.fn] = interp.InterpretedFunction(function.fn)
            interpreted[function.fn].pre_run_hooks = getattr(function, "pre_run_hooks", [])
        return interpreted[function.fn]

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return twin(self).run(*args, grid=grid, warmup=warmup, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return twin(self)(*args, **kwargs)

    patches.set(JITFunction, "run", run)
    patches.set(JITFunction, "__call__", call)
    for name, member in list(vars(tl.tensor).items()):
        if isinstance(member, JITFunction):  # x.sum() looks it up on the class: it must bind x
            patches.set(tl.tensor, name, _bound(member))


def _bound(function: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def _compile_and_exec(self: Any, tree: ast.Module) -> Any:
    """The rewritten kernel; unlike Triton's own, one defined inside a function keeps the variables of that function."""
    names = self.fn.__code__.co_freevars
    for name, value in vars(interp).items():
        self.fn.__globals__.setdefault(name, value)
    if names:
        tree = _inside_a_factory(tree, names, self.fn.__name__)
    namespace = dict(self.kwargs)
    exec(compile(tree, filename=self.filename, mode="exec"), self.fn.__globals__, namespace)  # noqa: S102 (the kernel itself)
    if not names:
        return namespace[self.fn.__name__]
    made = namespace["_factory"](*names)
    cells = dict(zip(names, self.fn.__closure__, strict=True))
    closure = tuple(cells[name] for name in made.__code__.co_freevars)
    return types.FunctionType(made.__code__, self.fn.__globals__, made.__name__, self.fn.__defaults__, closure)


def _inside_a_factory(tree: ast.Module, names: tuple[str, ...], kernel: str) -> ast.Module:
    factory = ast.parse(f"def _factory({', '.join(names)}):\n    return {kernel}")
    factory.body[0].body[:0] = tree.body  # type: ignore[attr-defined]
    return factory
