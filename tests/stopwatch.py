"""CPU seconds that a test takes, and how many it may take."""

import os
from collections.abc import Set

# As it is: tests replace that of the module `time` by clocks of their own.
from time import process_time

# Of a test without one of these marks; the factor is for slow machines.
SLOWER = float(os.environ.get("FUSIONKV_TEST_SLOWER", "1"))
LIMIT_SECONDS = 5 * SLOWER
_LONG = {"slow", "system", "compile", "weights"}


class Stopwatch:
    """Runs from its making on."""

    def __init__(self) -> None:
        self._began = _cpu()

    def seconds(self) -> float:
        """CPU seconds of this process and of its children that ended: other load makes them hardly more."""
        return _cpu() - self._began


def too_long(seconds: float, marks: Set[str]) -> str:
    """What is wrong with a test that took so long; empty: nothing."""
    if seconds <= LIMIT_SECONDS or marks & _LONG:
        return ""
    return f"{seconds:.1f} s; a test that has no mark of {', '.join(sorted(_LONG))} may take {LIMIT_SECONDS:g}"


def _cpu() -> float:
    children = os.times()
    return process_time() + children.children_user + children.children_system
