"""Services with few file descriptors: too few to start is an error, and with none left nothing is lost."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fusionkv.gateway.client.client import Client
from fusionkv.protos.runtime import errors
from tests.conftest import Service
from tests.processes import cpu_seconds
from tests.services import start_gateway, start_worker
from tests.system.cache_process import MIB, check_refused, flags, get, payload, put
from tests.waiting import until, wait_until

pytestmark = [pytest.mark.system, pytest.mark.slow]


def limited(files: int) -> tuple[str, ...]:
    """What a process is run with that may have so many files open."""
    return ("sh", "-c", f'ulimit -n {files}; exec "$@"', "-")


def seconds_computed(*services: Service) -> float:
    return sum(cpu_seconds(service.process.pid) for service in services)


def files_left(service: Service, files: int) -> int:
    return files - psutil.Process(service.process.pid).num_fds()


class Crowd(list[socket.socket]):
    """Connections that say nothing."""

    def connect(self, address: str, count: int) -> None:
        host, _, port = address.rpartition(":")
        for _ in range(count):
            self.append(socket.create_connection((host, int(port)), 10))

    def close(self) -> None:
        for one in self:
            one.close()


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    with contextlib.closing(Crowd()) as made:
        yield made


@pytest.mark.parametrize("name", ["kvcache", "worker", "gateway"])
@pytest.mark.parametrize("files", [8, 16, 24])
def test_too_few_to_start_is_said(tmp_path: Path, reference_model: Path, name: str, files: int) -> None:
    own = {
        "kvcache": flags(tmp_path),
        "worker": ["fusionkv.fusion_worker", "--listen", "127.0.0.1:0", "--model", str(reference_model)],
        "gateway": ["fusionkv.gateway", "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path)],
    }[name]
    check_refused(Service(*own, before=limited(files)), f"only {files} open files are allowed")


def test_a_cache_allows_itself_a_file_of_every_segment(launch: Any, tmp_path: Path) -> None:
    service = launch(*flags(tmp_path / "a", disk="100GiB"), before=("sh", "-c", 'ulimit -Sn 64; exec "$@"', "-"))
    soft, hard = psutil.Process(service.process.pid).rlimit(psutil.RLIMIT_NOFILE)
    assert soft == hard > 64
    few = Service(*flags(tmp_path / "b", disk="17GiB"), before=limited(64))
    check_refused(few, "only 64 open files are allowed, and a full disk tier needs 65: raise the limit (ulimit -n")


async def test_entries_stay_without_descriptors(launch: Any, cache_client: Any, tmp_path: Path, crowd: Crowd) -> None:
    files = 64
    first = launch(*flags(tmp_path))
    client = cache_client(first)
    for name in "ab":
        assert await put(client, name, payload(name, MIB))
    await client.close()
    assert first.stop() == 0
    service = launch(*flags(tmp_path), before=limited(files))
    # While it loads, it needs files for the check of its index, and ends without them.
    await asyncio.to_thread(service.wait_for_line, "2 entries, ")
    client = cache_client(service)
    assert await get(client, "none") is None  # a connection, and no segment file yet
    crowd.connect(service.address, files)
    await until(lambda: files_left(service, files) == 0)
    with pytest.raises(errors.Unavailable, match="Too many open files"):
        await get(client, "a")
    with pytest.raises(errors.ResourceExhausted, match="Too many open files"):
        await put(client, "c", payload("c", MIB))
    before = seconds_computed(service)
    await asyncio.sleep(1)
    assert seconds_computed(service) - before < 0.5
    crowd.close()
    await until(lambda: files_left(service, files) > 32)
    for name in "ab":
        assert await get(client, name) == payload(name, MIB)
    assert await put(client, "c", payload("c", MIB))
    assert service.stop() == 0
    assert "Traceback" not in service.log


@pytest.mark.long
def test_worker_and_gateway_outlast_a_crowd(launch: Any, tmp_path: Path, reference_model: Path, crowd: Crowd) -> None:
    """Without a descriptor nobody new is let in, and who is in is answered, or refused as is right."""
    files = 64
    worker = start_worker(launch, reference_model, before=limited(files))
    gateway = start_gateway(launch, tmp_path, worker, before=limited(files))
    with Client(gateway.address, timeout=60) as client:
        client.ingest("c", "a", b"The tower is red.", media_type="text/plain")
        answer = client.ask("c", "What is red?", max_tokens=3).text
        crowd.connect(worker.address, files)
        crowd.connect(gateway.address, files)
        wait_until(lambda: files_left(worker, files) == files_left(gateway, files) == 0)
        calls: list[Callable[[], object]] = [
            lambda: client.ingest("c", "b", b"The boat is blue.", media_type="text/plain"),
            lambda: client.ingest("d", "b", b"The boat is blue.", media_type="text/plain"),
            lambda: client.retrieve("c", "What is red?"),
            lambda: client.ask("c", "What is red?", max_tokens=3),
            lambda: client.delete("c", "a"),
        ]
        for call in calls:
            with pytest.raises(errors.ResourceExhausted, match="Too many open files"):
                call()
        assert [item.name for item in client.list("c")] == ["a"]
        before = seconds_computed(worker, gateway)
        time.sleep(1)
        assert seconds_computed(worker, gateway) - before < 0.5
        crowd.close()
        wait_until(lambda: min(files_left(worker, files), files_left(gateway, files)) > 16)
        assert client.ask("c", "What is red?", max_tokens=3).text == answer
        for call in calls:
            call()
        assert [item.name for item in client.list("c")] == ["b"]
    assert gateway.stop() == worker.stop() == 0
    assert "Traceback" not in gateway.log + worker.log
