"""Workers that fail: the gateway's log says so once, and not for every request that met them."""

import json
import logging

import pytest
from opentelemetry import trace

from fusionkv.gateway.workers import workers
from fusionkv.gateway.workers.workers import WorkerPool
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime.errors import Unavailable
from tests.ports import free_port


async def test_no_line_for_each_request_and_worker(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caplog.handler, "formatter", logs.JSONLines("fusionkv-gateway"))
    monkeypatch.setattr(workers, "_faults", logs.RateLimitedLog(logging.getLogger(workers.__name__)))
    pool = WorkerPool([f"127.0.0.1:{free_port()}" for _ in range(2)])
    with trace.use_span(trace.NonRecordingSpan(trace.SpanContext(1, 2, is_remote=False))):
        for _ in range(2):
            with pytest.raises(Unavailable):
                await anext(pool.generate(pb.GenerateRequest(), 60.0))
    await pool.close()
    (line,) = [json.loads(line) for line in caplog.text.splitlines() if "fusionkv.gateway" in line]
    assert line["message"].startswith("a worker failed")
    assert "trace_id" not in line
