"""Input that is refused before it becomes a request: counted, and a line a minute in the log for each kind.

Neither has anything of what was sent, which may hold a token.
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
    "http_body": "the body of an HTTP request was malformed",
    "http_body_timeout": "the body of an HTTP request took longer than http_body_seconds",
    "http_connections": "an HTTP connection was refused: http_connections are open",
    "http_connections_per_address": (
        "an HTTP connection was refused: http_connections_per_address are open from its address"
    ),
    "http_head": "the head of an HTTP request was malformed or too large",
    "http_head_timeout": "the head of an HTTP request took longer than http_head_seconds",
    "http_pipelined": "an HTTP caller sent 32 requests or more without waiting for a response",
    "http_send_timeout": "an HTTP caller read nothing of its response for http_send_seconds",
    "trace_headers": "a caller's trace headers were malformed or too long",
}
"""What the log says of each kind."""
_lines = {kind: logs.RateLimitedLog(log) for kind in KINDS}
# They log the headers that they can't read, and what is wrong with a document.
_OF_HEADERS = ("opentelemetry.baggage", "opentelemetry.trace")
_OF_DOCUMENTS = ("pypdf",)


def note(kind: str) -> None:
    """Counts one of a kind of KINDS."""
    _rejected.add(1, {"fusionkv.kind": kind})
    _lines[kind].warning(KINDS[kind])


def attach() -> None:
    """Keeps libraries from logging what callers sent; counts the headers among it. After `logs.attach`."""

    def passes(record: logging.LogRecord) -> bool:
        if record.name.startswith(_OF_HEADERS):
            if record.levelno >= logging.WARNING:
                note("trace_headers")
            return False
        return not record.name.startswith(_OF_DOCUMENTS)

    for handler in logging.getLogger().handlers:
        handler.addFilter(passes)
