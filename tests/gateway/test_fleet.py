"""Several workers behind a gateway: one that stands still is not waited for; those of a DNS name come and go."""

import asyncio
import json
import logging
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from opentelemetry import trace

from fusionkv.gateway.client.client import Client
from fusionkv.gateway.workers import fleet, workers
from fusionkv.gateway.workers.workers import WorkerPool
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime.errors import Unavailable
from tests.ports import free_port
from tests.services import Launch, start_cache, start_gateway, start_worker
from tests.waiting import until


@pytest.mark.system
@pytest.mark.slow
def test_a_worker_that_stands_still_is_not_waited_for(launch: Launch, tiny_model: Path, tmp_path: Path) -> None:
    workers = [start_worker(launch, tiny_model) for _ in range(2)]
    gateway = start_gateway(launch, tmp_path, workers)
    # Far more than it takes, and far less than the 300 s after which a silent worker's call would end.
    with Client(gateway.address, timeout=60) as client:
        for i in range(4):
            client.ingest("c", f"{i}.txt", f"page about subject{i} and nothing else")
        for worker in workers:
            worker.process.send_signal(signal.SIGSTOP)
            for i in range(4):
                summary = client.ask("c", f"subject{i}?", top_k=1, max_tokens=2).summary
                assert summary.tokens_generated == 2
            worker.process.send_signal(signal.SIGCONT)


@pytest.mark.system
@pytest.mark.slow
async def test_a_worker_that_stops_right_after_it_was_heard_is_not_waited_for(
    launch: Launch, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given the request unasked; then nothing comes."""
    monkeypatch.setattr(fleet, "_FRESH_SECONDS", 600.0)
    processes = {w.address: w for w in (start_worker(launch, tiny_model) for _ in range(2))}
    pool = workers.WorkerPool([*processes])
    await until(lambda: all(member.client.connected for member in pool._fleet.members))
    for member in pool._fleet.members:
        member.record_reply()
    question, sampling = pb.Tokens(ids=[1, 2, 3]), pb.Sampling(max_tokens=2)
    request = pb.GenerateRequest(question=question, sampling=sampling, recipe="full_attention", ratio=1.0)
    first, _ = await pool._order({})
    process = processes[first.client.address].process
    process.send_signal(signal.SIGSTOP)
    try:
        # Without a limit of its own a call to it would end after 40 s, with its connection.
        async with asyncio.timeout(25):
            answer = [response async for response in pool.generate(request, 600)]
    finally:
        process.send_signal(signal.SIGCONT)
    assert answer[-1].summary.tokens_generated == 2
    assert first.deprioritised
    assert first.in_flight == 0
    await pool.close()


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize("heard", [True, False])
async def test_what_is_encoded_does_not_wait_for_a_worker_that_stands_still(
    launch: Launch, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: bool
) -> None:
    """Found out by a health check: before it is given the request, or while nothing comes."""
    cache = start_cache(launch, tmp_path)
    started = [start_worker(launch, tiny_model, cache=cache) for _ in range(2)]
    processes = {worker.address: worker for worker in started}
    monkeypatch.setattr(fleet, "_FRESH_SECONDS", 600.0 if heard else 0.0)
    monkeypatch.setattr(fleet, "_MIN_BACKOFF", 600.0)
    pool = workers.WorkerPool([*processes])
    await until(lambda: all(member.client.connected for member in pool._fleet.members))
    for member in pool._fleet.members:
        member.record_reply()
    first, _ = await pool._order({})
    chunk, mode = pb.Tokens(ids=[1, 2, 3]), pb.EncodeRequest.MODE_NEIGHBOURS
    process = processes[first.client.address].process
    process.send_signal(signal.SIGSTOP)
    try:
        encoded = await pool.encode(pb.EncodeRequest(chunk=chunk, mode=mode))
        # And not when its connection ended, after 40 s.
        assert first.deprioritised
    finally:
        process.send_signal(signal.SIGCONT)
    assert not encoded.existed
    assert first.in_flight == 0
    await pool.close()


@pytest.mark.system
async def test_a_name_that_cannot_be_one_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    pool = workers.WorkerPool(["dns:a..b:7071"])
    with pytest.raises(Unavailable, match="the name in `workers` has no address"):
        async with asyncio.timeout(60):
            await pool.model()
    assert "can't resolve dns:a..b:7071" in caplog.text
    assert not any(task.done() for task in pool._fleet._resolving)
    await pool.close()


@pytest.fixture
def hosts(tmp_path: Path) -> tuple[Path, tuple[str, ...]]:
    """A file that a process started with the command reads as /etc/hosts."""
    file = tmp_path / "hosts"
    file.write_text("127.0.0.1 localhost\n")
    script = f'mount --bind {file} /etc/hosts && exec "$@"'
    before = ("unshare", "--map-root-user", "--mount", "sh", "-c", script, "--")
    if not shutil.which("unshare") or subprocess.run([*before, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mounts: needs root, or user namespaces, and unshare (apt-get install util-linux)")
    return file, before


@pytest.mark.system
@pytest.mark.slow
def test_workers_of_a_name_come_and_go(
    launch: Launch, tiny_model: Path, tmp_path: Path, hosts: tuple[Path, tuple[str, ...]]
) -> None:
    file, before = hosts
    port = free_port()
    first = start_worker(launch, tiny_model, "--listen", f"127.0.0.1:{port}")
    file.write_text("127.0.0.1 localhost workers.test\n")
    gateway = start_gateway(launch, tmp_path, first, "--workers", f"dns:workers.test:{port}", before=before)
    with Client(gateway.address, timeout=60) as client:
        client.ingest("c", "a.txt", "some text")
        assert client.stats().worker == f"127.0.0.1:{port}"
        second = start_worker(launch, tiny_model, "--listen", f"127.0.0.2:{port}")
        # In place: the mount is of the file, not of its name.
        file.write_text("127.0.0.2 workers.test\n127.0.0.1 localhost\n")
        gateway.wait_for_line(f"added worker of dns:workers.test:{port}: 127.0.0.2:{port}")
        gateway.wait_for_line(f"removed worker of dns:workers.test:{port}: 127.0.0.1:{port}")
        first.kill9()
        assert client.ask("c", "a question?", max_tokens=2).summary.tokens_generated == 2
        assert client.stats().worker == second.address
        file.write_text("127.0.0.1 localhost\n")
        gateway.wait_for_line("keeping its known workers")
        assert client.ask("c", "another?", max_tokens=2).summary.tokens_generated == 2


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
