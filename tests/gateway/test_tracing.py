"""One trace a request, through all three processes, received by a real OTLP endpoint."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from fusionkv.gateway.client import Client
from fusionkv.protos.errors import NotFound

pytestmark = pytest.mark.system


class Collector(trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer):
    """Keeps every span, with its service's name, and the names of the metrics of each service."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        self.metrics: dict[str, Any] = {}

    def Export(self, request: Any, context: Any) -> Any:
        if isinstance(request, metrics_service_pb2.ExportMetricsServiceRequest):
            for resource in request.resource_metrics:
                for scope in resource.scope_metrics:
                    self.metrics.update({m.name: m for m in scope.metrics})
            return metrics_service_pb2.ExportMetricsServiceResponse()
        for resource in request.resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans.extend((names["service.name"], span) for span in scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    kept = Collector()
    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(kept, server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(kept, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield kept, f"http://127.0.0.1:{port}"
    server.stop(None)


def test_one_trace_holds_all_of_a_request(
    collector: tuple[Collector, str], launch: Callable[..., Any], tiny_model: Path, tmp_path: Path
) -> None:
    kept, endpoint = collector
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_METRIC_EXPORT_INTERVAL": "3600000"}
    local = ("--listen", "127.0.0.1:0")
    cache = launch("fusionkv.kvcache_service", *local, "--data-dir", str(tmp_path / "k"), env=env)
    model = ("--model", str(tiny_model), "--threads", "1", "--cache", cache.address)
    worker = launch("fusionkv.fusion_worker", *local, *model, env=env)
    data = ("--data-dir", str(tmp_path / "g"), "--workers", worker.address)
    gateway = launch("fusionkv.gateway", *local, *data, env=env)
    with Client(gateway.address, timeout=60) as client:
        client.ingest("c", "d.txt", "some text")
        answer = client.ask("c", "some question?", recipe="prophetkv", max_tokens=3)
        with pytest.raises(NotFound):
            client.ask("none", "some question?")
    # What is still buffered is sent when a service ends.
    for service in (gateway, worker, cache):
        assert service.stop() == 0
    own = [(s, span) for s, span in kept.spans if span.trace_id.hex() == answer.summary.trace_id]
    assert {service for service, _ in own} == {"fusionkv-gateway", "fusionkv-worker", "fusionkv-kvcache"}
    by_id = {span.span_id: span for _, span in own}
    by_name = {span.name: span for s, span in own if s == "fusionkv-gateway"}
    assert {"gateway.retrieve", "gateway.embed", "gateway.plan", "gateway.generate"} <= set(by_name)

    def above(span: Any) -> list[str]:
        names = []
        while span.parent_span_id in by_id:
            span = by_id[span.parent_span_id]
            names.append(span.name)
        return names

    assert above(by_name["gateway.embed"])[0] == "gateway.retrieve"
    answered = [s for service, s in own if service == "fusionkv-worker" and s.name.endswith("FusionService/Generate")]
    assert len(answered) == 1
    assert "gateway.generate" in above(answered[0])
    lookups = [s for service, s in own if service == "fusionkv-kvcache" and s.name.endswith("Lookup")]
    assert lookups
    assert all("gateway.generate" in above(s) for s in lookups)
    # One root, which is the gateway's own span of the call.
    roots = [span for _, span in own if span.parent_span_id not in by_id]
    assert [r.name for r in roots] == ["/gateway.v1.GatewayService/Generate"]
    counted = {"fusionkv.gateway.requests", "fusionkv.gateway.failures", "fusionkv.gateway.ttft"}
    assert counted <= set(kept.metrics)
    failed = kept.metrics["fusionkv.gateway.failures"].sum.data_points
    assert [{a.key: a.value.string_value for a in p.attributes}["rpc.grpc.status"] for p in failed] == ["NOT_FOUND"]
