"""One layer's sparse prefill against flash attention over the whole prompt."""

import itertools
from dataclasses import replace

import torch

from fusionkv.bench.gpu import workload
from fusionkv.bench.gpu.report import Row
from fusionkv.bench.gpu.setup import Setup, share
from fusionkv.bench.gpu.workload import QUESTION, SYSTEM, Problem, Shape
from fusionkv.bench.kernels.baselines import FlashCausal

_COLUMNS = ("shape", "context", "r", "rows", "ms", "TFLOP/s", "share", "flash", "ratio", "ideal")
_RUNS = 15  # approximate runs of each operation
_SLOW = 0.15  # share of the matrix rate that is assumed to estimate a row's time


def measure(setup: Setup) -> None:
    """Measures from the shortest rows to the longest, so that a short budget skips the longest."""
    if setup.device.type != "cuda":
        setup.report.notice("the flash backend over the whole prompt: no CUDA device")
    flash: dict[tuple[str, int], float | None] = {}
    lines = list[tuple[object, ...]]()
    sizes = setup.sizes
    for context, ratio, shape in itertools.product(sizes.contexts, sizes.ratios, sizes.shapes):
        what = f"prefill {shape.name}, {context} tokens, r = {ratio}"
        if setup.allows(what, _guess(setup, shape, context, ratio)):
            problem = workload.prefill(shape, context, sizes.chunk, ratio, setup.device, setup.dtype)
            try:
                row = _row(setup, shape, context, ratio, problem, flash)
                setup.report.add(row)
                head = (shape.name, context, ratio, len(problem.q))
                lines.append((*head, row.ms, row.rate, row.share, row.baseline_ms, row.ratio, row.ideal))
            except torch.OutOfMemoryError:
                setup.report.fail(f"{what}: out of memory")
            del problem  # before the next one is made
    setup.report.table("Prefill of one layer, ms (flash: causal over all tokens)", _COLUMNS, lines)


def _row(
    setup: Setup,
    shape: Shape,
    context: int,
    ratio: float,
    problem: Problem,
    flash: dict[tuple[str, int], float | None],
) -> Row:
    """Times a problem, and its baseline unless `flash` has it already."""
    ms = setup.clock.ms(problem.attend)
    if (shape.name, context) not in flash:
        flash[shape.name, context] = setup.clock.ms(FlashCausal(problem)) if setup.device.type == "cuda" else None
    baseline = flash[shape.name, context]
    rate = shape.operations(problem.pairs) / (ms * 1e-3) / 1e12
    row = Row("prefill", shape.name, ms, context, ratio, 1, rate=rate, share=share(rate, setup.matrix_tflops))
    if baseline is None:
        return row
    keys = SYSTEM + context + QUESTION
    ideal = keys * (keys + 1) // 2 / problem.pairs
    return replace(row, baseline="flash-causal", baseline_ms=baseline, ideal=ideal)


def _guess(setup: Setup, shape: Shape, context: int, ratio: float) -> float:
    """A conservative estimate of the seconds of a row with all its baselines."""
    keys = SYSTEM + context + QUESTION
    pairs = keys * keys * (1 + 3 * ratio)
    return 3 + _RUNS * shape.operations(round(pairs)) / (_SLOW * 1e12 * (setup.matrix_tflops or 1.0))
