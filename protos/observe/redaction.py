"""Spans without what unexpected errors say: as in the log, such a message may quote a caller's input."""

from collections.abc import Sequence

from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Status

from fusionkv.protos.runtime.errors import ServiceError


class RedactingExporter(SpanExporter):
    """Keeps an exception's type, and the message of a service error, which is meant for the caller; drops the rest.

    The SDK's stack traces repeat the messages of all causes; the log has them without.
    """

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return self._inner.export([self._redacted(span) if span.events else span for span in spans])

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)

    def _redacted(self, span: ReadableSpan) -> ReadableSpan:
        events, status = list[Event](), span.status
        for event in span.events:
            given = dict(event.attributes or {})
            kind = str(given.get("exception.type", ""))
            if given.pop("exception.stacktrace", None) is not None and kind not in _types(ServiceError):
                message = str(given.pop("exception.message"))
                if status.description in (message, f"{kind.rpartition('.')[2]}: {message}"):
                    status = Status(status.status_code, kind)
            events.append(Event(event.name, given, event.timestamp))
        return ReadableSpan(
            span.name,
            span.context,
            span.parent,
            span.resource,
            span.attributes,
            events,
            span.links,
            span.kind,
            status=status,
            start_time=span.start_time,
            end_time=span.end_time,
            instrumentation_scope=span.instrumentation_scope,
        )


def _types(kind: type) -> set[str]:
    """The names of a class and of those derived from it, as in a span."""
    return {f"{kind.__module__}.{kind.__qualname__}"}.union(*map(_types, kind.__subclasses__()))
