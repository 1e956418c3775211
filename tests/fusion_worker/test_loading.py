"""Requests whose KV is being loaded: the engine computes for others meanwhile; a shared load is one span."""

import asyncio
import copy
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fusionkv.fusion_worker import models as worker_models
from fusionkv.fusion_worker.load import chunk_loads, loader
from fusionkv.fusion_worker.prompt import LoadedChunk
from tests.fusion_worker.oracle import byte_tokenizer, network, oracle, random_ids

pytestmark = pytest.mark.system


class Gate:
    """Holds back fetches of one length, and says when one has arrived."""

    def __init__(self, rig: Any, tokens: int) -> None:
        self.arrived, self.opened = asyncio.Event(), asyncio.Event()
        self._fetch, self._tokens = rig.servicer.loader.fetcher.fetch, tokens
        rig.servicer.loader.fetcher.fetch = self.fetch

    async def fetch(self, part: LoadedChunk) -> None:
        if part.pooled.tokens == self._tokens:
            self.arrived.set()
            await self.opened.wait()
        await self._fetch(part)


async def test_a_request_whose_kv_is_loading_costs_the_engine_nothing(cached: Any) -> None:
    """Others are answered from start to end while it waits, some with KV of their own to load, and none sooner."""
    system, question = random_ids(5, 1), random_ids(4, 2)
    held, other, new = ([random_ids(n, n), random_ids(n + 1, n + 1)] for n in (40, 20, 30))
    maker = await cached("qwen3")
    for chunks in (held, other):
        await maker.fill(system, chunks, question, ratio=0.0)

    rig, plain = await cached("qwen3"), oracle("qwen3")
    steps: list[int] = []
    step = rig.servicer.engine.step

    def counted(parts: list[Any]) -> None:
        steps.append(len(parts))
        step(parts)

    rig.servicer.engine.step = counted
    gate = Gate(rig, len(held[0]))
    late, *beside = [(system, chunks, question) for chunks in (held, other, new)]
    waiting = asyncio.create_task(rig.ask(*late, ratio=0.0, expected=plain.full_reuse(late)))
    await gate.arrived.wait()
    asked = (rig.ask(*p, ratio=0.0, max_tokens=6, expected=plain.full_reuse(p)) for p in beside)
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*asked)
    assert not waiting.done()
    found = [(len(a.ids), a.summary.chunks_missed, a.summary.degraded) for a in answers]
    assert found == [(6, 0, False), (6, 2, False)]
    assert steps
    before = len(steps)
    await asyncio.sleep(0.05)
    assert len(steps) == before, "what is computed for a request comes after its KV"
    gate.opened.set()
    answer = await waiting
    assert (answer.summary.degraded, answer.summary.chunks_missed) == (False, 0)


async def test_the_second_model_scores_while_the_first_one_s_kv_loads(cached: Any) -> None:
    second = worker_models.wrap(
        "second", copy.deepcopy(network("llama")), byte_tokenizer(), b"second".ljust(32), 2048
    )
    # Letters, since the second model reads the text: random bytes are none.
    system, question, *chunks = (list(text.encode()) for text in ("Answer.", "Who?", "a" * 20 + "b" * 20, "c" * 33))
    await (await cached("qwen3")).fill(system, chunks, question, ratio=0.0)
    rig = await cached("qwen3", auxiliary=second)
    scored = asyncio.Event()
    scores = rig.servicer.auxiliary.scores

    async def told(prompt: Any) -> Any:
        found = await scores(prompt)
        scored.set()
        return found

    rig.servicer.auxiliary.scores = told
    gate = Gate(rig, len(chunks[0]))
    waiting = asyncio.create_task(rig.ask(system, chunks, question, recipe="cacheclip", ratio=0.4))
    async with asyncio.timeout(60):
        await gate.arrived.wait()
        await scored.wait()
    assert not gate.opened.is_set()
    assert not waiting.done()
    gate.opened.set()
    answer = await waiting
    assert (answer.summary.degraded, answer.summary.chunks_missed) == (False, 0)
    assert answer.summary.tokens_recomputed > 0


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    for module in (loader, chunk_loads):
        monkeypatch.setattr(module, "tracer", provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


async def test_a_shared_load_is_linked_with_all_who_wait(start: Any, exported: InMemorySpanExporter) -> None:
    rig = await start("llama")
    system, question = random_ids(4, 1), random_ids(3, 2)
    gate, running = await rig.block(system, [random_ids(8, 3)], question, recipe="full_attention")
    # The engine stands still: the first of them begins to encode the chunk, the others find that begun.
    shared = random_ids(8, 4)
    asked = [asyncio.create_task(rig.ask(system, [shared], question, recipe="full_reuse")) for _ in range(3)]
    await rig.until(lambda: len([*rig.pool.chunks]) == 2 and all(chunk.pins > 3 for chunk in rig.pool.chunks))
    gate.opened.set()
    await asyncio.gather(running, *asked)
    await rig.settled()
    done = exported.get_finished_spans()
    loads = {span.context.span_id: span for span in done if span.name == "fusionkv.load"}
    encodings = (span for span in done if span.name == "fusionkv.encode_chunk")
    (encoded,) = [span for span in encodings if (span.attributes or {})["fusionkv.position"] == 4]
    waiting = {link.context.span_id for link in encoded.links}
    # The one that began it has it as its child, the other two are linked, and lead back.
    assert sorted([encoded.parent.span_id, *waiting]) == sorted(loads)
    assert len(waiting) == 2
    for span_id in waiting:
        assert encoded.context.span_id in {link.context.span_id for link in loads[span_id].links}


async def test_a_failed_load_says_why(start: Any, exported: InMemorySpanExporter, monkeypatch: Any) -> None:
    rig = await start("llama")

    async def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(rig.servicer.loader.loads, "_encode", broken)
    with pytest.raises(RuntimeError, match="broken"):
        await rig.ask(random_ids(4, 1), [random_ids(8, 3)], random_ids(3, 2), recipe="full_reuse")
    done = exported.get_finished_spans()
    assert {s.status.status_code for s in done if s.name == "fusionkv.encode_chunk"} == {trace.StatusCode.ERROR}
    assert not rig.servicer.loader.loads._loads
