"""Decoding: one row a request over tens of chunks, which is a matter of how fast keys and values are read."""

from fusionkv.bench import workload
from fusionkv.bench.report import Row
from fusionkv.bench.setup import Setup, share
from fusionkv.bench.workload import DECODE_HIDDEN

_COLUMNS = ("shape", "chunks", "batch", "context", "ms", "GB/s", "share of copy")


def measure(setup: Setup) -> None:
    """Bytes are those of the keys and values that the rows see: hidden ones count for nothing.

    Where requests share their chunks, a key counts once for each request, so the rate may exceed that of a copy.
    """
    sizes, lines = setup.sizes, []
    lots = [(batch, False) for batch in sizes.batches] + [(sizes.batches[-1], True)]
    for context in sizes.decode_contexts:
        for batch, shared in lots:
            for shape in sizes.shapes:
                name = f"{shape.name} shared" if shared else shape.name
                if not setup.allows(f"decode {name}, batch {batch}, {context} tokens", 5):
                    continue
                problem = workload.decode(shape, context, batch, shared, setup.device, setup.dtype)
                ms = setup.clock.ms(problem.attend)
                seen = 2 * problem.keys * shape.kv_heads * shape.dim * setup.dtype.itemsize
                gbs = seen / (ms * 1e-3) / 1e9
                known = share(gbs, setup.copy_gbs)
                setup.report.add(Row("decode", name, ms, context, DECODE_HIDDEN, batch, rate=gbs, share=known))
                lines.append((shape.name, "shared" if shared else "own", batch, context, ms, gbs, known))
                del problem
    setup.report.table("Decoding, one layer", _COLUMNS, lines)
