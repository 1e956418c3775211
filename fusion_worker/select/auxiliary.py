"""Scores context tokens with a small auxiliary model on the CPU, while the main model's KV loads (CacheClip)."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from fusionkv.fusion_worker.compute.engine import Engine
from fusionkv.fusion_worker.compute.jobs import AttentionScores, ForwardJob
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.decode.text import Characters
from fusionkv.fusion_worker.load.loader import Loader
from fusionkv.fusion_worker.meters import Stopwatch
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.pool.kv_pool import KVPool
from fusionkv.fusion_worker.prompt import Chunk, Prompt
from fusionkv.kvcache_service.client import CacheClient
from fusionkv.protos.runtime import cancellation

# Characters `[start, stop)` of a text.
CharacterSpan = tuple[int, int]


class _Retokenised(NamedTuple):
    """A text in the auxiliary model's tokens. spans, own: characters of the main model's tokens, and of these."""

    ids: tuple[int, ...]
    spans: list[CharacterSpan]
    own: list[CharacterSpan]


class Auxiliary:
    """The auxiliary model, with its own pool, engine and namespace in the cache service.

    Each chunk is scored separately: the question's rows attend to the chunk as encoded after the system prompt only,
    so a chunk's KV can be reused in any prompt.
    """

    def __init__(self, config: WorkerConfig, primary: Model, model: Model, cache: CacheClient | None) -> None:
        self._primary = primary
        self._model = model
        size = config.auxiliary_pool_bytes
        self._pool = KVPool.of(model.kv, size, config.page_tokens, model.device, "auxiliary_pool_bytes")
        self._engine = Engine(model, self._pool, config)
        self._loader = Loader(config, model, self._pool, self._engine, cache)

    async def scores(self, prompt: Prompt) -> torch.Tensor:
        """float32 [question_start]: last-layer attention of the question into each context token.

        It is summed over rows and heads; 0 for the system prompt.

        Raises:
            CacheFault: the cache service failed.
            ResourceExhausted: a chunk and the question don't fit the auxiliary model's pool.
        """
        # In threads, as below: with 32,000 tokens of SmolLM2's tokenizer, it takes 0.3 s in all.
        system = (await asyncio.to_thread(self._retokenise, prompt.system.ids)).ids
        question = (await asyncio.to_thread(self._retokenise, prompt.question)).ids
        chunks = (self._chunk(system, chunk, question, prompt.tenant) for chunk in prompt.chunks)
        scores = await cancellation.all_of(chunks)
        return torch.cat([torch.zeros(len(prompt.system)), *scores])

    async def wait_idle(self) -> None:
        await self._loader.wait_idle()

    async def close(self) -> None:
        await self._loader.close()
        self._engine.close()

    async def _chunk(
        self, system: tuple[int, ...], chunk: Chunk, question: tuple[int, ...], tenant: str
    ) -> torch.Tensor:
        """float32 [len(chunk)]: scores of a chunk's tokens. system, question: the auxiliary model's ids."""
        ids, spans, own_spans = await asyncio.to_thread(self._retokenise, chunk.ids)
        if not ids or not question:
            return torch.zeros(len(chunk))
        chunk_prompt = Prompt(Chunk(system), (Chunk(ids),), question, tenant)
        async with self._loader.prompt(chunk_prompt, lambda _: len(question), Stopwatch()) as (layout, _):
            job = ForwardJob(
                ids=torch.tensor(question),
                positions=torch.arange(chunk_prompt.question_start, chunk_prompt.tokens),
                slots=layout.fresh,
                keys=layout.segments,
                output=AttentionScores(frozenset({self._model.kv.layers - 1})),
            )
            attention = await self._engine.run(job)
        own_scores = attention[len(system) : chunk_prompt.question_start]
        return await asyncio.to_thread(carry_over, own_scores, own_spans, spans)

    def _retokenise(self, ids: tuple[int, ...]) -> _Retokenised:
        """Turns the main model's ids into the auxiliary model's."""
        text, spans = spans_of(self._primary.tokenizer, ids)
        encoded = self._model.tokenizer.encode(text, add_special_tokens=False)
        return _Retokenised(tuple(encoded.ids), spans, encoded.offsets)


def spans_of(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, list[CharacterSpan]]:
    """Decodes tokens to a text, and to the characters that each token covers.

    Tokens that only together form a character each cover it. Tokens of an incomplete character at the end cover
    nothing.
    """
    characters = Characters(tokenizer, skip_special_tokens=False)
    text, spans, open_tokens = "", list[CharacterSpan](), 0
    for token in ids:
        open_tokens += 1
        piece = characters.step(token)
        if piece is not None:
            spans += [(len(text), len(text) + len(piece))] * open_tokens
            text, open_tokens = text + piece, 0
    return text, spans + [(len(text), len(text))] * open_tokens


def carry_over(scores: torch.Tensor, spans: Sequence[CharacterSpan], to: Sequence[CharacterSpan]) -> torch.Tensor:
    """Maps scores to another tokenizer's tokens (CacheClip 3.4).

    Each gets the highest score of the tokens that share its characters.

    spans, to: characters of the scored and of the other tokens, in order, over the same text. Returns float32
    [len(to)]; 0 for a token that shares no character.
    """
    best = [0.0] * (max((stop for _, stop in (*spans, *to)), default=0))
    for (start, stop), score in zip(spans, scores.tolist(), strict=True):
        for at in range(start, stop):
            best[at] = max(best[at], score)
    return torch.tensor([max(best[start:stop], default=0.0) for start, stop in to])
