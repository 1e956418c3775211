"""Seconds that a test takes by itself, on a machine that others use as well, and how many it may take."""

import os
import re
from collections.abc import Set
from pathlib import Path

# As they are: tests replace those of the module `time` by clocks of their own.
from time import monotonic, process_time

# Of a test without one of these marks; the factor is for slow machines.
SLOWER = float(os.environ.get("FUSIONKV_TEST_SLOWER", "1"))
LIMIT_SECONDS = 5 * SLOWER
_LONG = {"slow", "system", "compile", "weights"}
_PRESSURE = Path("/proc/pressure/cpu")


class Stopwatch:
    """Runs from its making on."""

    def __init__(self) -> None:
        self._wall, self._cpu, self._stalled = monotonic(), _cpu(), _stalled()

    def seconds(self) -> float:
        """CPU seconds of this process and of the children that ended, or time that passed while no process of the
        machine waited for a core, whichever is more: other load makes neither of them much longer.

        Where processes waited for most of the time, what was left says nothing, and Linux alone says how long they
        waited: otherwise only CPU seconds count.
        """
        cpu, wall, stalled = _cpu() - self._cpu, monotonic() - self._wall, _stalled()
        if self._stalled is None or stalled is None:
            return cpu
        return quiet_seconds(cpu, wall, stalled - self._stalled)


def quiet_seconds(cpu: float, wall: float, stalled: float) -> float:
    """Seconds that a test takes by itself, of which processes of the machine waited for a core in `stalled`."""
    return max(cpu, wall - stalled) if stalled < wall / 2 else cpu


def too_long(seconds: float, marks: Set[str]) -> str:
    """What is wrong with a test that took so long; empty: nothing."""
    if seconds <= LIMIT_SECONDS or marks & _LONG:
        return ""
    return f"{seconds:.1f} s; a test that has no mark of {', '.join(sorted(_LONG))} may take {LIMIT_SECONDS:g}"


def _cpu() -> float:
    children = os.times()
    return process_time() + children.children_user + children.children_system


def _stalled() -> float | None:
    """Seconds since the start of the machine in which some process waited for a core; None: it does not say so."""
    try:
        match = re.search(r"^some .*total=(\d+)", _PRESSURE.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) / 1e6 if match else None
