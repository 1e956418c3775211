"""Requests whose KV is being loaded: the engine computes for others meanwhile, and the second model for them."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from fusionkv.fusion_worker import models as worker_models
from fusionkv.fusion_worker.load.placement import LoadedChunk, Stages
from tests.fusion_worker.oracle import byte_tokenizer, error, network, oracle, random_ids

pytestmark = pytest.mark.system
CLOSE = 1e-4


class Gate:
    """Holds back fetches of one length, and says when one has arrived."""

    def __init__(self, rig: Any, tokens: int) -> None:
        self.arrived, self.opened = asyncio.Event(), asyncio.Event()
        self._fetch, self._tokens = rig.servicer.loader.fetch, tokens
        rig.servicer.loader.fetch = self.fetch

    async def fetch(self, part: LoadedChunk, stages: Stages) -> None:
        if part.resident.tokens == self._tokens:
            self.arrived.set()
            await self.opened.wait()
        await self._fetch(part, stages)


async def stored(maker: Any, tenant: str, *prompts: Sequence[Any]) -> None:
    for prompt in prompts:
        await maker.ask(*prompt, tenant=tenant, ratio=0.0)
    await maker.stored()


async def test_a_request_whose_kv_is_loading_costs_the_engine_nothing(
    cache_service: str, start: Any, tenant: str
) -> None:
    """Others are answered from start to end while it waits, some with KV of their own to load, and none sooner."""
    system, question = random_ids(5, 1), random_ids(4, 2)
    held, other, new = ([random_ids(n, n), random_ids(n + 1, n + 1)] for n in (40, 20, 30))
    await stored(
        await start("qwen3", cache=cache_service), tenant, (system, held, question), (system, other, question)
    )

    rig, plain = await start("qwen3", cache=cache_service), oracle("qwen3")
    steps: list[int] = []
    step = rig.servicer.engine.step

    def counted(parts: list[Any]) -> None:
        steps.append(len(parts))
        step(parts)

    rig.servicer.engine.step = counted
    gate = Gate(rig, len(held[0]))
    waiting = asyncio.create_task(rig.ask(system, held, question, tenant=tenant, ratio=0.0))
    await gate.arrived.wait()
    async with asyncio.timeout(60):
        beside = await asyncio.gather(
            *(rig.ask(system, chunks, question, tenant=tenant, ratio=0.0, max_tokens=6) for chunks in (other, new))
        )
    assert not waiting.done()
    assert [a.summary.chunks_missed for a in beside] == [0, 2]
    for answer, chunks in zip(beside, (other, new), strict=True):
        assert len(answer.ids) == 6
        assert not answer.summary.degraded
        assert error(answer.logits[0], plain.after(plain.reused(system, chunks), question)) < CLOSE
    assert steps
    before = len(steps)
    await asyncio.sleep(0.05)
    assert len(steps) == before, "what is computed for a request comes after its KV"
    gate.opened.set()
    answer = await waiting
    assert not answer.summary.degraded
    assert answer.summary.chunks_missed == 0
    assert error(answer.logits[0], plain.after(plain.reused(system, held), question)) < CLOSE


async def test_the_second_model_scores_while_the_first_one_s_kv_loads(
    cache_service: str, start: Any, tenant: str
) -> None:
    second = worker_models.wrap("second", network("llama"), byte_tokenizer(), b"second".ljust(32), 2048)
    # Letters, since the second model reads the text: random bytes are none.
    system, question, *chunks = (list(text.encode()) for text in ("Answer.", "Who?", "a" * 20 + "b" * 20, "c" * 33))
    await stored(await start("qwen3", cache=cache_service), tenant, (system, chunks, question))

    rig = await start("qwen3", cache=cache_service, auxiliary=second)
    scored = asyncio.Event()
    scores = rig.servicer.auxiliary.scores

    async def told(prompt: Any) -> Any:
        found = await scores(prompt)
        scored.set()
        return found

    rig.servicer.auxiliary.scores = told
    gate = Gate(rig, len(chunks[0]))
    waiting = asyncio.create_task(rig.ask(system, chunks, question, recipe="cacheclip", ratio=0.4, tenant=tenant))
    async with asyncio.timeout(60):
        await gate.arrived.wait()
        await scored.wait()
    assert not gate.opened.is_set()
    assert not waiting.done()
    gate.opened.set()
    answer = await waiting
    assert not answer.summary.degraded
    assert answer.summary.chunks_missed == 0
    assert answer.summary.tokens_recomputed > 0
