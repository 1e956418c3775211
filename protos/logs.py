"""The log: as lines for people, or as one JSON object a line with the trace that it belongs to."""

import datetime
import json
import logging
import math
import os
import time

from opentelemetry import trace

# What a call of the logger may add for the JSON form: `extra={FIELDS: {"name": value}}`.
FIELDS = "fields"


def attach(service: str) -> None:
    """Sets the process's log up: FUSIONKV_LOG is its level, FUSIONKV_LOG_FORMAT `text` or `json`.

    Raises:
        ValueError: one of the two is none of these.
    """
    form = os.environ.get("FUSIONKV_LOG_FORMAT", "text").lower()
    if form not in ("text", "json"):
        raise ValueError(f"FUSIONKV_LOG_FORMAT is {form!r}: text or json")
    handler = logging.StreamHandler()
    text = logging.Formatter(f"%(asctime)s %(levelname)s {service} %(name)s: %(message)s")
    handler.setFormatter(JSONLines(service) if form == "json" else text)
    logging.basicConfig(level=os.environ.get("FUSIONKV_LOG", "INFO").upper(), handlers=[handler])
    # Of a stream whose caller went away, the garbage collector may end the generator, in a context of its own. Its
    # span ends all the same, but OpenTelemetry says with a traceback that there was nothing to go back to.
    logging.getLogger("opentelemetry.context").setLevel(logging.CRITICAL)


class Seldom:
    """Faults that many requests may meet: at most one line in `seconds`, with how many there were since the last. It
    belongs to no trace, since of a request there is one line, the gateway's.
    """

    def __init__(self, log: logging.Logger, seconds: float = 60.0) -> None:
        self._log = log
        self._seconds = seconds
        self._next = -math.inf
        self._unsaid = 0

    def warning(self, message: str, error: Exception) -> None:
        """`message` and the error, or nothing."""
        now = time.monotonic()
        if now < self._next:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} more since the last such line)" if self._unsaid else ""
        self._next, self._unsaid = now + self._seconds, 0
        with trace.use_span(trace.INVALID_SPAN):
            self._log.warning("%s: %s%s", message, error, more)


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
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps({**line, **getattr(record, FIELDS, {})}, ensure_ascii=False, default=str)
