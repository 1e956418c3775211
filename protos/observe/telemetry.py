"""OpenTelemetry: other modules use its API only; this one sets up the SDK at launch, if telemetry is configured.

Standard environment variables configure it: an OTLP endpoint enables export; OTEL_TRACES_EXPORTER and
OTEL_METRICS_EXPORTER can disable traces or metrics; the SDK itself reads those for samplers, processors and
exporters. If a service has an address for it, Prometheus can scrape the same metrics. docs/telemetry.yaml lists all
names.
"""

import logging
import os
import re
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from opentelemetry import metrics, trace
from opentelemetry.trace import Status, StatusCode

from fusionkv.protos.observe import logs, rejected
from fusionkv.protos.runtime import process
from fusionkv.protos.runtime.errors import details, first_line
from fusionkv.protos.runtime.settings import extra

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader

log = logging.getLogger(__name__)
# Histogram bounds. The SDK's defaults start at 5 and are meant for milliseconds.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
NATS = (0.0001, 0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
# Timeout for reading a scraper's request, and the connections of all scrapers together.
_SCRAPE_SECONDS, _MAX_SCRAPES = 10.0, 16
_DETACH_SECONDS = 1.0
# A header with a name that gRPC accepts and a value that the SDK accepts.
_HEADER = re.compile(r"[0-9A-Za-z_.-]+[ \t]*=[ \t]*([\x20\x21\x23-\x2b\x2d-\x3a\x3c-\x5b\x5d-\x7e]*)")
_PRINTABLE = re.compile(r"[\x20-\x7e]*")


def attach(service: str, scraped_at: str = "") -> None:
    """Sets up logging; exports to an OTLP endpoint if one is configured, and serves Prometheus at `scraped_at`.

    Args:
        service: the service's name, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES set another.
        scraped_at: host:port of the scrape endpoint; empty for none.

    Raises:
        ValueError: a setting is invalid, or a package is missing.
        OSError: the address can't be bound.
    """
    logs.attach(service)
    rejected.attach()
    traces, measurements = _exported("TRACES"), _exported("METRICS")
    readers: list[MetricReader] = [_scraped(service, scraped_at)] if scraped_at else []
    if traces or measurements or readers:
        try:
            _attach_sdk(service, traces, measurements, readers)
        except Exception as error:  # the SDK raises any, and seldom names the variable
            raise ValueError(f"a variable of OpenTelemetry (OTEL_...) can't be used: {first_line(error)}") from error


def _attach_sdk(service: str, traces: bool, measurements: bool, readers: "list[MetricReader]") -> None:
    """Exports traces, and metrics also to `readers`."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    # The environment takes precedence; `create` would do the opposite.
    ours = Resource.create({"service.name": service, "service.namespace": "fusionkv"})
    resource = ours.merge(OTELResourceDetector().detect())
    if traces:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from fusionkv.protos.observe.redaction import RedactingExporter

        tracing = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = RedactingExporter(OTLPSpanExporter(channel_options=_channel("TRACES")))
        tracing.add_span_processor(BatchSpanProcessor(exporter))
        trace.set_tracer_provider(tracing)
    if measurements:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        readers.append(PeriodicExportingMetricReader(OTLPMetricExporter(channel_options=_channel("METRICS"))))
    if readers:
        from opentelemetry.sdk.metrics import MeterProvider

        metrics.set_meter_provider(MeterProvider(readers, resource, shutdown_on_exit=False))


def _variable(name: str) -> str:
    return os.environ.get(name, "").strip()


def _otlp(signal: str, name: str) -> str:
    return _variable(f"OTEL_EXPORTER_OTLP_{signal}_{name}") or _variable(f"OTEL_EXPORTER_OTLP_{name}")


def _channel(signal: str) -> Any:
    """gRPC's options for the channel to the collector of TRACES or METRICS."""
    endpoint = _otlp(signal, "ENDPOINT")
    host = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}").hostname
    return (("grpc.enable_http_proxy", 0),) if process.is_near(host or "") else None


def _exported(signal: str) -> bool:
    """Whether TRACES or METRICS are exported by OTLP. Raises ValueError if another exporter or protocol is set."""
    exporter = _variable(f"OTEL_{signal}_EXPORTER") or "otlp"
    if not _otlp(signal, "ENDPOINT") or exporter == "none":
        return False
    if exporter != "otlp":
        raise ValueError(f"OTEL_{signal}_EXPORTER must be otlp or none, not {exporter!r}")
    if (protocol := _otlp(signal, "PROTOCOL") or "grpc") != "grpc":
        raise ValueError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r} for {signal.lower()}: only grpc is supported, which "
            "collectors serve on port 4317"
        )
    if not all(map(_sendable, _otlp(signal, "HEADERS").split(","))):
        raise ValueError(
            f"OTEL_EXPORTER_OTLP_HEADERS has an invalid header for {signal.lower()}: write name=value, the value "
            "URL-encoded (%22 for a quotation mark) and without line breaks, separated by commas"
        )
    return True


def _sendable(header: str) -> bool:
    """Whether the SDK accepts a header and gRPC can send it: both log refused headers with their values."""
    match = _HEADER.fullmatch(header.strip())
    return not header.strip() or (match is not None and _PRINTABLE.fullmatch(unquote(match[1])) is not None)


def _scraped(service: str, address: str) -> "MetricReader":
    """Serves the metrics at http://address/metrics in a separate thread."""
    with extra("prometheus", "metrics_listen"):
        from prometheus_client import start_http_server

        from fusionkv.protos.observe.exemplars import Exemplified
    host, _, port = address.rpartition(":")
    if address.startswith("unix:"):
        raise ValueError(f"metrics_listen must be host:port, not {address!r}")
    process.check_ports([address], "--metrics-listen")
    registry = Exemplified()
    server, _ = start_http_server(int(port), host.strip("[]"), registry)
    # By default, Python prints a traceback for each broken connection, and waits forever for a silent one.
    server.handle_error = lambda request, client_address: None  # type: ignore[method-assign]
    setattr(server.RequestHandlerClass, "timeout", _SCRAPE_SECONDS)  # noqa: B010 - mypy sees a callable
    # Each has a thread, also if it says nothing. Further ones are closed.
    server.verify_request = lambda request, client_address: _scrapes() < _MAX_SCRAPES  # type: ignore[method-assign]
    log.info("%s: metrics at http://%s:%d/metrics", service, host, server.server_port)
    return registry.reader


def _scrapes() -> int:
    """Number of scrapers' connections."""
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def detach() -> None:
    """Sends buffered telemetry for at most a second. Call it once, before the process ends."""
    providers = (trace.get_tracer_provider(), metrics.get_meter_provider())
    shutdowns = [provider.shutdown for provider in providers if hasattr(provider, "shutdown")]
    # Retries for a collector that can't be reached take 7 to 9 s.
    threads = [threading.Thread(target=shutdown, daemon=True) for shutdown in shutdowns]
    for thread in threads:
        thread.start()
    until = time.monotonic() + _DETACH_SECONDS
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def record_error(error: Exception) -> None:
    span = trace.get_current_span()
    span.record_exception(error, {"exception.message": details(error)})
    span.set_status(Status(StatusCode.ERROR, details(error)))


def trace_id() -> str:
    """The current trace's id in hexadecimal; empty outside a recording trace."""
    span = trace.get_current_span()
    return trace.format_trace_id(span.get_span_context().trace_id) if span.is_recording() else ""
