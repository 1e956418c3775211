"""Cost of OpenTelemetry up to the first token: `python -P bench/services/telemetry_cost.py 150 [large]`.

Runs two sets of services, each a cache service, a worker with a reference model and a gateway: one exports traces and
metrics to an OTLP receiver in this process, the other has no telemetry. Each question goes to both, in alternating
order. OTEL_* variables apply to the set that exports. The figures of docs/observability.md.

`large` uses a model with the layer sizes of Qwen2.5-0.5B and random weights, which do not affect speed.
"""

import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from fusionkv.bench.services.process import MODEL, ROOT, cpu_seconds, running
from fusionkv.gateway.client.client import AsyncClient
from fusionkv.gateway.client.results import Summary, Token

CORPUS, FOLDER = "shelf", ROOT / "examples/corpus/shelf-01"
# Exercises all stages. Two passes before the measurement fetch and encode all chunks.
RECIPE, RATIO, QUESTIONS, PASSES_BEFORE = "prophetkv", 0.2, 20, 2
_RESAMPLES, _SEED = 4000, 1
# Long timeouts, so that no answer is degraded by load: it would not be comparable.
_PATIENT = ("--lookup-timeout", "60", "--fetch-timeout", "60", "--cache-seconds", "120")


@dataclass(frozen=True)
class Services:
    """The gateway's address, and the process ids of all three services."""

    address: str
    pids: tuple[int, ...]

    def processor_seconds(self) -> float:
        return sum(map(cpu_seconds, self.pids))


class Receiver(grpc.GenericRpcHandler):
    """An OTLP receiver: collects exported traces and counts calls."""

    def __init__(self) -> None:
        self.traces: list[bytes] = []
        self.calls = 0

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        def export(request: bytes, _: grpc.ServicerContext) -> bytes:
            self.calls += 1
            if "TraceService" in details.method:
                self.traces.append(request)
            return b""

        return grpc.unary_unary_rpc_method_handler(export)

    def spans(self, traces: set[bytes]) -> int:
        """Number of spans that belong to these traces."""
        requests = map(trace_service_pb2.ExportTraceServiceRequest.FromString, self.traces)
        scopes = (scope for request in requests for group in request.resource_spans for scope in group.scope_spans)
        return sum(span.trace_id in traces for scope in scopes for span in scope.spans)


@contextmanager
def _receiving() -> Iterator[tuple[Receiver, str]]:
    """Runs the receiver; yields it and its endpoint."""
    receiver, server = Receiver(), grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((receiver,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield receiver, f"http://127.0.0.1:{port}"
    server.stop(None)


@contextmanager
def _services(folder: Path, model: Path, endpoint: str) -> Iterator[Services]:
    """Runs a cache service, a worker and a gateway, which export if there is an endpoint."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    env = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint} if endpoint else plain
    pids: list[int] = []
    with ExitStack() as stack:

        def start(module: str, *flags: str) -> str:
            (address,), pid = stack.enter_context(running(module, *flags, env=env))
            pids.append(pid)
            return address

        cache = start("kvcache_service", "--data-dir", str(folder / "kvcache"))
        worker = start("fusion_worker", "--cache", cache, "--model", str(model), "--threads", "1", *_PATIENT)
        yield Services(start("gateway", "--workers", worker, "--data-dir", str(folder / "gateway")), tuple(pids))


def _large(folder: Path) -> Path:
    """Writes a model with random layers of Qwen2.5-0.5B's size, and the reference model's tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    sizes |= {"num_attention_heads": 14, "num_key_value_heads": 2, "layer_types": ["full_attention"] * 24}
    config = Qwen2Config.from_pretrained(MODEL, **sizes)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    for file in MODEL.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


async def _first_token(client: AsyncClient, question: str) -> tuple[float, str]:
    """Seconds to the first token, measured by the caller, and the answer's trace id."""
    began, seconds, trace = time.perf_counter(), 0.0, ""
    async for event in client.stream(CORPUS, question, recipe=RECIPE, ratio=RATIO, max_tokens=2):
        if isinstance(event, Token):
            seconds = seconds or time.perf_counter() - began
        elif isinstance(event, Summary):
            assert not event.degraded
            trace = event.trace_id
    return seconds, trace


async def _pairs(sets: Sequence[Services], pairs: int) -> tuple[np.ndarray, list[float], list[str]]:
    """Seconds [pair, 2] and CPU seconds without and with telemetry, and the trace ids of the latter."""
    questions = [q["question"] for q in json.loads((FOLDER.parent / "questions.json").read_text())]
    questions = questions[: min(QUESTIONS, pairs)]
    clients = [AsyncClient(each.address, timeout=120) for each in sets]
    for client in clients:
        for file in sorted(FOLDER.glob("*.md")):
            await client.ingest(CORPUS, file.name, file)
    for question in questions * PASSES_BEFORE:
        for client in clients:
            await _first_token(client, question)
    found, traces = np.zeros((pairs, 2)), []
    before = [each.processor_seconds() for each in sets]
    for i in range(pairs):
        for which in (0, 1) if i % 2 else (1, 0):
            found[i, which], trace = await _first_token(clients[which], questions[i % len(questions)])
            traces += [trace] if trace else []
    processor = [each.processor_seconds() - used for each, used in zip(sets, before, strict=True)]
    for client in clients:
        await client.close()
    return found, processor, traces


def report(seconds: np.ndarray) -> dict[str, float]:
    """Medians of seconds [pair, 2], and the median difference of pairs with its bootstrapped 95% interval."""
    difference = seconds[:, 1] - seconds[:, 0]
    draws = np.random.default_rng(_SEED).integers(len(difference), size=(_RESAMPLES, len(difference)))
    low, high = np.percentile(np.median(difference[draws], axis=1), [2.5, 97.5])
    without, more = statistics.median(seconds[:, 0]), statistics.median(difference)
    figures = {"without_ms": without, "with_ms": statistics.median(seconds[:, 1]), "more_ms": more}
    figures |= {"more_low_ms": float(low), "more_high_ms": float(high)}
    shares = {"more_percent": 100 * more / without, "more_percent_of_1_s": 100 * more}
    milliseconds = {name: round(1e3 * value, 3) for name, value in figures.items()}
    rounded = {name: round(value, 2) for name, value in shares.items()}
    return {"pairs": len(seconds), **milliseconds, **rounded}


def main() -> None:
    match sys.argv[1:]:
        case [pairs, *size] if pairs.isdecimal() and size in ([], ["large"]):
            pass
        case _:
            sys.exit(__doc__)
    with _receiving() as (receiver, endpoint), tempfile.TemporaryDirectory() as made:
        model = _large(Path(made, "model")) if size else MODEL
        silent, telling = (_services(Path(made, name), model, to) for name, to in (("plain", ""), ("told", endpoint)))
        with silent as plain, telling as told:
            seconds, processor, traces = asyncio.run(_pairs((plain, told), int(pairs)))
        spans = receiver.spans(set(map(bytes.fromhex, traces))) / max(1, len(traces))
        each = [round(1e3 * used / len(seconds), 2) for used in processor]
        whole = {"processor_ms_each_without": each[0], "processor_ms_each_with": each[1], "spans_each": spans}
        print(json.dumps({**report(seconds), **whole, "exports": receiver.calls}))


if __name__ == "__main__":
    main()
