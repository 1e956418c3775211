"""Decoding: one row per request over tens of chunks, which is limited by the reading of keys and values."""

import itertools

from fusionkv.bench.gpu import workload
from fusionkv.bench.gpu.report import Row
from fusionkv.bench.gpu.setup import Setup, share
from fusionkv.bench.gpu.workload import DECODE_HIDDEN

_COLUMNS = ("shape", "batch", "context", "ms", "GB/s", "share of copy")


def measure(setup: Setup) -> None:
    """Measures batches of requests with chunks of their own. Bytes are those of visible keys and values."""
    sizes, lines = setup.sizes, []
    for context, batch, shape in itertools.product(sizes.decode_contexts, sizes.batches, sizes.shapes):
        if not setup.allows(f"decode {shape.name}, batch {batch}, {context} tokens", 5):
            continue
        problem = workload.decode(shape, context, batch, setup.device, setup.dtype)
        ms = setup.clock.ms(problem.attend)
        seen = 2 * problem.keys * shape.kv_heads * shape.dim * setup.dtype.itemsize
        gbs = seen / (ms * 1e-3) / 1e9
        known = share(gbs, setup.copy_gbs)
        setup.report.add(Row("decode", shape.name, ms, context, DECODE_HIDDEN, batch, rate=gbs, share=known))
        lines.append((shape.name, batch, context, ms, gbs, known))
        del problem
    setup.report.table("Decoding, one layer", _COLUMNS, lines)
