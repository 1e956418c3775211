"""Tokens per second of encoding chunks ahead of time, against plain prefill.

Chunks are encoded and stored in a cache service: four at a time, as `ingest --precompute` does, or on a GPU 16, as
`fusionkv encode`. `computed_again` counts their tokens that the first question computes again.
"""

import asyncio
import sys
import time

from fusionkv.bench import command
from fusionkv.bench.worker.bench import CHUNK, PATIENT, add_model, cache_service, first_token, load, show
from fusionkv.bench.worker.passages import Passages
from fusionkv.bench.worker.shapes import SHAPES
from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.encode.batch_encoder import concurrency
from fusionkv.fusion_worker.evaluate.command import run as run_command
from fusionkv.fusion_worker.prompt import Chunk
from fusionkv.fusion_worker.servicer import FusionServicer


async def _encode(servicer: FusionServicer, passages: Passages) -> float:
    """Seconds until every chunk is encoded and stored."""
    slots = asyncio.Semaphore(concurrency(servicer.pool.kv.device))

    async def one(chunk: Chunk) -> None:
        async with slots:
            await passages.encode(servicer, chunk)

    started = time.perf_counter()
    await asyncio.gather(*map(one, passages.chunks))
    return time.perf_counter() - started


async def measure(model: models.Model, count: int, prompt_chunks: int) -> list[dict[str, object]]:
    """Prefills prompts of `prompt_chunks` chunks in full, then encodes `count` chunks; returns one row."""
    random = model.name in {shape.name for shape in SHAPES.values()}
    passages = Passages.random(count, CHUNK) if random else await Passages.of(model, [], count)
    stored = 2 * passages.tokens * model.kv.token_bytes
    with cache_service(stored) as address:
        servicer = FusionServicer(WorkerConfig(cache=address, pool_bytes=stored, **PATIENT), model)
        try:
            starts = range(0, count - prompt_chunks + 1, prompt_chunks)
            prompts = [passages.prompt(range(start, start + prompt_chunks), start) for start in starts]
            await first_token(servicer, prompts[0], "full_attention", 1.0)  # warms up
            plain = [await first_token(servicer, prompt, "full_attention", 1.0) for prompt in prompts]
            seconds = await _encode(servicer, passages)
            again = await first_token(servicer, prompts[0], "full_reuse", 0.0)
        finally:
            await servicer.close()
    rate = passages.tokens / seconds
    floor = sum(prompt.tokens for prompt in prompts) / sum(each.seconds["prefill"] for each in plain)
    return [
        {
            "chunks": count,
            "tokens": passages.tokens,
            "encoded_tokens_per_s": round(rate),
            "plain_prefill_tokens_per_s": round(floor),
            "ratio": round(rate / floor, 2),
            "computed_again": again.prefill.loaded.encoded_tokens,
        }
    ]


def main() -> None:
    parser = command.parser_of("worker.encode", __doc__)
    add_model(parser)
    parser.add_argument("--chunks", type=int, default=24, help="chunks to encode (%(default)s)")
    parser.add_argument("--prompt-chunks", type=int, default=8, help="chunks of a prefilled prompt (%(default)s)")
    args = parser.parse_args()
    rows = asyncio.run(measure(load(args.model, args.device), args.chunks, args.prompt_chunks))
    show(f"Encoding ahead, {args.model}", rows, args.json, args.device)


if __name__ == "__main__":
    sys.exit(run_command("encode", main))
