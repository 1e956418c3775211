"""What a run tells OTLP and Prometheus, beside docs/telemetry.yaml; one request is one trace; the log is JSON."""

import hashlib
import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from fusionkv.gateway.client.client import Client
from fusionkv.gateway.client.results import Summary
from fusionkv.protos.runtime.errors import NotFound, ResourceExhausted, Unauthenticated
from tests.gateway import sentence_models
from tests.services import start_cache, start_gateway, start_worker, token_entry, token_flags
from tests.system.otlp import Receiver, attributes, points, receiving
from tests.system.redis_process import still

pytestmark = [pytest.mark.system, pytest.mark.slow]
SERVICES = {"fusionkv-gateway", "fusionkv-worker", "fusionkv-kvcache"}
RPC = re.compile(r"/(gateway|fusion|kvcache)\.v1\.\w+/\w+")
# What the GenAI conventions ask of a span, by its operation.
REQUIRED = {**dict.fromkeys(("chat", "embeddings"), "gen_ai.request.model"), "retrieval": "gen_ai.data_source.id"}
QUESTION = "Report Velkorda: code of Bervek?"
# As a caller's own trace comes in over HTTP.
CALLERS_TRACE, CALLERS_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@dataclass
class Run:
    """Some requests to all three services, and everything that was told of them."""

    received: Receiver
    scraped: dict[str, dict[str, Any]]
    log: list[dict[str, Any]]
    summaries: dict[str, Summary]

    def trace(self, name: str) -> list[tuple[str, Any]]:
        """Service and span of everything in a request's trace."""
        wanted = bytes.fromhex(self.summaries[name].trace_id)
        return [(service, span) for service, span in self.received.spans if span.trace_id == wanted]


