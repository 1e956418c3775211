"""The log: what a line says, and faults that many requests meet; exemplars, read as Prometheus reads them."""

import asyncio
import contextlib
import io
import json
import logging
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import Metric
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from fusionkv.protos.observe import logs, telemetry
from fusionkv.protos.observe.exemplars import Exemplified
from fusionkv.protos.observe.redaction import RedactingExporter
from fusionkv.protos.runtime.errors import NotFound
from tests.commands import run_python

SPAN = trace.NonRecordingSpan(trace.SpanContext(1, 2, is_remote=False))


log = logging.getLogger(__name__)


class Written(logging.StreamHandler[io.StringIO]):
    """What a logger wrote as JSON."""

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]

    @property
    def messages(self) -> list[str]:
        return [line["message"] for line in self.lines]


@pytest.fixture
def written() -> Iterator[Written]:
    made = Written(io.StringIO())
    made.setFormatter(logs.JSONLines("fusionkv-test"))
    log.addHandler(made)
    yield made
    log.removeHandler(made)


def test_a_line_names_its_trace(written: Written) -> None:
    with trace.use_span(SPAN):
        log.warning("so %s", "it is", extra={logs.FIELDS: {"status": "OK"}})
    (line,) = written.lines
    said = {"message": "so it is", "level": "WARNING", "status": "OK", "service": "fusionkv-test", "logger": __name__}
    assert (said | {"trace_id": f"{1:032x}", "span_id": f"{2:016x}"}).items() <= line.items()


def test_a_fault_of_many_requests_is_one_line_and_no_requests_own(written: Written) -> None:
    often, seldom = logs.RateLimitedLog(log, 0.0), logs.RateLimitedLog(log, 1e6)
    with trace.use_span(SPAN):
        for i in range(3):
            seldom.warning("it fails", ValueError(f"number {i}"))
            assert trace.get_current_span() is SPAN
        often.warning("again", ValueError("a"))
        often.warning("again", ValueError("b"))
    assert written.messages == ["it fails: number 0", "again: a", "again: b"]
    assert not any("trace_id" in line for line in written.lines)


def test_what_was_not_said_is_counted(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(logs, "time", SimpleNamespace(monotonic=lambda: now))
    seldom = logs.RateLimitedLog(log, 60.0)
    for now in (5.0, 6.0, 64.0, 65.0, 130.0):
        seldom.warning("it fails", ValueError(f"at {now:g}"))
    counted = "it fails: at 65 (2 more since the last such line)"
    assert written.messages == ["it fails: at 5", counted, "it fails: at 130"]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        *(("FUSIONKV_LOG_FORMAT", form, "FUSIONKV_LOG_FORMAT must be text or json") for form in ("xml", "JSONL")),
        *(("FUSIONKV_LOG", level, f"must be debug, .* or error, not '{level}'") for level in ("verbose", "15")),
    ],
)
def test_a_form_or_a_level_that_is_not_known_is_refused(
    name: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=says):
        logs.attach("fusionkv-test")


_QUIET = """
import contextvars
import logging
from types import SimpleNamespace
from opentelemetry import context, propagate
from opentelemetry.instrumentation.grpc import aio_server_interceptor
from fusionkv.protos.observe import telemetry

telemetry.attach("fusionkv-test")

def stream():
    token = context.attach(context.get_current())
    try:
        yield
    finally:
        context.detach(token)

# A stream that the garbage collector ends, and a caller that left before its call began: nothing is said.
left = stream()
contextvars.copy_context().run(next, left)
left.close()
call = SimpleNamespace(method="/a.B/C", peer=lambda: "", invocation_metadata=lambda: ())
aio_server_interceptor()._start_span(call, call)
# Of malformed headers, one line, which quotes nothing.
for _ in range(3):
    propagate.extract({"baggage": "zq7secret", "traceparent": "00-" + "1" * 32 + "-" + "1" * 16 + "-01",
                       "tracestate": "zq7secret==, a=" + "zq7secret" * 100})
logging.info("it logs")
"""


def test_what_callers_do_is_one_line_at_most() -> None:
    """Where variables have no value, as Compose and systemd pass those that are not given."""
    ended = run_python("-c", _QUIET, env={"FUSIONKV_LOG": "", "FUSIONKV_LOG_FORMAT": ""})
    malformed, last = ended.stderr.splitlines()
    assert malformed.endswith("a caller's trace headers were malformed or too long")
    assert last.endswith(" INFO fusionkv-test root: it logs")
    assert not ended.stdout


def test_an_error_is_its_type_and_its_place_and_nothing_that_it_says(written: Written) -> None:
    text = "zq7secret"
    try:
        try:
            try:
                int(text)
            except ValueError as first:
                raise KeyError(text) from first
        except KeyError:
            raise ExceptionGroup(text, [LookupError(text), OSError(28, "No space left on device", text)]) from None
    except ExceptionGroup as group:
        group.__cause__ = KeyError(text)
        log.exception("it fails")
    assert text not in written.stream.getvalue()
    (line,) = written.lines
    for name in ("KeyError", "LookupError", "OSError: No space left on device", "ExceptionGroup", "test_logs.py"):
        assert name in line["exception"], line["exception"]
    assert line["exception"].index("KeyError") < line["exception"].index("ExceptionGroup")


