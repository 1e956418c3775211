"""Attention scores of a question over all keys: the cost per layer of choosing the tokens to recompute."""

from functools import partial

from fusionkv.bench.gpu import workload
from fusionkv.bench.gpu.report import Row
from fusionkv.bench.gpu.setup import Setup, share
from fusionkv.bench.gpu.workload import QUESTION


def measure(setup: Setup) -> None:
    """Measures scores. Bytes are those of all keys, read once, which is the minimum."""
    context, lines = setup.sizes.scores_context, []
    for shape in setup.sizes.shapes:
        if not setup.allows(f"scores {shape.name}", 5):
            continue
        problem = workload.prefill(shape, context, setup.sizes.chunk, 0.0, setup.device, setup.dtype)
        ms = setup.clock.ms(partial(problem.scores, problem.spans[0]))
        gbs = problem.keys * shape.kv_heads * shape.dim * setup.dtype.itemsize / (ms * 1e-3) / 1e9
        known = share(gbs, setup.copy_gbs)
        setup.report.add(Row("scores", shape.name, ms, context, 0.0, 1, rate=gbs, share=known))
        lines.append((shape.name, context, ms, gbs, known))
    columns = ("shape", "context", "ms", "GB/s", "share of copy")
    setup.report.table(f"Attention scores of {QUESTION} rows, one layer", columns, lines)
