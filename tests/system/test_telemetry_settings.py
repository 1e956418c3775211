"""OpenTelemetry's environment variables: what they switch on and off, what is refused, which requests are sampled."""

import asyncio
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionkv.gateway.client.client import Client
from fusionkv.kvcache_service.client import CacheClient
from fusionkv.protos.observe import telemetry
from tests.commands import run_python
from tests.services import start_cache, start_gateway, start_worker
from tests.system.otlp import Receiver, receiving

pytestmark = [pytest.mark.system, pytest.mark.slow]
PUTS = ("fusionkv-kvcache", "fusionkv.kvcache.puts")
QUESTION = "Report Velkorda: code of Bervek?"
PAGE = " ".join(f"Report Velkorda on page {i} says: the code of Bervek is {i}." for i in range(500, 506))


@pytest.fixture
def told(launch: Any, tmp_path: Path) -> Callable[..., Receiver]:
    """What a cache service tells of one call, under such variables; in their values {} is the receiver's address."""

    def tell(**env: str) -> Receiver:
        async def ask(address: str) -> None:
            client = CacheClient(address)
            await client.stats()
            await client.close()

        with receiving() as received:
            known = {f"OTEL_{name}": value.format(received.endpoint) for name, value in env.items()}
            cache = start_cache(launch, tmp_path, env=known)
            asyncio.run(ask(cache.address))
            assert cache.stop() == 0
            assert "Traceback" not in cache.log
        return received

    return tell


def test_nothing_is_sent_without_an_endpoint(launch: Any, tmp_path: Path) -> None:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    cache = start_cache(launch, tmp_path, env=env)
    assert cache.stop() == 0
    assert "otlp" not in cache.log.lower()
    assert "metrics at" not in cache.log


@pytest.mark.parametrize(
    ("env", "spans", "metrics"),
    [
        ({"EXPORTER_OTLP_ENDPOINT": "{}", "METRICS_EXPORTER": "none"}, True, False),
        ({"EXPORTER_OTLP_ENDPOINT": "{}", "TRACES_EXPORTER": "none"}, False, True),
        ({"EXPORTER_OTLP_TRACES_ENDPOINT": "{}"}, True, False),
        ({"EXPORTER_OTLP_ENDPOINT": "{}", "SDK_DISABLED": "true"}, False, False),
    ],
)
def test_each_signal_is_switched_by_itself(told: Any, env: dict[str, str], spans: bool, metrics: bool) -> None:
    received = told(**env)
    assert (bool(received.spans), bool(received.metrics)) == (spans, metrics)


def test_a_collector_on_this_machine_gets_all_without_a_proxy(
    told: Callable[..., Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    received = told(EXPORTER_OTLP_ENDPOINT="{}")
    assert received.spans
    assert received.metrics


@pytest.mark.parametrize("name", ["SERVICE_NAME", "RESOURCE_ATTRIBUTES"])
def test_a_service_can_be_named(told: Callable[..., Receiver], name: str) -> None:
    value = "service.name=mine" if name == "RESOURCE_ATTRIBUTES" else "mine"
    received = told(EXPORTER_OTLP_ENDPOINT="{}", **{name: value})
    assert {service for service, _ in received.spans} == {service for service, _ in received.metrics} == {"mine"}


NOWHERE = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("EXPORTER_OTLP_PROTOCOL", "http/protobuf", "only grpc is supported"),
        ("EXPORTER_OTLP_TRACES_PROTOCOL", "http/json", "'http/json' for traces"),
        ("TRACES_EXPORTER", "console", "OTEL_TRACES_EXPORTER must be otlp or none, not 'console'"),
        *(
            (f"EXPORTER_OTLP_{signal}HEADERS", header, "an invalid header")
            for signal, header in itertools.product(
                ("", "TRACES_"), ("Hush%20hush", "a b=Hush", "a=b,c=Hush;", 'a="Hush"', "a=Hush%0A%0A.", "é=Hush")
            )
        ),
    ],
)
def test_what_would_be_sent_nowhere_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    """And headers are not quoted, as the SDK and gRPC would do in the log."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", NOWHERE)
    monkeypatch.setenv(f"OTEL_{name}", value)
    with pytest.raises(ValueError, match=says) as refused:
        telemetry._exported("TRACES")
    assert "ush" not in str(refused.value)


def test_what_the_sdk_refuses_ends_the_start(launch: Any, tmp_path: Path) -> None:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": NOWHERE, "OTEL_EXPORTER_OTLP_COMPRESSION": "zip"}
    says = r"kvcache: a variable of OpenTelemetry \(OTEL_...\) can't be used: .*zip"
    with pytest.raises(AssertionError, match=says):
        start_cache(launch, tmp_path, env=env)


def test_headers_are_sent(told: Callable[..., Receiver]) -> None:
    """As the specification has them, and as other SDKs take them."""
    received = told(EXPORTER_OTLP_ENDPOINT="{}", EXPORTER_OTLP_HEADERS=" Authorization=Bearer%20a== , x-y=a b,,")
    assert received.spans
    assert {("authorization", "Bearer a=="), ("x-y", "a b")} <= received.headers


@pytest.mark.parametrize(("ratio", "services"), [("0", set()), ("1", {"gateway", "worker", "kvcache"})])
def test_all_follow_the_sampler_of_the_gateway(
    launch: Any, reference_model: Path, tmp_path: Path, ratio: str, services: set[str]
) -> None:
    """The others are told nothing; neither do they begin traces of their own, for what is stored after an answer."""
    with receiving() as received:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": received.endpoint, "OTEL_METRIC_EXPORT_INTERVAL": "200"}
        sampled = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": ratio}
        cache = start_cache(launch, tmp_path, env=env)
        worker = start_worker(launch, reference_model, cache=cache, env=env)
        gateway = start_gateway(launch, tmp_path, worker, "--chunk-tokens", "16", env=env | sampled)
        with Client(gateway.address) as client:
            client.ingest("c", "page.md", PAGE)
            made = client.ask("c", QUESTION, recipe="full_reuse", max_tokens=2).summary.chunks_missed
            # The system prompt is stored too.
            received.wait_for(lambda: received.total(*PUTS) > made > 0)
        for service in (gateway, worker, cache):
            assert service.stop() == 0, service.log
    assert {service for service, _ in received.spans} == {f"fusionkv-{name}" for name in services}
    assert any(span.name == "fusionkv.put" for _, span in received.spans) == bool(services)


def test_a_collector_that_cannot_be_reached_delays_no_stop() -> None:
    code = (
        "import time; from fusionkv.protos.observe import telemetry; from opentelemetry import trace, metrics\n"
        "telemetry.attach('x'); metrics.get_meter('m').create_counter('c').add(1)\n"
        "trace.get_tracer('t').start_span('s').end(); began = time.monotonic(); telemetry.detach()\n"
        "print(time.monotonic() - began)"
    )
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    began = time.monotonic()
    assert float(run_python("-c", code, env=env).stdout) < 2
    assert time.monotonic() - began < 7, "nothing waits at the exit of the interpreter either"