@pytest.fixture(scope="module")
def registry(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((root / "docs/telemetry.yaml").read_text())
    return found


@pytest.fixture(scope="module")
def run(launch_module: Any, reference_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder, token = tmp_path_factory.mktemp("telemetry"), secrets.token_urlsafe(32)
    with receiving() as received:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": received.endpoint, "FUSIONKV_LOG_FORMAT": "json"}
        env |= {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_METRIC_EXPORT_INTERVAL": "200"}
        scraped_at = ("--metrics-listen", "127.0.0.1:0")
        cache = start_cache(launch_module, folder, *scraped_at, env=env)
        flags = (*scraped_at, "--shadow-share", "1", "--pool-bytes", "1MiB")
        worker = start_worker(launch_module, reference_model, *flags, cache=cache, env=env)
        flags = (*scraped_at, *token_flags(folder, token_entry(token)), "--http-listen", "127.0.0.1:0")
        flags += ("--embedder", str(sentence_models.write(folder / "tiny")), "--embedder-threads", "1")
        flags += ("--chunk-tokens", "16")
        gateway = start_gateway(launch_module, folder, worker, *flags, services=2, env=env)
        services = (gateway, worker, cache)
        summaries: dict[str, Summary] = {}
        with Client(gateway.address, token=token) as client:
            text = " ".join(f"Report Velkorda on page {i} says: the code of Bervek is {i}." for i in range(500, 512))
            client.ingest("c", "page.md", text)
            for name, recipe in (("first", "prophetkv"), ("second", "prophetkv")):
                summaries[name] = client.ask("c", QUESTION, recipe=recipe, ratio=0.2, max_tokens=3).summary
            for call in (client.ask, client.retrieve):
                with pytest.raises(NotFound):
                    call("none", QUESTION)
            with pytest.raises(ResourceExhausted):
                client.ask("c", QUESTION, recipe="full_attention", max_tokens=600)
            made = summaries["first"].chunks_missed
            received.wait_for(lambda: received.total("fusionkv-kvcache", "fusionkv.kvcache.puts") > made)
            # It takes so much of the pool that the chunks have to go, and are fetched for the next one.
            # Drawn from all tokens alike, it has no end before 230, a second later; greedily it would have four.
            endless: dict[str, Any] = {"max_tokens": 230, "temperature": 100.0, "seed": 1}
            left = client.stream("c", QUESTION, recipe="full_attention", **endless)
            next(left)
            next(left)
            # Still until the gateway knows that its caller left: it might be done before.
            with still(worker.process):
                left.close()
                gateway.wait_for_line('"status": "CANCELLED"')
            http = gateway.addresses["fusionkv-gateway-http"][0]
            over_http = httpx2.post(
                f"http://{http}/v1/chat/completions",
                json={"model": "c:full_reuse", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 2},
                headers={"Authorization": f"Bearer {token}", "traceparent": f"00-{CALLERS_TRACE}-{CALLERS_SPAN}-01"},
                timeout=60,
            )
            assert over_http.status_code == 200

            with Client(gateway.address, token="wrong") as stranger, pytest.raises(Unauthenticated):
                stranger.list()
            scraped = {"fusionkv-kvcache": scrape(cache)}
            assert cache.stop() == 0
            known = client.stats().requests_degraded
            summaries["degraded"] = client.ask("c", QUESTION, recipe="prophetkv", max_tokens=1).summary
            assert client.stats().requests_degraded == known + 1
            # Answers are made again by full attention when the worker is idle, which it is now.
            received.wait_for(lambda: received.total("fusionkv-worker", "fusionkv.worker.shadow.kl"))
        scraped |= {"fusionkv-gateway": scrape(gateway), "fusionkv-worker": scrape(worker)}
        for service in services:
            assert service.stop() == 0, service.log
        log = [json.loads(line) for service in services for line in service.log.splitlines() if line[0] == "{"]
        yield Run(received, scraped, log, summaries)


def scrape(service: Any) -> dict[str, Any]:
    """The families of the scrape endpoint, by name, as Prometheus asks for them."""
    (address,) = re.findall(r"metrics at (http://\S+/metrics)", service.log)
    text = httpx2.get(address, headers={"Accept": "application/openmetrics-text;version=1.0.0"}, timeout=60).text
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_one_request_is_one_trace(run: Run) -> None:
    """Without gaps, from the gateway's RPC down to the cache service's."""
    found = run.trace("first")
    assert {service for service, _ in found} == SERVICES
    by_id = {span.span_id: span for _, span in found}
    roots = [span.name for _, span in found if span.parent_span_id not in by_id]
    assert roots == ["/gateway.v1.GatewayService/Generate"]

    def above(span: Any) -> list[str]:
        names = []
        while span.parent_span_id in by_id:
            span = by_id[span.parent_span_id]
            names.append(span.name)
        return names

    named = {span.name: span for _, span in found if not RPC.fullmatch(span.name)}
    (chat,) = (name for name in named if name.startswith("chat "))
    stages = {f"fusionkv.{s}" for s in ("queue", "lookup", "load", "encode", "select", "prefill", "decode")}
    assert {"gateway.retrieve", "gateway.embed", "gateway.plan", "fusionkv.encode_chunk", *stages} <= set(named)
    assert above(named["gateway.embed"])[0] == "gateway.retrieve"
    assert all(chat in above(named[stage]) for stage in stages)
    lookups = [s for service, s in found if service == "fusionkv-kvcache" and s.name.endswith("/Lookup")]
    assert lookups
    assert all("fusionkv.lookup" in above(s) for s in lookups)
    answered = run.summaries["first"]
    told = attributes(named[chat])
    assert told["gen_ai.usage.input_tokens"] == answered.prompt_tokens
    assert told["gen_ai.usage.output_tokens"] == answered.tokens_generated
    assert told["fusionkv.tokens.recomputed"] == answered.tokens_recomputed
    encoded = [s for _, s in found if s.name == "fusionkv.encode_chunk"]
    # The system prompt is a part too.
    assert len(encoded) == answered.chunks_missed + 1
    # What is put back comes later, in traces that lead here.
    puts = [s for _, s in run.received.spans if s.name == "fusionkv.put"]
    assert {link.span_id for put in puts for link in put.links} & {s.span_id for s in encoded}


def test_a_request_over_http_goes_on_with_its_callers_trace(run: Run) -> None:
    found = [(n, s) for n, s in run.received.spans if s.trace_id.hex() == CALLERS_TRACE]
    assert {service for service, _ in found} == SERVICES
    (first,) = (s for _, s in found if s.parent_span_id.hex() == CALLERS_SPAN)
    assert first.name == "POST /v1/chat/completions"
    assert attributes(first)["http.response.status_code"] == 200


def test_errors_and_degraded_answers_are_marked(run: Run) -> None:
    assert run.summaries["degraded"].degraded
    marked = [attributes(span).get("fusionkv.degraded") for _, span in run.trace("degraded")]
    # The worker's RPC, and the gateway's chat.
    assert [*filter(None, marked)] == [run.summaries["degraded"].degraded_reason] * 2
    assert run.received.total("fusionkv-worker", "fusionkv.worker.degraded") >= 1
    failed = {span.name for _, span in run.trace("degraded") if span.status.code == 2}
    assert "fusionkv.lookup" in failed
    assert not any(b"exception.stacktrace" in raw for raw in run.received.raw)
    refused = [span for _, span in run.received.spans if span.name.endswith("/Generate") and span.status.code == 2]
    assert any("no corpus" in span.status.message for span in refused)
    assert any(attributes(span).get("fusionkv.cancelled") for _, span in run.received.spans)


def test_spans_are_as_the_genai_conventions_ask(run: Run) -> None:
    ends = set()
    for _, span in run.received.spans:
        told = attributes(span)
        if (operation := told.get("gen_ai.operation.name")) is not None:
            assert {"gen_ai.provider.name", REQUIRED[operation]} <= told.keys(), span.name
            assert ("error.type" in told) == (span.status.code == 2), span.name
            ends.add((operation, told.get("error.type")))
    assert ends == {("chat", "RESOURCE_EXHAUSTED"), ("retrieval", "NOT_FOUND"), *((name, None) for name in REQUIRED)}


def own(names: Any) -> set[str]:
    return {name for name in names if name.startswith("fusionkv.")}


def test_the_registry_lists_what_is_told(run: Run, registry: dict[str, Any]) -> None:
    """Nothing else is told, and all but the rare is."""
    spans = {span["name"]: span for span in registry["spans"]}
    told: dict[str, set[str]] = {name: set() for name in spans}
    for service, span in run.received.spans:
        name = "chat <model>" if span.name.startswith("chat ") else span.name
        mine = own(attributes(span))
        if name in spans:
            told[name] |= mine
            assert spans[name]["service"] == service
            assert mine <= set(spans[name].get("attributes", [])), name
        else:
            assert RPC.fullmatch(name) or name == "POST /v1/chat/completions", name
            assert mine <= {"fusionkv.degraded"}
        assert all(own(attributes(link)) == {"fusionkv.link"} for link in span.links if link.attributes)
    seen = {"chat <model>" if s.name.startswith("chat ") else s.name for _, s in run.received.spans}
    assert {name for name, span in spans.items() if not span.get("rare")} <= seen
    metrics = {metric["name"]: metric for metric in registry["metrics"]}
    for (_, name), metric in run.received.metrics.items():
        keys = {key for point in points(metric) for key in attributes(point)}
        assert keys <= set(metrics[name].get("attributes", [])), name
    common = {name for name, metric in metrics.items() if not metric.get("rare")}
    assert common <= {name for _, name in run.received.metrics}
    used = {a for each in (*spans.values(), *metrics.values()) for a in own(each.get("attributes", []))}
    assert used | {"fusionkv.link"} == set(registry["attributes"])


def test_prometheus_scrapes_the_same(run: Run, registry: dict[str, Any]) -> None:
    for metric in registry["metrics"]:
        service = f"fusionkv-{metric['name'].split('.')[1]}"
        name = metric["prometheus"].removesuffix("_total")
        if not metric.get("rare"):
            assert name in run.scraped[service], metric["name"]
        family = run.scraped.get(service, {}).get(name)
        labels = {label for sample in family.samples for label in sample.labels} if family else set()
        assert labels <= {"le", *(a.replace(".", "_") for a in metric.get("attributes", []))}, name
    # As an alert asks for it.
    same = run.scraped["fusionkv-worker"]["fusionkv_worker_shadow_answers"].samples
    assert {s.labels["fusionkv_same_answer"] for s in same} <= {"true", "false"}
    hits = run.scraped["fusionkv-gateway"]["fusionkv_gateway_chunks"].samples
    assert {s.labels["fusionkv_kind"] for s in hits} >= {"miss", "exact"}
    (tenant,) = {s.labels["fusionkv_tenant"] for s in hits}
    assert tenant == hashlib.sha256(b"acme").hexdigest()[:16]


def test_a_figure_leads_to_its_trace(run: Run) -> None:
    """Exemplars: over OTLP, and at the scrape endpoint."""
    wanted = {s.trace_id for s in run.summaries.values()}
    for name in (("fusionkv-gateway", "fusionkv.gateway.ttft"), ("fusionkv-worker", "fusionkv.worker.ttft")):
        assert run.received.exemplars[name] & wanted, name
        service, metric = name
        buckets = run.scraped[service][metric.replace(".", "_") + "_seconds"].samples
        assert {bucket.exemplar.labels["trace_id"] for bucket in buckets if bucket.exemplar} & wanted, name


def test_the_log_is_json_with_one_line_a_request(run: Run) -> None:
    """In the logs of all three services together, but for who a tenant is, which is said once."""
    # Faults belong to no request: the one that met them says so itself, as `degraded`.
    assert "the cache failed; the prompt is prefilled in full" in "".join(line["message"] for line in run.log)
    lines = [line for line in run.log if "trace_id" in line and line["logger"] != "fusionkv.gateway.auth.tenants"]
    assert {line["logger"] for line in lines} == {"fusionkv.gateway.auth.admission"}
    assert len({line["trace_id"] for line in lines}) == len(lines)
    by_trace = {line["trace_id"]: line for line in lines}
    for summary in run.summaries.values():
        line = by_trace[summary.trace_id]
        assert (line["method"], line["status"], line["recipe"]) == ("Generate", "OK", summary.recipe)
        assert line.get("degraded", "") == summary.degraded_reason
    assert {line["status"] for line in lines} == {"OK", "NOT_FOUND", "RESOURCE_EXHAUSTED", "CANCELLED"}
    assert any(f"tenant acme is {hashlib.sha256(b'acme').hexdigest()[:16]}" in line["message"] for line in run.log)