def test_what_no_task_waits_for_is_logged_without_its_arguments(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(logs.unhandled)
        loop.call_soon(int, "zq7secret")
        for _ in range(3):
            loop.call_exception_handler({"message": "accept", "exception": OSError(24, "Too many open files", "zq7")})
        await asyncio.sleep(0)

    asyncio.run(run())
    said = [record.getMessage() for record in caplog.records]
    assert said.count("unhandled error in a task") == 1
    assert said.count("a connection failed: OSError: Too many open files") == 1
    assert "zq7secret" not in "".join(said)


def test_a_scrape_address_that_is_no_free_port_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        for address, says in (
            (taken, f"{taken} is in use by another program: stop it, or set another address with --metrics-listen"),
            ("127.0.0.1:90000", "--metrics-listen 127.0.0.1:90000: an address is host:port"),
            (":9464", "--metrics-listen :9464: an address is host:port"),
            ("unix:/tmp/s", "metrics_listen must be host:port"),
        ):
            with pytest.raises((OSError, ValueError), match=says):
                telemetry._scraped("fusionkv-test", address)


def test_scrapers_that_say_nothing_take_few_threads() -> None:
    """In a process of its own, since the server's thread stays."""
    program = """
import socket, threading, time, urllib.request
from fusionkv.protos.observe import telemetry

said = []
telemetry.log.info = lambda text, *values: said.append(values[-1])
telemetry._MAX_SCRAPES = 2
telemetry._scraped("fusionkv-test", "127.0.0.1:0")
at = "127.0.0.1", said[0]
silent = [socket.create_connection(at) for _ in range(4)]
assert [each.recv(1) for each in silent[2:]] == [b"", b""]
assert threading.active_count() == 2 + 2, threading.enumerate()
for each in silent:
    each.close()
while threading.active_count() > 2:
    time.sleep(0.01)
print(urllib.request.urlopen("http://%s:%d/metrics" % at).status)
"""
    assert run_python("-c", program).stdout == "200\n"


def test_each_bucket_leads_to_the_trace_that_it_last_had() -> None:
    registry = Exemplified()
    provider = MeterProvider([registry.reader])
    buckets = [0.1, 1.0]
    meter = provider.get_meter("test")
    histogram = meter.create_histogram("fusionkv.test.ttft", "s", explicit_bucket_boundaries_advisory=buckets)

    def record(value: float, trace_id: int, recipe: str = "a") -> None:
        sampled = trace.SpanContext(trace_id, 7, is_remote=False, trace_flags=trace.TraceFlags(1))
        with trace.use_span(trace.NonRecordingSpan(sampled)):
            histogram.record(value, {"fusionkv.recipe": recipe})

    def scraped() -> dict[tuple[str, str], tuple[str, float]]:
        """Trace and value, by recipe and bound."""
        families = {f.name: f for f in text_string_to_metric_families(generate_latest(registry).decode())}
        assert "process_start_time_seconds" in families
        found: Metric = families["fusionkv_test_ttft_seconds"]
        return {
            (s.labels["fusionkv_recipe"], s.labels["le"]): (s.exemplar.labels["trace_id"], s.exemplar.value)
            for s in found.samples
            if s.exemplar is not None
        }

    record(0.05, 1)
    record(5.0, 2)
    first = {("a", "0.1"): (f"{1:032x}", 0.05), ("a", "+Inf"): (f"{2:032x}", 5.0)}
    assert scraped() == first
    # It stays for the next scraper, until there is another.
    assert scraped() == first
    record(0.1, 3)
    record(0.5, 4, "b")
    assert scraped() == {**first, ("a", "0.1"): (f"{3:032x}", 0.1), ("b", "1.0"): (f"{4:032x}", 0.5)}
    # Outside a trace there is none to lead to.
    histogram.record(0.05, {"fusionkv.recipe": "c"})
    assert not [place for place in scraped() if place[0] == "c"]
    provider.shutdown()


_NATIVE = """
import os, sys, threading
from fusionkv.protos.observe import handshakes, logs
logs.attach("test")
handshakes.attach()
for number in range(100):
    os.write(2, b"I1 ssl_transport_security.cc:9] Handshake failed with error why\\n")
    os.write(2, b"native %d\\n" % number)
    print("ours", number, file=sys.stderr)
os.close(2)
[thread.join() for thread in threading.enumerate() if thread.name == "stderr"]
"""


def test_lines_of_libraries_pass_except_those_of_handshakes() -> None:
    lines = run_python("-c", _NATIVE).stderr.splitlines()
    for whose in ("native", "ours"):
        assert [line for line in lines if line.startswith(whose)] == [f"{whose} {number}" for number in range(100)]
    (failed,) = [line for line in lines if "andshake" in line]
    assert failed.endswith("rejected: a TLS handshake failed: why")


def test_a_span_tells_an_unexpected_error_as_the_log_does() -> None:
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(RedactingExporter(kept)))
    tracer = provider.get_tracer("test")
    for error in (KeyError("a secret"), NotFound("no corpus 'c'")):
        for record in (None, telemetry.record_error):  # by the SDK, and by a call's end
            with contextlib.suppress(KeyError, NotFound), tracer.start_as_current_span("s", attributes={"a": 1}):
                try:
                    raise error from ValueError("a secret")
                except (KeyError, NotFound) as caught:
                    if record is None:
                        raise
                    record(caught)
    spans = kept.get_finished_spans()
    assert "a secret" not in "".join(span.to_json() for span in spans)
    assert [span.status.description for span in spans] == [
        *("KeyError", "KeyError"),
        *("NotFound: no corpus 'c'", "no corpus 'c'"),
    ]
    types = [(span.events[0].attributes or {})["exception.type"] for span in spans]
    assert types == ["KeyError"] * 2 + ["fusionkv.protos.runtime.errors.NotFound"] * 2
    assert all(span.attributes == {"a": 1} and span.status.status_code is trace.StatusCode.ERROR for span in spans)
