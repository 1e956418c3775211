"""Logging: readable lines, or one JSON object per line with the trace that it belongs to.

Of an error, the log has the type and the traceback, but not the message, which may quote a caller's input.
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

# Key for additional fields of the JSON form: `extra={FIELDS: {"name": value}}`.
FIELDS = "fields"
# Maximum number of chained errors in one log record.
_MAX_CAUSES = 8
_ErrorInfo: TypeAlias = "tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]"


def attach(service: str) -> None:
    """Sets up the process's log: FUSIONKV_LOG is its level, FUSIONKV_LOG_FORMAT `text` or `json`.

    Raises ValueError if the level or the format is unknown.
    """
    form = _form()
    if form not in ("text", "json"):
        raise ValueError(f"FUSIONKV_LOG_FORMAT must be text or json, not {form!r}")
    level = (os.environ.get("FUSIONKV_LOG") or "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        raise ValueError(f"FUSIONKV_LOG must be debug, info, warning or error, not {level.lower()!r}")
    handler = logging.StreamHandler()
    text = _Lines(f"%(asctime)s %(levelname)s {service} %(name)s: %(message)s")
    handler.setFormatter(JSONLines(service) if as_json() else text)
    logging.basicConfig(level=level, handlers=[handler])
    # If a client disconnects, the garbage collector may close a stream's generator in another context. The span ends
    # properly, but OpenTelemetry logs a traceback because it can't restore the context.
    logging.getLogger("opentelemetry.context").setLevel(logging.CRITICAL)
    # If it disconnects before its call begins, it has no address, of which there was a line for each call.
    logging.getLogger("opentelemetry.instrumentation.grpc._server").setLevel(logging.ERROR)


def as_json() -> bool:
    """Whether logs are JSON lines."""
    return _form() == "json"


def _form() -> str:
    return (os.environ.get("FUSIONKV_LOG_FORMAT") or "text").lower()


class RateLimitedLog:
    """Limits warnings that many requests may cause to one line in `seconds`, with the number of suppressed ones.

    The lines belong to no trace: each request has one log record only, the gateway's.
    """

    def __init__(self, log: logging.Logger, seconds: float = 60.0) -> None:
        self._log = log
        self._seconds = seconds
        self._next = -math.inf
        self._suppressed = 0

    def warning(self, message: str, error: Exception | None = None) -> None:
        """Logs the message and the error, if any, unless the limit is reached."""
        now = time.monotonic()
        if now < self._next:
            self._suppressed += 1
            return
        more = f" ({self._suppressed} more since the last such line)" if self._suppressed else ""
        self._next, self._suppressed = now + self._seconds, 0
        with trace.use_span(trace.INVALID_SPAN):
            self._log.warning("%s%s%s", message, f": {error}" if error is not None else "", more)


def kind(error: BaseException) -> str:
    """An error's type, with the system's message for an OSError, but without other text."""
    cls = type(error)
    name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    return f"{name}: {error.strerror}" if isinstance(error, OSError) and error.strerror else name


def stack(error: BaseException) -> str:
    """The traceback of an error and its causes in Python's format, without their messages."""
    parts: list[str] = []
    at: BaseException | None = error
    while at is not None and len(parts) < _MAX_CAUSES:
        lines = "".join(traceback.format_tb(at.__traceback__))
        inner = "".join(f"\n{stack(one)}" for one in getattr(at, "exceptions", ())[:_MAX_CAUSES])
        parts.append(f"Traceback (most recent call last):\n{lines}{kind(at)}{inner}")
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return "\n\nThis led to:\n\n".join(reversed(parts))


def unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Exception handler of the event loop. asyncio's default would log the task or callback with its arguments."""
    error = context.get("exception")
    if isinstance(error, OSError):
        # Broken connections, and too many open files.
        _connections.warning(f"a connection failed: {kind(error)}")
    else:
        log.error("%s", "unhandled error in a task" if error else context["message"], exc_info=error)


_connections = RateLimitedLog(log)


class _Lines(logging.Formatter):
    def formatException(self, ei: _ErrorInfo) -> str:
        return stack(ei[1]) if ei[1] is not None else ""


class JSONLines(logging.Formatter):
    """One JSON object per line: time (RFC 3339, UTC), level, service, logger, message and the call's fields.

    If applicable, also the exception, and trace_id and span_id of the current trace.
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
