"""Compares two ways to compute a result, timed alternately in one process: best of several runs, and errors."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_MIN_RUNS, _MAX_RUNS = 2, 100  # of each way


@dataclass(frozen=True)
class Way:
    """A way to compute a result."""

    name: str
    run: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """A measurement. Times are in ms; errors are relative to the exact result's norm, None without one."""

    what: str
    baseline: str
    baseline_ms: float
    way: str
    ms: float
    baseline_error: float | None
    error: float | None

    @property
    def ratio(self) -> float:
        """Speed-up over the baseline."""
        return self.baseline_ms / self.ms


class Pairs:
    """Measures pairs for a number of seconds each, or with two runs of each way if that takes longer."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.rows: list[Row] = []

    def add(self, what: str, baseline: Way, way: Way, error: Callable[[torch.Tensor], float] | None = None) -> None:
        """Measures a pair. error: computes the error of a result."""
        found = [w.run() for w in (baseline, way)]
        errors = [error(result) if error else None for result in found]
        best, started, runs = [float("inf")] * 2, time.perf_counter(), 0
        # Best, not median: other load on the machine can only make a run slower.
        while runs < _MIN_RUNS or (runs < _MAX_RUNS and time.perf_counter() - started < self._seconds):
            for i, w in enumerate((baseline, way)):
                best[i] = min(best[i], milliseconds(w.run))
            runs += 1
        self.rows.append(Row(what, baseline.name, best[0], way.name, best[1], errors[0], errors[1]))


def milliseconds(run: Callable[[], object]) -> float:
    """CPU time with one thread, which excludes other load; wall time with several threads."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    run()
    return (clock() - started) * 1e3
