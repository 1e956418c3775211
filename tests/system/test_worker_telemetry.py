"""A degraded answer is marked in its trace and in a metric; every stage of a request is a span."""

import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
import transformers
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb

pytestmark = pytest.mark.system
STAGES = {"queue", "lookup", "load", "encode", "select", "prefill", "decode"}


class Receiver(trace_grpc.TraceServiceServicer, metrics_grpc.MetricsServiceServicer):
    """Keeps every span and the last sum of every counter."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.sums: dict[str, int] = {}
        self.changed = threading.Condition()

    def Export(self, request: Any, context: Any) -> Any:
        with self.changed:
            for group in getattr(request, "resource_spans", ()):
                self.spans += [span for scope in group.scope_spans for span in scope.spans]
            for group in getattr(request, "resource_metrics", ()):
                for metric in (m for scope in group.scope_metrics for m in scope.metrics):
                    self.sums[metric.name] = sum(point.as_int for point in metric.sum.data_points)
            self.changed.notify_all()
        traces = isinstance(request, trace_pb2.ExportTraceServiceRequest)
        return trace_pb2.ExportTraceServiceResponse() if traces else metrics_pb2.ExportMetricsServiceResponse()

    def reasons(self) -> list[str]:
        """What spans give as the reason of a degraded answer."""
        return [a.value.string_value for s in self.spans for a in s.attributes if a.key == "fusionkv.degraded"]


@pytest.fixture
def receiver() -> Iterator[tuple[Receiver, str]]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    receiver = Receiver()
    trace_grpc.add_TraceServiceServicer_to_server(receiver, server)
    metrics_grpc.add_MetricsServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield receiver, f"http://127.0.0.1:{port}"
    server.stop(None)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


async def test_a_degraded_answer(launch: Any, receiver: tuple[Receiver, str], directory: Path) -> None:
    received, endpoint = receiver
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_METRIC_EXPORT_INTERVAL": "200",
    }
    flags = ("--model", str(directory), "--listen", "127.0.0.1:0", "--device", "cpu", "--threads", "1")
    lost = launch("fusionkv.fusion_worker", *flags, "--cache", "127.0.0.1:1", env=env)
    alone = launch("fusionkv.fusion_worker", *flags, env=env)
    request = pb.GenerateRequest(
        recipe="prophetkv",
        ratio=0.5,
        system=pb.Tokens(ids=[5]),
        chunks=[pb.Chunk(ids=[6, 7, 8]), pb.Chunk(ids=[9, 10, 11, 12])],
        question=pb.Tokens(ids=[13, 14]),
        sampling=pb.Sampling(max_tokens=2),
    )
    for service, degraded in ((lost, True), (alone, False)):
        worker = WorkerClient(service.address)
        summary = [e.summary async for e in worker.generate(request) if e.HasField("summary")][0]  # noqa: RUF015
        assert summary.degraded == degraded
        await worker.close()
        if degraded:
            reason = summary.degraded_reason

    with received.changed:
        assert received.changed.wait_for(lambda: reason in received.reasons(), 30), "no span names the reason"
        assert received.changed.wait_for(lambda: received.sums.get("fusionkv.worker.degraded") == 1, 30)
        wanted = {f"fusionkv.{stage}" for stage in STAGES}
        assert received.changed.wait_for(lambda: wanted <= {s.name for s in received.spans}, 30)
    # A request's spans belong to one trace, its call's.
    for service in (lost, alone):
        assert service.stop() == 0
    calls = {s.trace_id for s in received.spans if s.name.endswith("FusionService/Generate")}
    assert {s.trace_id for s in received.spans if s.name.startswith("fusionkv.")} <= calls
