"""A load that several requests wait for is one span, linked with each of them."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fusionkv.fusion_worker.load import loader, spans
from tests.fusion_worker.oracle import random_ids


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    for module in (loader, spans):
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
    await rig.until(lambda: len(rig.pool._residents) == 2 and all(r.pins > 3 for r in rig.pool._residents.values()))
    gate.opened.set()
    await asyncio.gather(running, *asked)
    await rig.settled()
    done = exported.get_finished_spans()
    loads = {span.context.span_id: span for span in done if span.name == "fusionkv.load"}
    (encoded,) = [
        span
        for span in done
        if span.name == "fusionkv.encode_chunk" and (span.attributes or {})["fusionkv.position"] == 4
    ]
    assert encoded.parent is not None
    waiting = {link.context.span_id for link in encoded.links}
    # The one that began it has it as its child, the other two are linked, and lead back.
    assert {encoded.parent.span_id} | waiting == set(loads)
    assert len(waiting) == 2
    assert encoded.parent.span_id not in waiting
    for span_id in waiting:
        assert encoded.context.span_id in {link.context.span_id for link in loads[span_id].links}


async def test_a_failed_load_says_why(start: Any, exported: InMemorySpanExporter, monkeypatch: Any) -> None:
    rig = await start("llama")

    async def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(rig.servicer.loader, "_encode", broken)
    with pytest.raises(RuntimeError, match="broken"):
        await rig.ask(random_ids(4, 1), [random_ids(8, 3)], random_ids(3, 2), recipe="full_reuse")
    failed = [span for span in exported.get_finished_spans() if span.name == "fusionkv.encode_chunk"]
    assert failed
    assert {span.status.status_code for span in failed} == {trace.StatusCode.ERROR}
    assert not rig.servicer.loader._spans._running
