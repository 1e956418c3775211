"""OpenTelemetry: code elsewhere calls only its API; the SDK is attached here, at launch, when an endpoint is set.

Standard environment variables decide: OTEL_EXPORTER_OTLP_ENDPOINT switches export on, OTEL_TRACES_SAMPLER,
OTEL_RESOURCE_ATTRIBUTES, OTEL_METRIC_EXPORT_INTERVAL and the rest are read by the SDK itself.
"""

import logging
import os
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.trace import Status, StatusCode

from fusionkv.protos.errors import details


def attach(service: str) -> None:
    """Sets up logging and, when an OTLP endpoint is configured, exports traces and metrics to it."""
    logging.basicConfig(
        level=os.environ.get("FUSIONKV_LOG", "INFO").upper(),
        format=f"%(asctime)s %(levelname)s {service} %(name)s: %(message)s",
    )
    if not os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": service, "service.namespace": "fusionkv"})
    tracing = TracerProvider(resource=resource)
    tracing.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(tracing)
    metrics.set_meter_provider(MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())], resource))


def detach() -> None:
    """Sends what is still buffered; called once, before the process ends."""
    for provider in (trace.get_tracer_provider(), metrics.get_meter_provider()):
        shutdown = getattr(provider, "shutdown", None)
        if shutdown is not None:
            shutdown()


def server_interceptors() -> list[Any]:
    """Interceptors that continue the caller's trace, one span an RPC."""
    from opentelemetry.instrumentation.grpc import aio_server_interceptor, filters

    return [aio_server_interceptor(filter_=filters.negate(filters.health_check()))]


def client_interceptors() -> list[Any]:
    """Interceptors that hand the current trace on, one span an RPC."""
    from opentelemetry.instrumentation.grpc import aio_client_interceptors

    return list(aio_client_interceptors())


def record_error(error: Exception) -> None:
    """Marks the current span as failed."""
    span = trace.get_current_span()
    span.record_exception(error, {"exception.message": details(error)})
    span.set_status(Status(StatusCode.ERROR, details(error)))


def trace_id() -> str:
    """The current trace's id in hexadecimal, empty outside a recording trace."""
    context = trace.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""
