"""The log: what a line says, and faults that many requests meet."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace

from fusionkv.protos.observe import logs
from tests.commands import run_python

SPAN = trace.NonRecordingSpan(trace.SpanContext(1, 2, is_remote=False))


@pytest.fixture
def logger() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    """One that writes JSON, and what it wrote."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logs.JSONLines("fusionkv-test"))
    made = logging.getLogger(__name__)
    made.addHandler(handler)
    yield made, written
    made.removeHandler(handler)


def lines(written: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in written.getvalue().splitlines()]


def test_a_line_names_its_trace(logger: tuple[logging.Logger, io.StringIO]) -> None:
    log, written = logger
    with trace.use_span(SPAN):
        log.warning("so %s", "it is", extra={logs.FIELDS: {"status": "OK"}})
    (line,) = lines(written)
    assert (line["message"], line["level"], line["status"]) == ("so it is", "WARNING", "OK")
    assert (line["trace_id"], line["span_id"]) == (f"{1:032x}", f"{2:016x}")
    assert (line["service"], line["logger"]) == ("fusionkv-test", __name__)


def test_a_fault_of_many_requests_is_one_line_and_no_requests_own(
    logger: tuple[logging.Logger, io.StringIO],
) -> None:
    log, written = logger
    often, seldom = logs.RateLimitedLog(log, 0.0), logs.RateLimitedLog(log, 1e6)
    with trace.use_span(SPAN):
        for i in range(3):
            seldom.warning("it fails", ValueError(f"number {i}"))
            assert trace.get_current_span() is SPAN
        assert [line["message"] for line in lines(written)] == ["it fails: number 0"]
        often.warning("again", ValueError("a"))
        often.warning("again", ValueError("b"))
    assert [line["message"] for line in lines(written)] == ["it fails: number 0", "again: a", "again: b"]
    assert not any("trace_id" in line for line in lines(written))


def test_what_was_not_said_is_counted(
    logger: tuple[logging.Logger, io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, written = logger
    now = 0.0
    monkeypatch.setattr(logs, "time", SimpleNamespace(monotonic=lambda: now))
    seldom = logs.RateLimitedLog(log, 60.0)
    for now in (5.0, 6.0, 64.0, 65.0, 130.0):
        seldom.warning("it fails", ValueError(f"at {now:g}"))
    assert [line["message"] for line in lines(written)] == [
        "it fails: at 5",
        "it fails: at 65 (2 more since the last such line)",
        "it fails: at 130",
    ]


@pytest.mark.parametrize("form", ["xml", "JSONL"])
def test_a_form_that_is_not_known_is_refused(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSIONKV_LOG_FORMAT", form)
    with pytest.raises(ValueError, match="text or json"):
        logs.attach("fusionkv-test")


def test_a_stream_that_the_garbage_collector_ends_is_no_line() -> None:
    """In a process of its own, whose log is set up as a service's is."""
    program = """
import contextvars
from opentelemetry import context
from fusionkv.protos.observe import logs

logs.attach("fusionkv-test")

def stream():
    token = context.attach(context.get_current())
    try:
        yield
    finally:
        context.detach(token)

left = stream()
contextvars.copy_context().run(next, left)
left.close()
"""
    ended = run_python("-c", program)
    assert not ended.stdout + ended.stderr


def test_an_error_is_its_type_and_its_place_and_nothing_that_it_says(
    logger: tuple[logging.Logger, io.StringIO],
) -> None:
    """With all that led to it, and those of a group."""
    log, written = logger
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
    assert text not in written.getvalue()
    (line,) = lines(written)
    for name in ("KeyError", "LookupError", "OSError: No space left on device", "ExceptionGroup", "test_logs.py"):
        assert name in line["exception"], line["exception"]
    assert line["exception"].index("KeyError") < line["exception"].index("ExceptionGroup")


def test_causes_that_go_round_end() -> None:
    first, second = ValueError(), KeyError()
    first.__cause__, second.__cause__ = second, first
    assert 1 <= logs.stack(first).count("ValueError") <= 8


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


def test_what_libraries_log_of_callers_headers_is_counted_and_not_printed() -> None:
    """In a process of its own, whose log is set up as a service's is."""
    program = """
from opentelemetry import propagate
from fusionkv.protos.observe import telemetry

telemetry.attach("fusionkv-test")
for _ in range(3):
    propagate.extract({"baggage": "zq7secret", "traceparent": "00-" + "1" * 32 + "-" + "1" * 16 + "-01",
                       "tracestate": "zq7secret==, a=" + "zq7secret" * 100})
"""
    ended = run_python("-c", program)
    (line,) = ended.stderr.splitlines()
    assert line.endswith("a caller's trace headers were malformed or too long")
    assert not ended.stdout
