"""An OTLP receiver, as any backend has one: keeps all spans, and the last state of every metric."""

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc


class Receiver(trace_grpc.TraceServiceServicer, metrics_grpc.MetricsServiceServicer):
    """`spans`: (service, span). `metrics`, and the trace ids of all `exemplars`: by (service, name). `headers` that
    came along: (name, value). `raw`: the bytes of all of it.
    """

    def __init__(self) -> None:
        self.endpoint = ""
        self.raw: list[bytes] = []
        self.headers: set[tuple[str, Any]] = set()
        self.spans: list[tuple[str, Any]] = []
        self.metrics: dict[tuple[str, str], Any] = {}
        self.exemplars: dict[tuple[str, str], set[str]] = {}
        self.changed = threading.Condition()

    def Export(self, request: Any, context: Any) -> Any:
        with self.changed:
            self.raw.append(request.SerializeToString())
            self.headers |= {(each.key, each.value) for each in context.invocation_metadata()}
            for group in getattr(request, "resource_spans", ()):
                for scope in group.scope_spans:
                    self.spans += [(service_of(group.resource), span) for span in scope.spans]
            for group in getattr(request, "resource_metrics", ()):
                for metric in (m for scope in group.scope_metrics for m in scope.metrics):
                    name = (service_of(group.resource), metric.name)
                    self.metrics[name] = metric
                    kept = self.exemplars.setdefault(name, set())
                    kept |= {e.trace_id.hex() for point in points(metric) for e in point.exemplars}
            self.changed.notify_all()
        traces = isinstance(request, trace_pb2.ExportTraceServiceRequest)
        return trace_pb2.ExportTraceServiceResponse() if traces else metrics_pb2.ExportMetricsServiceResponse()

    def wait_for(self, ready: Callable[[], Any], timeout: float = 60) -> None:
        with self.changed:
            assert self.changed.wait_for(ready, timeout), (
                sorted((name, span.name, span.parent_span_id) for name, span in self.spans),
                sorted(self.metrics),
            )

    def total(self, service: str, name: str) -> float:
        """All points of a metric together: sums, or counts of a histogram."""
        metric = self.metrics.get((service, name))
        return sum(getattr(p, "count", 0) or p.as_int or p.as_double for p in points(metric)) if metric else 0


def service_of(resource: Any) -> str:
    found = attributes(resource)
    assert found["service.namespace"] == "fusionkv"
    return str(found["service.name"])


def points(metric: Any) -> Any:
    return getattr(metric, metric.WhichOneof("data")).data_points


def attributes(carrier: Any) -> dict[str, Any]:
    """Of a span, a link, a point or a resource."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value") or "string_value") for a in carrier.attributes}


@contextmanager
def receiving() -> Iterator[Receiver]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    receiver = Receiver()
    trace_grpc.add_TraceServiceServicer_to_server(receiver, server)
    metrics_grpc.add_MetricsServiceServicer_to_server(receiver, server)
    receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None)
