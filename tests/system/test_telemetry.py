"""One request is one trace through all three services, and counters arrive, at a real OTLP receiver."""

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc

from fusionkv.gateway.client import Client

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]
SERVICES = {"fusionkv-gateway", "fusionkv-worker", "fusionkv-kvcache"}


class Receiver(trace_grpc.TraceServiceServicer, metrics_grpc.MetricsServiceServicer):
    """Keeps every span, under its service's name, and the last value of every metric."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        self.metrics: dict[tuple[str, str], float] = {}
        self.changed = threading.Condition()

    def Export(self, request: Any, context: Any) -> Any:
        with self.changed:
            for group in getattr(request, "resource_spans", ()):
                for scope in group.scope_spans:
                    self.spans += [(name_of(group.resource), span) for span in scope.spans]
            for group in getattr(request, "resource_metrics", ()):
                for metric in (m for scope in group.scope_metrics for m in scope.metrics):
                    points = getattr(metric, metric.WhichOneof("data")).data_points
                    key = (name_of(group.resource), metric.name)
                    self.metrics[key] = sum(getattr(p, "count", 0) or p.as_int or p.as_double for p in points)
            self.changed.notify_all()
        traces = isinstance(request, trace_pb2.ExportTraceServiceRequest)
        return trace_pb2.ExportTraceServiceResponse() if traces else metrics_pb2.ExportMetricsServiceResponse()

    def wait_for(self, ready: Callable[[], Any], timeout: float = 30) -> None:
        with self.changed:
            assert self.changed.wait_for(ready, timeout), (
                sorted((name, span.name, span.parent_span_id) for name, span in self.spans),
                self.metrics,
            )


def name_of(resource: Any) -> str:
    values = {a.key: a.value.string_value for a in resource.attributes}
    assert values["service.namespace"] == "fusionkv"
    return str(values["service.name"])


@pytest.fixture
def receiver() -> Iterator[tuple[Receiver, str]]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    receiver = Receiver()
    trace_grpc.add_TraceServiceServicer_to_server(receiver, server)
    metrics_grpc.add_MetricsServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield receiver, f"http://127.0.0.1:{port}"
    server.stop(None)


def test_one_trace_through_three_services(
    launch: Any, receiver: tuple[Receiver, str], reference_model: Path, tmp_path: Path
) -> None:
    received, endpoint = receiver
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_METRIC_EXPORT_INTERVAL": "200",
        "FUSIONKV_KVCACHE_DATA_DIR": str(tmp_path / "kvcache"),
        "FUSIONKV_GATEWAY_DATA_DIR": str(tmp_path / "gateway"),
    }
    cache = launch("fusionkv.kvcache_service", "--listen", "127.0.0.1:0", env=env)
    flags = ("--model", str(reference_model), "--cache", cache.address)
    worker = launch("fusionkv.fusion_worker", "--listen", "127.0.0.1:0", *flags, env=env)
    gateway = launch("fusionkv.gateway", "--listen", "127.0.0.1:0", "--workers", worker.address, env=env)

    with Client(gateway.address) as client:
        client.ingest("c", "page.md", "Report Velkorda. The lake is blue. The code of Bervek is 535.")
        summary = client.ask("c", "Report Velkorda: code of Bervek?", recipe="full_reuse").summary
    assert not summary.degraded, summary.degraded_reason
    trace = bytes.fromhex(summary.trace_id)

    def spans() -> list[tuple[str, Any]]:
        return [(name, span) for name, span in received.spans if span.trace_id == trace]

    def complete() -> bool:
        """Spans of all services, one root, and no span without its parent."""
        found = spans()
        ids = {span.span_id for _, span in found}
        roots = [name for name, span in found if span.parent_span_id not in ids]
        return {name for name, _ in found} == SERVICES and roots == ["fusionkv-gateway"]

    received.wait_for(complete)
    found = spans()
    names = {name: {span.name for service, span in found if service == name} for name in SERVICES}
    assert "fusionkv.prefill" in names["fusionkv-worker"]
    assert any(name.endswith("KVCacheService/Lookup") for name in names["fusionkv-kvcache"])

    for metric in (
        ("fusionkv-gateway", "fusionkv.gateway.requests"),
        ("fusionkv-worker", "fusionkv.worker.tokens"),
        ("fusionkv-kvcache", "fusionkv.kvcache.puts"),
    ):
        received.wait_for(lambda metric=metric: received.metrics.get(metric, 0) > 0)
    for service in (gateway, worker, cache):
        assert service.stop() == 0, service.log


def test_nothing_is_sent_without_an_endpoint(launch: Any, tmp_path: Path) -> None:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}
    cache = launch(
        "fusionkv.kvcache_service", "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "data"), env=env
    )
    assert cache.stop() == 0
    assert "otlp" not in cache.log.lower()
