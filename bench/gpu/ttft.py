"""Time to first token of a whole model: full attention, and chunks loaded from pinned host memory.

Weights are random, which does not affect speed. Times are wall time from the request to the first token's id,
including all tables; the prompt is tokenised, and the system prompt is in the pool.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from fusionkv.bench.gpu.report import Row
from fusionkv.bench.gpu.setup import Setup, share

if TYPE_CHECKING:
    from fusionkv.bench.gpu.model import Served

RATIOS = (0.15, 0.0)
_SECONDS = 60
_RUNS = 3
# Maximum relative error of the last row's hidden state against SDPA. In bfloat16 the errors of all layers add up; a
# wrong key gives about 1.
_AGREEMENT = {"bfloat16": 0.1, "float32": 1e-3}
_COLUMNS = ("r", "TTFT", "load", "select", "prefill", "to SDPA full", "to own full", "ideal", "TFLOP/s", "share")


@dataclass(frozen=True)
class Timing:
    """Milliseconds to launch all copies (load), to score and choose tokens (select), and to prefill."""

    load: float
    select: float
    prefill: float

    @property
    def total(self) -> float:
        return self.load + self.select + self.prefill


def measure(setup: Setup) -> None:
    """Measures each ratio. Skipped if the fusion worker can't be imported."""
    try:
        from fusionkv.bench.gpu import model
    except ImportError as missing:
        setup.report.notice(f"time to first token: the fusion worker can't be imported here ({missing})")
        return
    if not setup.allows("time to first token", _SECONDS):
        return
    served = model.Served(setup)
    flash = _median(partial(_timed, setup, served.sdpa)).total
    served.install()
    error, limit = served.disagreement(), _AGREEMENT[str(setup.dtype)[6:]]
    if not error <= limit:
        setup.report.fail(f"full attention of {served.name} differs from SDPA by {error:.2e} of the norm")
    timings = {1.0: _median(partial(_timed, setup, served.full))}
    timings |= {ratio: _median(partial(_reuse, setup, served, ratio)) for ratio in RATIOS}
    lines = [_row(setup, served, ratio, timing, flash, timings[1.0].total) for ratio, timing in timings.items()]
    title = f"Time to first token, {served.name}, {served.context} tokens of chunks, ms (SDPA full: {flash:.4g})"
    setup.report.table(title, _COLUMNS, lines)
    _load_rate(setup, served)


def _row(setup: Setup, served: "Served", ratio: float, timing: Timing, flash: float, full: float) -> list[object]:
    """Adds a row for each baseline; returns a line of the table. flash, full: milliseconds of full attention."""
    operations, ms = served.operations(ratio), timing.total
    tflops, ideal = operations / (ms * 1e-3) / 1e12, served.operations(1.0) / operations
    known = share(tflops, setup.matrix_tflops)
    for name, baseline in (("sdpa full", flash), ("own full", full)):
        if ratio < 1 or name == "sdpa full":
            row = Row("e2e", served.name, ms, served.context, ratio, 1, name, baseline, ideal, tflops, known)
            setup.report.add(row)
    return [ratio, ms, timing.load, timing.select, timing.prefill, flash / ms, full / ms, ideal, tflops, known]


def _timed(setup: Setup, run: Callable[[], object]) -> Timing:
    """Times a run without loading and selection."""
    setup.clock.synchronize()
    started = time.perf_counter()
    run()  # ends on the host, so that no kernels are still running
    return Timing(0.0, 0.0, (time.perf_counter() - started) * 1e3)


def _reuse(setup: Setup, served: "Served", ratio: float) -> Timing:
    """Times a run over cached chunks. Layers wait only for their own keys, so the first forward hides the copies."""
    setup.clock.synchronize()
    marks = [time.perf_counter()]
    served.load()
    marks.append(time.perf_counter())
    chosen = served.select(ratio)
    marks.append(time.perf_counter())
    served.answer(chosen)
    marks.append(time.perf_counter())
    return Timing(*((after - before) * 1e3 for before, after in itertools.pairwise(marks)))


def _median(run: Callable[[], Timing]) -> Timing:
    """The run with the median time, after a warm-up that compiles."""
    run()
    timings = sorted((run() for _ in range(_RUNS)), key=lambda timing: timing.total)
    return timings[_RUNS // 2]


def _load_rate(setup: Setup, served: "Served") -> None:
    """Measures only the copies, from the launch to the last byte."""

    def run() -> None:
        served.load()
        setup.clock.synchronize()

    ms = _median(partial(_timed, setup, run)).total
    gbs = served.cached_bytes / (ms * 1e-3) / 1e9
    known = share(gbs, setup.host_gbs)
    setup.report.add(Row("rate", f"{served.name} KV load", ms, served.context, rate=gbs, share=known))
    title = f"KV of {served.context} tokens from host memory to the pool, nothing else running"
    setup.report.table(title, ("GB", "ms", "GB/s", "share"), [(served.cached_bytes / 1e9, ms, gbs, known)])
