"""Two ways to the same result, timed in turn in one process: the best of several runs of each, and their errors."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_LEAST, _MOST = 2, 100  # runs of each


@dataclass(frozen=True)
class Way:
    """How a result is come by."""

    name: str
    run: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """What was measured. Times in ms; errors as a share of the result's norm, where there is an exact one."""

    what: str
    baseline: str
    baseline_ms: float
    way: str
    ms: float
    baseline_error: float | None
    error: float | None

    @property
    def ratio(self) -> float:
        """How many times faster than the baseline."""
        return self.baseline_ms / self.ms


class Pairs:
    """Measures pairs for so many seconds each, or two runs of each where that takes longer."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.rows: list[Row] = []

    def add(self, what: str, baseline: Way, way: Way, error: Callable[[torch.Tensor], float] | None = None) -> None:
        """error: of a result, against an exact one."""
        found = [w.run() for w in (baseline, way)]
        errors = [error(result) if error else None for result in found]
        best, started, runs = [float("inf")] * 2, time.perf_counter(), 0
        # Best, not median: whatever else runs on the machine can only make a run slower.
        while runs < _LEAST or (runs < _MOST and time.perf_counter() - started < self._seconds):
            for i, w in enumerate((baseline, way)):
                best[i] = min(best[i], milliseconds(w.run))
            runs += 1
        self.rows.append(Row(what, baseline.name, best[0], way.name, best[1], errors[0], errors[1]))


def milliseconds(run: Callable[[], object]) -> float:
    """Processor time with one thread, where others on the machine don't count; with several, what the clock says."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    run()
    return (clock() - started) * 1e3
