"""The log: what a line says, and faults that many requests meet."""

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace

from fusionkv.protos import logs

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
    often, seldom = logs.Seldom(log, 0.0), logs.Seldom(log, 1e6)
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
    seldom = logs.Seldom(log, 60.0)
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
from fusionkv.protos import logs

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
    ended = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert not ended.stdout + ended.stderr
