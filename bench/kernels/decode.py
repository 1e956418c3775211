"""Decoding: one row per request over tens of chunks, which is limited by the reading of keys and values."""

from fusionkv.bench.gpu import workload
from fusionkv.bench.gpu.report import Row
from fusionkv.bench.gpu.setup import Setup, share
from fusionkv.bench.gpu.workload import DECODE_HIDDEN
from fusionkv.bench.kernels.baselines import AGREEMENT

_COLUMNS = ("shape", "chunks", "batch", "context", "ms", "GB/s", "share of copy", "each by itself ms", "ratio")


def measure(setup: Setup) -> None:
    """Measures batches with separate and with shared chunks. Bytes are those of visible keys and values.

    Shared keys count once for each request, so the rate may exceed that of a copy. The baseline is the same batch
    without sharing.
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
                apart = _apart(setup, problem, name) if shared else None
                baseline = "each by itself" if shared else ""
                row = Row(
                    "decode", name, ms, context, DECODE_HIDDEN, batch, baseline, apart, rate=gbs, share=known
                )  # fmt: skip
                setup.report.add(row)
                chunks = "shared" if shared else "own"
                lines.append((shape.name, chunks, batch, context, ms, gbs, known, apart, row.ratio))
                del problem
    setup.report.table("Decoding, one layer", _COLUMNS, lines)


def _apart(setup: Setup, problem: workload.Problem, name: str) -> float:
    """Milliseconds without sharing; checks that the results agree."""
    other = problem.apart()
    error = float((problem.attend() - other).float().norm() / other.float().norm())
    if not error <= AGREEMENT[setup.dtype]:
        setup.report.fail(f"decode {name}: the result with shared chunks differs by {error:.2e} of the norm")
    return setup.clock.ms(problem.apart)
