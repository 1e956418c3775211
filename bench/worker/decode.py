"""Time of a decoding step over reused chunks, against a single segment of as many tokens, which is the floor.

Measures whole steps of the model over a pool of random KV, without a service. All requests share the chunks. In rows
with `recomputed`, 15% of each chunk's keys are hidden, and each request has these tokens in a separate segment, as
recipes lay them out: `keys_read` counts the keys of a step, as a multiple of the shared ones. On a GPU, `graph_ms` is
the step as a CUDA graph, with the model's head, and `busy_ms` what the GPU computes in it.
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from fusionkv.bench import command
from fusionkv.bench.kernels.clock import Clock, busy_ms
from fusionkv.bench.worker.bench import add_model, load, show
from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.compute.batch import Batch
from fusionkv.fusion_worker.compute.model_runner import forward, install
from fusionkv.fusion_worker.compute.step_graphs import StepGraphs
from fusionkv.fusion_worker.evaluate.command import run as run_command
from fusionkv.fusion_worker.pool.kv_pool import KVPool
from fusionkv.kernels.segments import KVSegment, QuerySpan, Spans

CHUNKS, REQUESTS, RATIO = (1, 8, 20), (1, 8), 0.15


def _segments(request: int, chunks: int, tokens: int, ratio: float) -> tuple[KVSegment, ...]:
    """Segments of a request: shared chunks that were rotated for other positions, and its own tokens after them."""
    each, own = tokens // chunks, tokens + request * (tokens + 1)
    if chunks == 1 and not ratio:
        return KVSegment(0, tokens, 0), KVSegment(own, 1, tokens)
    recomputed = torch.rand(chunks * each, generator=torch.Generator().manual_seed(request)) < ratio
    positions = recomputed.nonzero()[:, 0]
    stale = [
        KVSegment(at, each, at, shift=at + 1, hidden=recomputed[at : at + each] if ratio else None)
        for at in range(0, chunks * each, each)
    ]
    if not ratio:
        return *stale, KVSegment(own, 1, tokens)
    return *stale, KVSegment(
        own, len(positions) + 1, 0, positions=torch.cat([positions, positions.new_tensor([tokens])])
    )


def _batch(model: models.Model, pool: torch.Tensor, chunks: int, requests: int, tokens: int, ratio: float) -> Batch:
    """A step that decodes a token of each request."""
    position, rows = torch.tensor([tokens]), range(requests)
    seen = [_segments(row, chunks, tokens // chunks * chunks, ratio) for row in rows]
    spans = Spans([QuerySpan(row, row + 1, position, segments) for row, segments in zip(rows, seen, strict=True)])
    slots = torch.tensor([segments[-1].stop - 1 for segments in seen])
    ids = torch.ones(requests, dtype=torch.int64)
    return Batch(ids, position.expand(requests), slots, spans, pool, model.rotations, used=[1] * requests)


def _seconds(compute: Callable[[], object], clock: Clock) -> float:
    clock.synchronize()
    started = time.perf_counter()
    compute()
    clock.synchronize()
    return time.perf_counter() - started


def measure(model: models.Model, tokens: int, repeats: int) -> list[dict[str, object]]:
    """Measures each number of chunks and requests, with and without recomputed tokens."""
    install(model)
    shape = model.kv
    slots = tokens + max(REQUESTS) * (tokens + 1)
    pool = KVPool.of(shape, slots * shape.token_bytes, 1, model.device)
    pool.kv.normal_()
    graphs, clock = StepGraphs(model, pool), Clock(model.device)
    rows: list[dict[str, object]] = []
    for requests in REQUESTS:
        cases = [(chunks, ratio) for chunks in CHUNKS for ratio in (0.0, RATIO) if chunks > 1 or not ratio]
        seconds: dict[tuple[int, float], list[float]] = {case: [] for case in cases}
        graph_seconds: dict[tuple[int, float], list[float]] = {case: [] for case in cases}
        # Cases alternate, because other load on the machine varies over time.
        for _ in range(repeats):
            for chunks, ratio in cases:
                batch = _batch(model, pool.kv, chunks, requests, tokens, ratio)
                seconds[chunks, ratio].append(_seconds(partial(forward, model, batch), clock))
                if graphs.works:
                    graph_seconds[chunks, ratio].append(_seconds(partial(graphs.compute, batch), clock))
        floor = statistics.median(seconds[1, 0.0])
        for (chunks, ratio), taken in seconds.items():
            found = statistics.median(taken)
            rows.append(
                {
                    "requests": requests,
                    "chunks": chunks,
                    "recomputed": ratio,
                    "tokens": tokens,
                    "keys_read": round(1 + ratio * requests, 2),
                    "step_ms": round(1e3 * found, 2),
                    "one_piece_ms": round(1e3 * floor, 2),
                    "ratio": round(found / floor, 3),
                }
            )
            if graphs.works:
                batch = _batch(model, pool.kv, chunks, requests, tokens, ratio)
                rows[-1]["busy_ms"] = round(busy_ms(partial(graphs.compute, batch)), 2)
                rows[-1]["graph_ms"] = round(1e3 * statistics.median(graph_seconds[chunks, ratio]), 2)
    return rows


def main() -> None:
    parser = command.parser_of("worker.decode", __doc__)
    add_model(parser)
    parser.add_argument("--tokens", type=int, default=2560, help="tokens of context (%(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="runs, of which the median is reported (%(default)s)")
    args = parser.parse_args()
    rows = measure(load(args.model, args.device), args.tokens, args.repeats)
    show(f"A decoding step, {args.model}", rows, args.json, args.device)


if __name__ == "__main__":
    sys.exit(run_command("decode", main))
