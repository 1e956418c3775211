"""How time and memory grow with the size of an input: at n, 2n and 4n, each at most 2.5 times the one before, or the
next but one at most 2.5 times 2.5.

    check(lambda n: b"<a" * n, in_thread(parse, errors=InvalidArgument), 20_000)

What takes less than a floor is not compared, so that a busy machine fails no test. What a limit cuts (a deadline, a
bound on memory) may take as long as the limit says, and what comes behind it is not compared.
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
MOST = 2.5
FLOOR_SECONDS = 0.1
FLOOR_BYTES = 24 << 20
RUNS = 3
AGAIN = 9
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


def check(
    make: Callable[[int], T], measure: Measure[T], n: int, *, deadline: float = 60.0, steps: int = 2
) -> list[Cost]:
    """Measures `make(n)` and so on, each twice the one before; returns what they cost.

    deadline: CPU seconds after which a limit must have ended any of them.

    Raises:
        AssertionError: a cost grew faster than MOST, or a limit came too late.
    """
    costs: list[Cost] = []
    smaller: T | None = None
    for step in range(steps + 1):
        given = make(n << step)
        before = costs[-1] if costs else None
        cost = _least(measure, given)
        for _ in range(AGAIN):
            if cost.cut or before is None or smaller is None or _fits(cost, before):
                break
            # A second has fewer cycles while others use the machine: both anew, one right after the other.
            before, cost = _less(before, measure(smaller)), _less(cost, measure(given))
        where = f"at {n << step:,}: {cost}, before that {before}"
        assert cost.seconds <= deadline, f"longer than {deadline:g} s {where}"
        if not cost.cut and before is not None and not _fits(cost, before):
            # Or both steps together: what grows with its square has sixteen times as much behind them.
            twice = _least(measure, make(n << step + 1))
            what = "memory" if cost.seconds <= MOST * max(before.seconds, FLOOR_SECONDS) else "time"
            fits = not twice.cut and _fits(twice, before, 2)
            assert fits, f"{what} grows too fast {where}"
        costs.append(cost)
        smaller = given
        if cost.cut:
            break
    return costs


def _fits(cost: Cost, before: Cost, steps: int = 1) -> bool:
    most = MOST**steps
    time_fits = cost.seconds <= most * max(before.seconds, FLOOR_SECONDS)
    return time_fits and cost.bytes <= most * max(before.bytes, FLOOR_BYTES)


def _less(one: Cost, other: Cost) -> Cost:
    return Cost(min(one.seconds, other.seconds), min(one.bytes, other.bytes), one.cut or other.cut)


def _least(measure: Measure[T], given: T) -> Cost:
    """The least of several runs; of one that can't fail, one is enough."""
    found: Cost | None = None
    for _ in range(RUNS):
        cost = measure(given)
        if cost.cut:
            return cost
        found = _less(cost, found) if found else cost
        if found.seconds <= FLOOR_SECONDS and found.bytes <= FLOOR_BYTES:
            break
    assert found is not None
    return found
