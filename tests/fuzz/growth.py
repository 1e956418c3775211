"""How time and memory grow with the size of an input: of one four times as long, at most 2.5 times 2.5 as much.

    check(lambda n: b"<a" * n, in_thread(parse, errors=InvalidArgument), 20_000)

What takes less than a floor is not compared, so that a busy machine fails no test. What a limit cuts (a deadline, a
bound on memory) may take as long as the limit says.
"""

import contextlib
import ctypes
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
MOST = 2.5**2
FLOOR_SECONDS = 0.1
FLOOR_BYTES = 24 << 20
_AGAIN = 9
_HIGH, _NOW = (re.compile(rf"^{name}:\s+(\d+) kB", re.M) for name in ("VmHWM", "VmRSS"))


@dataclass(frozen=True)
class Cost:
    """CPU seconds, and bytes at the peak above those before; `cut`: a limit ended it."""

    seconds: float
    bytes: int
    cut: bool = False


Measure = Callable[[T], Cost]


def in_thread(
    call: Callable[[T], object],
    *,
    errors: type[Exception] | tuple[type[Exception], ...] = (),
    limits: type[Exception] | tuple[type[Exception], ...] = (),
) -> Measure[T]:
    """Measures `call` in this thread, with this process's memory.

    errors: an answer as any other. limits: what cut it. Whatever else it raises fails the test.
    """

    def measure(given: T) -> Cost:
        before, cut = trim(), False
        began = time.thread_time()
        try:
            with contextlib.suppress(errors):
                call(given)
        except limits:
            cut = True
        return Cost(time.thread_time() - began, max(0, peak() - before), cut)

    return measure


def trim(pid: int | str = "self") -> int:
    """Forgets a process's peak; returns the bytes that it has in memory now.

    Of this process, what was freed goes back to the system first, or the next peak would not show it.
    """
    if pid == "self":
        ctypes.CDLL(None).malloc_trim(0)
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _kilobytes(pid, _NOW) << 10


def peak(pid: int | str = "self") -> int:
    """The most bytes that a process had in memory since `trim`."""
    return _kilobytes(pid, _HIGH) << 10


def _kilobytes(pid: int | str, pattern: re.Pattern[str]) -> int:
    match = pattern.search(Path(f"/proc/{pid}/status").read_text())
    return int(match[1])


def check(make: Callable[[int], T], measure: Measure[T], n: int, *, deadline: float = 60.0) -> None:
    """Measures `make(n)` and `make(4 * n)`.

    deadline: CPU seconds after which a limit must have ended either of them.

    Raises:
        AssertionError: a cost grew faster than MOST, or a limit came too late.
    """
    small, large = make(n), make(4 * n)
    before, cost = measure(small), measure(large)
    for _ in range(_AGAIN):
        if _fits(cost, before):
            break
        # A second has fewer cycles while others use the machine: both anew, one right after the other.
        before, cost = _less(before, measure(small)), _less(cost, measure(large))
    assert max(before.seconds, cost.seconds) <= deadline, f"longer than {deadline:g} s: {before}, {cost}"
    assert _fits(cost, before), f"grows too fast: {before}, and {cost} for four times as much"


def _fits(cost: Cost, before: Cost) -> bool:
    time_fits = cost.seconds <= MOST * max(before.seconds, FLOOR_SECONDS)
    return cost.cut or (time_fits and cost.bytes <= MOST * max(before.bytes, FLOOR_BYTES))


def _less(one: Cost, other: Cost) -> Cost:
    return Cost(min(one.seconds, other.seconds), min(one.bytes, other.bytes), one.cut or other.cut)
