"""What the service tells OpenTelemetry."""

from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fusionkv.kvcache_service import metrics
from fusionkv.kvcache_service.store import reading
from tests.kvcache_service import tools

MIB = 1 << 20


def points(reader: InMemoryMetricReader) -> dict[tuple[str, str], int]:
    """(metric, its attribute) -> value."""
    data = reader.get_metrics_data()
    assert data is not None
    return {
        (metric.name, next(iter(point.attributes.values()), "")): point.value
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }


async def test_metrics_and_spans(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, exporter = InMemoryMetricReader(), InMemorySpanExporter()
    meters, tracers = MeterProvider([reader]), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(metrics.metrics, "get_meter", meters.get_meter)
    monkeypatch.setattr(reading, "tracer", tracers.get_tracer("test"))
    service = await start(memory=1 * MIB, disk=2 * MIB)
    metrics.observe_tiers(
        lambda: [(tier.name, tier.used_bytes, tier.capacity_bytes) for tier in service.store.residents.tiers]
    )
    s = tools.digest("S")
    for name in ("a", "b", "b"):
        await service.put([s, tools.digest(name)], tools.payload(name, MIB))
        service.clock.now += 1
    found = await service.find(s, tools.digest("a"))
    await service.fetch(found.hits[1].entry)
    await service.client.release(found.lease)
    with pytest.raises(Exception, match="no room"):
        await service.put([s, tools.digest("c")], tools.payload("c", 2 * MIB + 1))
    await service.put([s, tools.digest("c")], tools.payload("c", MIB))
    assert points(reader) == {
        ("fusionkv.kvcache.lookups", "exact"): 1,
        ("fusionkv.kvcache.lookups", "miss"): 1,
        ("fusionkv.kvcache.puts", "stored"): 3,
        ("fusionkv.kvcache.puts", "exists"): 1,
        ("fusionkv.kvcache.puts", "refused"): 1,
        ("fusionkv.kvcache.bytes.put", ""): 3 * MIB,
        ("fusionkv.kvcache.bytes.fetched", "memory"): MIB,
        ("fusionkv.kvcache.promotions", "memory"): 1,
        ("fusionkv.kvcache.demotions", "memory"): 2,
        ("fusionkv.kvcache.evictions", "disk"): 1,
        ("fusionkv.kvcache.tier.used", "memory"): MIB,
        ("fusionkv.kvcache.tier.used", "disk"): 2 * MIB,
        ("fusionkv.kvcache.tier.capacity", "memory"): MIB,
        ("fusionkv.kvcache.tier.capacity", "disk"): 2 * MIB,
    }
    (span,) = exporter.get_finished_spans()
    assert span.name == "kvcache.read"
    assert dict(span.attributes or {}) == {"fusionkv.tier": "disk", "fusionkv.bytes": MIB, "fusionkv.promoted": True}
