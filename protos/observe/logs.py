"""The log: as lines for people, or as one JSON object a line with the trace that it belongs to.

Of an error it has the type and the traceback, and no text: that may quote what a caller sent.
"""

import asyncio
import datetime
import json
import logging
import math
import os
import time
import traceback
from types import TracebackType
from typing import Any, TypeAlias

from opentelemetry import trace

log = logging.getLogger(__name__)

# What a call of the logger may add for the JSON form: `extra={FIELDS: {"name": value}}`.
FIELDS = "fields"
# Errors that one line shows of those that led to another.
_MOST_CAUSES = 8
_ErrorInfo: TypeAlias = "tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]"


def attach(service: str) -> None:
    """Sets the process's log up: FUSIONKV_LOG is its level, FUSIONKV_LOG_FORMAT `text` or `json`.

    Raises:
        ValueError: one of the two is none of these.
    """
    form = os.environ.get("FUSIONKV_LOG_FORMAT", "text").lower()
    if form not in ("text", "json"):
        raise ValueError(f"FUSIONKV_LOG_FORMAT is {form!r}: text or json")
    handler = logging.StreamHandler()
    text = _Lines(f"%(asctime)s %(levelname)s {service} %(name)s: %(message)s")
    handler.setFormatter(JSONLines(service) if form == "json" else text)
    logging.basicConfig(level=os.environ.get("FUSIONKV_LOG", "INFO").upper(), handlers=[handler])
    # Of a stream whose caller went away, the garbage collector may end the generator, in a context of its own. Its
    # span ends all the same, but OpenTelemetry says with a traceback that there was nothing to go back to.
    logging.getLogger("opentelemetry.context").setLevel(logging.CRITICAL)


class RateLimitedLog:
    """Faults that many requests may meet: at most one line in `seconds`, with how many there were since the last. It
    belongs to no trace, since of a request there is one line, the gateway's.
    """

    def __init__(self, log: logging.Logger, seconds: float = 60.0) -> None:
        self._log = log
        self._seconds = seconds
        self._next = -math.inf
        self._unsaid = 0

    def warning(self, message: str, error: Exception | None = None) -> None:
        """`message` and the error, if there is one; or nothing."""
        now = time.monotonic()
        if now < self._next:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} more since the last such line)" if self._unsaid else ""
        self._next, self._unsaid = now + self._seconds, 0
        with trace.use_span(trace.INVALID_SPAN):
            self._log.warning("%s%s%s", message, f": {error}" if error is not None else "", more)


def kind(error: BaseException) -> str:
    """An error's type; what the system says of an OSError, and no other text."""
    made = type(error)
    name = made.__qualname__ if made.__module__ == "builtins" else f"{made.__module__}.{made.__qualname__}"
    return f"{name}: {error.strerror}" if isinstance(error, OSError) and error.strerror else name


def stack(error: BaseException) -> str:
    """Where an error was raised, and those that led to it, as Python shows it but for their texts."""
    found: list[str] = []
    at: BaseException | None = error
    while at is not None and len(found) < _MOST_CAUSES:
        lines = "".join(traceback.format_tb(at.__traceback__))
        inner = "".join(f"\n{stack(one)}" for one in getattr(at, "exceptions", ())[:_MOST_CAUSES])
        found.append(f"Traceback (most recent call last):\n{lines}{kind(at)}{inner}")
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return "\n\nThis led to:\n\n".join(reversed(found))


def unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """For an event loop: what no task waits for. asyncio's own quotes the task or the callback and its arguments."""
    error = context.get("exception")
    if isinstance(error, OSError):
        # Connections that break, and more of them than the process may open.
        _connections.warning(f"a connection failed: {kind(error)}")
    else:
        log.error("%s", "an error that nobody waited for" if error else context["message"], exc_info=error)


_connections = RateLimitedLog(log)


class _Lines(logging.Formatter):
    """Lines for people."""

    def formatException(self, ei: _ErrorInfo) -> str:
        return stack(ei[1]) if ei[1] is not None else ""


class JSONLines(logging.Formatter):
    """One object a line: time (RFC 3339, UTC), level, service, logger, message, trace_id and span_id within a trace,
    exception where there was one, and the call's own fields.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            line["trace_id"], line["span_id"] = f"{context.trace_id:032x}", f"{context.span_id:016x}"
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = stack(record.exc_info[1])
        return json.dumps({**line, **getattr(record, FIELDS, {})}, ensure_ascii=False, default=str)
