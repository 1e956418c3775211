"""Counts input refused before it becomes a request, and logs at most one line per minute and kind.

Neither contains any of the input, which may hold a token.
"""

import logging
from collections.abc import Mapping

from opentelemetry import metrics

from fusionkv.protos.observe import logs

log = logging.getLogger(__name__)
_rejected = metrics.get_meter(__name__).create_counter(
    "fusionkv.rejected", description="input refused before it became a request, by kind"
)
KINDS: Mapping[str, str] = {
    "grpc_message": "a message of a call could not be parsed",
    "grpc_message_timeout": "the message of a call did not arrive in time",
    "grpc_send_timeout": "a client did not read the responses of a call in time",
    "http_body": "the body of an HTTP request was malformed",
    "http_body_timeout": "the body of an HTTP request took longer than http_body_seconds",
    "http_connections": "an HTTP connection was refused: the limit http_connections is reached",
    "http_connections_per_address": (
        "an HTTP connection was refused: the limit http_connections_per_address is reached"
    ),
    "http_head": "the head of an HTTP request was malformed or too large",
    "http_head_timeout": "the head of an HTTP request took longer than http_head_seconds",
    "http_pipelined": "an HTTP client sent 32 or more requests without waiting for a response",
    "http_send_timeout": "an HTTP client did not read its response for http_send_seconds",
    "tls_handshake": "a TLS handshake failed",
    "trace_headers": "a caller's trace headers were malformed or too long",
}
"""The log message for each kind."""
_lines = {kind: logs.RateLimitedLog(log) for kind in KINDS}
# Loggers that quote headers which they can't parse, and contents of documents.
_OF_HEADERS = ("opentelemetry.baggage", "opentelemetry.trace")
_OF_DOCUMENTS = ("pypdf",)


def note(kind: str, reason: str = "") -> None:
    """Counts one input of a kind in KINDS; `reason`, for the log, holds none of the input."""
    _rejected.add(1, {"fusionkv.kind": kind})
    _lines[kind].warning(f"{KINDS[kind]}: {reason}" if reason else KINDS[kind])


def attach() -> None:
    """Suppresses libraries' logs of callers' input; counts malformed trace headers. Call it after `logs.attach`."""

    def passes(record: logging.LogRecord) -> bool:
        if record.name.startswith(_OF_HEADERS):
            if record.levelno >= logging.WARNING:
                note("trace_headers")
            return False
        return not record.name.startswith(_OF_DOCUMENTS)

    for handler in logging.getLogger().handlers:
        handler.addFilter(passes)
