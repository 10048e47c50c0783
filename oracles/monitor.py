"""Every access of an interpreted kernel checked: bounds, gaps, initialisation, races, counts.

Programs run one after another, so a race is not seen happening: it is derived from which program touched which element in one launch.
Two programs that touch the same element, one of them writing without an atomic, race whatever the order was.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import numpy as np
import torch
from torch import Tensor

from .monitor_state import (
    HALF_WINDOW,
    NOBODY,
    WINDOW_SHIFT,
    Array,
    Shadow,
    Traffic,
    Violation,
    Window,
    coordinates,
    enter,
    flat,
    key_of,
    merged,
    span_and_shown,
)

_OURS = str(Path(__file__).parent)


@dataclass
class Launch:
    """The kernel that is running."""

    kernel: str = "?"
    naming: str = "?"  # the argument that is being converted
    windows: list[Window] = field(default_factory=list)
    grid: tuple[int, ...] = (1, 1, 1)
    index: tuple[int, ...] = (0, 0, 0)
    program: int = 0


@dataclass
class Access:
    """The lanes of one access that may be carried out: elements of the storage, in the order of `active` (None: every lane)."""

    window: Window
    elements: Array
    active: Array | None


@dataclass
class Monitor:
    """What a stretch of interpreted launches did to memory.

    `order` permutes the programs: None, "reverse" or a numpy Generator. `race_ok` names arguments whose races are meant.
    """

    races: bool = True
    uninitialised: bool = True
    order: np.random.Generator | str | None = None
    race_ok: frozenset[str] = frozenset()
    exact: bool = False
    remembers: bool = True  # False: every launch forgets the storages of the one before
    found: dict[tuple[str, str, str], Violation] = field(default_factory=dict)
    traffic: dict[tuple[str, str, str], list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    shadows: dict[int, Shadow] = field(default_factory=dict)
    locking: set[str] = field(default_factory=set)  # kernels that use a lock or an integer atomic
    launch: Launch = field(default_factory=Launch)
    overflowed: Array | None = None  # the lanes of the coming access whose address was made from an overflowed integer

    # what the caller reads

    @property
    def violations(self) -> list[Violation]:
        """One per (kind, kernel, argument), sorted."""
        return [self.found[key] for key in sorted(self.found)]

    def by_arg(self) -> dict[tuple[str, str, str], Traffic]:
        """Bytes and elements moved per (kernel, argument, "load" | "store" | "atomic")."""
        return {key: Traffic(*counts) for key, counts in sorted(self.traffic.items())}

    def unwritten(self, tensor: Tensor) -> Tensor | None:
        """Which elements of a tensor nothing ever wrote, in its shape; None when all were written."""
        shadow = self.known(tensor)
        if shadow is None or shadow.initialised is None or shadow.item != tensor.element_size():
            return None
        missing = ~flat(shadow.initialised, tensor)
        return missing if bool(missing.any()) else None

    def value(self, tensor: Tensor) -> tuple[Tensor, bool]:
        """The tensor's unrounded float64 values, and whether they are exact; outside the exact mode the tensor itself, not exact."""
        shadow = self.known(tensor)
        if shadow is None or shadow.values is None or shadow.dtype != tensor.dtype:
            return tensor.to(torch.float64), False
        return flat(shadow.values, tensor).clone(), not shadow.lost

    # storages

    def known(self, tensor: Tensor) -> Shadow | None:
        """The shadow of the tensor's storage, if there is one."""
        shadow = self.shadows.get(key_of(tensor))
        return None if shadow is None or shadow.moved else shadow

    def shadow_of(self, tensor: Tensor) -> Shadow:
        """The shadow of the tensor's storage, made when there is none."""
        shadow = self.known(tensor)
        if shadow is not None and shadow.dtype == tensor.dtype:
            return shadow
        shadow = Shadow(tensor) if shadow is None else shadow.regrouped(tensor)
        self.shadows[key_of(tensor)] = shadow
        return shadow

    def mark_empty(self, tensor: Tensor) -> None:
        """Note fresh memory that holds nothing, and poison it: NaN, or 0xA5 in every byte of an integer."""
        if not tensor.numel() or tensor.device.type != "cpu":
            return
        shadow = Shadow(tensor)
        shadow.initialised = np.zeros(shadow.memory.size, bool)
        if tensor.dtype.is_floating_point and tensor.element_size() > 1:
            shadow.memory.fill(np.nan)
        elif tensor.dtype != torch.bool:
            shadow.memory.view(np.uint8).fill(0xA5)
        shadow.poison = shadow.memory[:1].tobytes()
        self.shadows[key_of(tensor)] = shadow

    def mark_written(self, tensor: Tensor) -> None:
        """Note that a torch operation wrote the tensor."""
        shadow = self.known(tensor) if tensor.device.type == "cpu" else None
        if shadow is None or shadow.initialised is None:
            return
        if shadow.item == tensor.element_size():
            flat(shadow.initialised, tensor).fill_(True)
        else:
            shadow.initialised = None

    def mark_copied(self, source: Tensor, target: Tensor) -> None:
        """Note that torch copied one tensor into another: what nothing wrote in the one is unwritten in the other."""
        if source.device.type != "cpu" or target.device.type != "cpu":
            return
        missing = self.unwritten(source)
        if missing is not None:
            shadow = self.shadow_of(target)
            if shadow.initialised is None:
                shadow.initialised = np.ones(shadow.memory.size, bool)
            flat(shadow.initialised, target).copy_(~missing)

    # launches

    def begin(self, kernel: str) -> None:
        """A kernel is about to run."""
        self.launch = Launch(kernel)

    def end(self) -> None:
        """The launch is over."""
        self.launch = Launch()
        if not self.remembers:
            self.shadows.clear()

    def set_program(self, index: tuple[int, int, int], grid: tuple[int, int, int]) -> None:
        """Another program of the grid starts."""
        self.launch.index, self.launch.grid = index, grid
        self.launch.program = index[0] + grid[0] * (index[1] + grid[1] * index[2])

    def window(self, tensor: Tensor) -> int:
        """The virtual address that the kernel gets for a tensor; congruent to the real one modulo a page, so alignment is kept."""
        shadow = self.shadow_of(tensor)
        windows = self.launch.windows
        if all(w.shadow is not shadow for w in windows):
            shadow.begin_launch()
        item = tensor.element_size()
        base = ((len(windows) + 1) << WINDOW_SHIFT) + tensor.data_ptr() % 4096
        span, shown = span_and_shown(tuple(tensor.size()), tuple(tensor.stride()))
        offset = int(tensor.storage_offset())
        origin = np.uint64(base - offset * item)
        last = base + (span - 1) * item
        windows.append(
            Window(self.launch.naming, tensor, shadow, offset, base, span, shown, origin, item.bit_length() - 1, last)
        )
        return base

    # accesses

    def access(self, addresses: Array, mask: Array, item: int, op: str) -> Access | None:
        """Check and count one access of `item` bytes a lane (0: the argument's own); None when no lane may be carried out."""
        active, lanes = None, addresses.shape
        mask = np.asarray(mask)
        if not mask.all():
            active = np.broadcast_to(mask, addresses.shape)
            addresses = addresses[active]
        if not addresses.size:
            return None
        low, high = int(addresses.min()), int(addresses.max())
        window = self._window_of(low, high, op, addresses)
        if window is None:
            return None
        item = item or window.shadow.item
        elements = ((addresses - window.origin) >> np.uint64(window.shift)).view(np.int64)
        if self.overflowed is not None:
            marked = np.broadcast_to(self.overflowed, lanes)
            relative = elements - window.offset
            self.flag(f"overflow-{op}", window, relative, marked if active is None else marked[active])
        inside = low >= window.base and high <= window.last and item == window.shadow.item
        if not inside or int(np.bitwise_or.reduce(addresses, axis=None)) & (item - 1) or window.shown is not None:
            elements, active = self._legal(window, addresses, elements, active, item, op)
            if not elements.size:
                return None
        counts = self.traffic[self.launch.kernel, window.name, op]
        counts[0] += elements.size * item
        counts[1] += elements.size
        self._check_initialised(window, elements, op)
        if self.races:
            self._check_races(window, elements, op)
        return Access(window, elements, active)

    def _window_of(self, low: int, high: int, op: str, addresses: Array) -> Window | None:
        slot, windows = (low + HALF_WINDOW) >> WINDOW_SHIFT, self.launch.windows
        if slot == (high + HALF_WINDOW) >> WINDOW_SHIFT and 1 <= slot <= len(windows):
            return windows[slot - 1]
        self.report(f"wild-{op}", None, 0, addresses.size)
        return None

    def _legal(
        self, window: Window, addresses: Array, elements: Array, active: Array | None, item: int, op: str
    ) -> tuple[Array, Array | None]:
        """The elements that may be touched and the lanes they belong to; the others are reported and switched off."""
        relative = elements - window.offset
        misfit = (addresses.view(np.int64) - window.base) % item != 0
        if item != window.shadow.item or misfit.any():
            self.report(f"size-{op}", window, int(relative.flat[0]), addresses.size)
            return elements[:0], active
        inside = (relative >= 0) & (relative < window.span)
        self.flag(f"oob-{op}", window, relative, ~inside)
        legal = inside
        if window.shown is not None:
            legal = inside.copy()
            legal[inside] = window.shown[relative[inside]]
            self.flag(f"gap-{op}", window, relative, inside & ~legal)
        if legal.all():
            return elements, active
        if active is None:
            return elements[legal], legal
        active = active.copy()
        active[active] = legal
        return elements[legal], active

    def _check_initialised(self, window: Window, elements: Array, op: str) -> None:
        shadow = window.shadow
        if shadow.initialised is None:
            return
        if op == "store":
            shadow.initialised[elements] = True
            return
        known = shadow.initialised[elements]
        if self.uninitialised and not known.all():
            untouched = ~known & _still_poison(shadow, elements)
            self.flag(f"uninitialised-{op}", window, elements - window.offset, untouched)
        if op == "atomic":
            shadow.initialised[elements] = True

    def _check_races(self, window: Window, elements: Array, op: str) -> None:
        shadow, program = window.shadow, self.launch.program
        if op == "load" and shadow.writer is None:
            shadow.log_read(program, elements)
            return
        writer, reader, atomic = shadow.owners()
        relative = elements - window.offset
        wrote = _another(writer[elements], program)
        if op == "atomic":
            self.flag("race-atomic-and-plain", window, relative, wrote | _another(reader[elements], program))
            enter(atomic, elements, program)
            return
        self.flag(f"race-{op}-after-write", window, relative, wrote | _another(atomic[elements], program))
        if op == "load":
            enter(reader, elements, program)
        else:
            self.flag("race-store-after-read", window, relative, _another(reader[elements], program))
            writer[elements] = program

    # reports

    def flag(self, kind: str, window: Window, relative: Array, bad: Array) -> None:
        """Report the bad lanes of an access, if there are any."""
        if bad.any() and not (kind.startswith("race") and window.name in self.race_ok):
            self.report(kind, window, int(relative[bad][0]), int(np.count_nonzero(bad)))

    def report(self, kind: str, window: Window | None, element: int, lanes: int) -> None:
        """Keep a violation, merged with its likes."""
        argument = window.name if window is not None else "?"
        key = kind, self.launch.kernel, argument

        def new() -> Violation:
            file, line = _place()
            inside = window is not None and 0 <= element < window.span
            index = coordinates(window.tensor, element) if window is not None and inside else None
            span = 0 if window is None else window.span
            floating = window is not None and window.tensor.is_floating_point()
            place = file, line, self.launch.index, index
            return Violation(kind, self.launch.kernel, argument, *place, element, span, lanes, 1, floating)

        self.found[key] = merged(self.found.get(key), new, lanes)


def _another(owner: Array, program: int) -> Array:
    result: Array = (owner != NOBODY) & (owner != program)
    return result


def _still_poison(shadow: Shadow, elements: Array) -> Array:
    """Which elements still hold what `mark_empty` put there: memory that numpy or a foreign library wrote does not."""
    if shadow.poison is None:
        return np.ones(elements.shape, bool)
    raw = shadow.memory.view(f"u{shadow.item}")
    same: Array = raw[elements] == np.frombuffer(shadow.poison, raw.dtype)[0]
    return same


def _place() -> tuple[str, int]:
    """File and line of the innermost frame that belongs to the kernel: neither Triton's nor ours nor numpy's."""
    foreign = (
        _OURS,
        str(Path(sys.modules["triton"].__file__ or "").parent),
        str(Path(np.__file__).parent),
        "<__array_function__",
    )
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(foreign):
            return code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "?", 0
