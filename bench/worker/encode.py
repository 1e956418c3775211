"""Tokens per second of encoding chunks ahead of time, as `ingest --precompute` does, against plain prefill.

Four chunks at a time are encoded and stored in a cache service. `computed_again` counts their tokens that the first
question computes again.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from contextlib import aclosing
from pathlib import Path

from fusionkv.bench.worker.bench import PATIENT, cache_process, show
from fusionkv.bench.worker.passages import Passages
from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.decode.sampling import SamplingParams
from fusionkv.fusion_worker.library.resolve import resolve
from fusionkv.fusion_worker.prompt import Prompt
from fusionkv.fusion_worker.recipes import modifiers
from fusionkv.fusion_worker.servicer import FusionServicer
from fusionkv.fusion_worker.summary import Summary
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.runtime.errors import ServiceError

CONCURRENCY = 4  # as the gateway's precompute_concurrency


async def _encode(servicer: FusionServicer, passages: Passages) -> float:
    """Seconds until every chunk is encoded and stored."""
    slots = asyncio.Semaphore(CONCURRENCY)

    async def one(ids: tuple[int, ...]) -> None:
        async with slots:
            system, own = pb.Tokens(ids=passages.system.ids), pb.Tokens(ids=ids)
            await servicer.Encode(pb.EncodeRequest(system=system, chunk=own, mode=pb.EncodeRequest.MODE_EXACT), None)

    started = time.perf_counter()
    await asyncio.gather(*(one(chunk.ids) for chunk in passages.chunks))
    return time.perf_counter() - started


async def _answer(servicer: FusionServicer, prompt: Prompt, recipe: str) -> Summary:
    known = modifiers.find(recipe)
    answering = servicer.answerer.answer(prompt, known, known.ratio, SamplingParams(max_tokens=1))
    async with aclosing(answering) as events:
        async for event in events:
            if isinstance(event, Summary):
                return event
    raise RuntimeError("no summary")


async def measure(model: models.Model, count: int, prompt_chunks: int) -> list[dict[str, object]]:
    """Prefills prompts of `prompt_chunks` chunks in full, then encodes `count` chunks; returns one row."""
    passages = await Passages.of(model, [], count)
    with tempfile.TemporaryDirectory() as directory:
        stored = 2 * passages.tokens * model.kv.token_bytes
        async with cache_process(Path(directory), stored) as (address, _):
            servicer = FusionServicer(WorkerConfig(cache=address, pool_bytes=stored, **PATIENT), model)
            try:
                starts = range(0, count - prompt_chunks + 1, prompt_chunks)
                prompts = [passages.prompt(range(start, start + prompt_chunks), start) for start in starts]
                await _answer(servicer, prompts[0], "full_attention")  # warms up
                plain = [await _answer(servicer, prompt, "full_attention") for prompt in prompts]
                seconds = await _encode(servicer, passages)
                again = await _answer(servicer, prompts[0], "full_reuse")
            finally:
                await servicer.close()
    rate = passages.tokens / seconds
    floor = sum(prompt.tokens for prompt in prompts) / sum(each.stages.seconds["prefill"] for each in plain)
    return [
        {
            "chunks": count,
            "tokens": passages.tokens,
            "encoded_tokens_per_s": round(rate),
            "plain_prefill_tokens_per_s": round(floor),
            "ratio": round(rate / floor, 2),
            "computed_again": again.stages.encoded_tokens,
        }
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fusionkv.bench.worker.encode", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="as for `fusionkv serve worker` (default: %(default)s)")
    parser.add_argument("--chunks", type=int, default=24, help="chunks to encode (%(default)s)")
    parser.add_argument("--prompt-chunks", type=int, default=8, help="chunks of a prefilled prompt (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the row to a file")
    args = parser.parse_args()
    try:
        model = models.load(resolve(args.model), "cpu")
        rows = asyncio.run(measure(model, args.chunks, args.prompt_chunks))
    except (ServiceError, ValueError, OSError) as error:
        print(f"encode: {error}", file=sys.stderr)
        return 1
    show(f"Encoding ahead, {args.model}", rows, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
