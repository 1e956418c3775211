"""One layer's sparse prefill against flash attention over the whole prompt, and against SDPA with a mask."""

import itertools

import torch

from fusionkv.bench.gpu import workload
from fusionkv.bench.gpu.report import Row
from fusionkv.bench.gpu.setup import Setup, share
from fusionkv.bench.gpu.workload import QUESTION, SYSTEM, Problem, Shape
from fusionkv.bench.kernels.baselines import AGREEMENT, Dense, FlashCausal, Masked, disagreement

_COLUMNS = ("shape", "context", "r", "rows", "ms", "TFLOP/s", "share", "flash", "ratio", "ideal", "mask", "ratio")
_RUNS = 15  # approximate runs of each operation
_SLOW = 0.15  # share of the matrix rate that is assumed to estimate a row's time


def measure(setup: Setup) -> None:
    """Measures from the shortest rows to the longest, so that a short budget skips the longest."""
    if setup.device.type != "cuda":
        setup.report.notice("the flash backend over the whole prompt: no CUDA device")
    flash: dict[tuple[str, int], float | None] = {}
    lines = []
    sizes = setup.sizes
    for context, ratio, shape in itertools.product(sizes.contexts, sizes.ratios, sizes.shapes):
        what = f"prefill {shape.name}, {context} tokens, r = {ratio}"
        if setup.allows(what, _guess(setup, shape, context, ratio)):
            problem = workload.prefill(shape, context, sizes.chunk, ratio, setup.device, setup.dtype)
            try:
                lines.append(_rows(setup, shape, context, ratio, problem, flash, what))
            except torch.OutOfMemoryError:
                setup.report.fail(f"{what}: out of memory")
            del problem  # before the next one is made
    setup.report.table("Prefill of one layer, ms (flash: causal over all tokens)", _COLUMNS, lines)


def _rows(
    setup: Setup,
    shape: Shape,
    context: int,
    ratio: float,
    problem: Problem,
    flash: dict[tuple[str, int], float | None],
    what: str,
) -> list[object]:
    """Times a problem and its baselines; adds a row for each baseline, and returns a line of the table."""
    dense = Dense(problem)
    ms = setup.clock.ms(problem.attend)
    if (shape.name, context) not in flash:
        flash[shape.name, context] = setup.clock.ms(FlashCausal(dense)) if setup.device.type == "cuda" else None
    tflops = shape.operations(problem.pairs) / (ms * 1e-3) / 1e12
    known = share(tflops, setup.matrix_tflops)
    causal = dense.keys * (dense.keys + 1) // 2
    against = {
        "flash-causal": (flash[shape.name, context], causal / problem.pairs),
        "sdpa-mask": (_masked(setup, problem, dense, what), None),
    }
    made = [
        Row("prefill", shape.name, ms, context, ratio, 1, name, baseline, ideal, tflops, known)
        for name, (baseline, ideal) in against.items()
        if baseline is not None
    ]
    for row in made or [Row("prefill", shape.name, ms, context, ratio, 1, rate=tflops, share=known)]:
        setup.report.add(row)
    line: list[object] = [shape.name, context, ratio, len(problem.q), ms, tflops, known]
    (flash_ms, ideal), (mask_ms, _) = against.values()
    line += [flash_ms, flash_ms and flash_ms / ms, ideal, mask_ms, mask_ms and mask_ms / ms]
    return line


def _masked(setup: Setup, problem: Problem, dense: Dense, what: str) -> float | None:
    """Milliseconds of SDPA with a mask; None if the mask is too large. Checks that the results agree."""
    if reason := Masked.refusal(dense):
        setup.report.notice(f"SDPA with a mask, {what}: {reason}")
        return None
    try:
        masked = Masked(dense)
        error = disagreement(problem.attend(), masked())
        ms = setup.clock.ms(masked)
    except torch.OutOfMemoryError:
        setup.report.notice(f"SDPA with a mask, {what}: out of memory")
        return None
    if not error <= AGREEMENT[setup.dtype]:
        setup.report.fail(f"{what}: differs from SDPA with a mask by {error:.2e} of the norm")
    return ms


def _guess(setup: Setup, shape: Shape, context: int, ratio: float) -> float:
    """A conservative estimate of the seconds of a row with all its baselines."""
    keys = SYSTEM + context + QUESTION
    pairs = keys * keys * (1 + 3 * ratio)
    return 3 + _RUNS * shape.operations(round(pairs)) / (_SLOW * 1e12 * (setup.matrix_tflops or 1.0))
