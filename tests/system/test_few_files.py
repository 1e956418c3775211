"""Services with few file descriptors: too few to start is an error, and with none left nothing is lost."""

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusionkv.kvcache_service.client import CacheClient
from fusionkv.protos import errors
from tests.conftest import Service
from tests.system.cache_process import MIB, flags, get, payload, put
from tests.waiting import until

pytestmark = pytest.mark.system


def limited(files: int) -> tuple[str, ...]:
    """What a process is run with that may have so many files open."""
    return ("sh", "-c", f'ulimit -n {files}; exec "$@"', "-")


def seconds_computed(service: Service) -> float:
    times = Path(f"/proc/{service.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def files_left(service: Service, files: int) -> int:
    return files - len(os.listdir(f"/proc/{service.process.pid}/fd"))


@pytest.fixture
def crowd() -> Iterator[list[socket.socket]]:
    """Connections that say nothing; closed with the test."""
    made: list[socket.socket] = []
    yield made
    for one in made:
        one.close()


def connect(crowd: list[socket.socket], address: str, count: int) -> None:
    host, _, port = address.rpartition(":")
    for _ in range(count):
        crowd.append(socket.create_connection((host, int(port)), 10))


@pytest.mark.parametrize("files", [8, 16, 24])
def test_too_few_to_start_is_said(tmp_path: Path, files: int) -> None:
    service = Service(*flags(tmp_path), before=limited(files))
    assert service.wait() == 1, service.log
    assert "Traceback" not in service.log
    assert "Too many open files" in service.log or f"{files} open files" in service.log


async def test_entries_stay_while_no_file_can_be_opened(
    launch: Any, tmp_path: Path, crowd: list[socket.socket]
) -> None:
    files = 64
    first = launch(*flags(tmp_path))
    client = CacheClient(first.address)
    for name in "ab":
        assert await put(client, name, payload(name, MIB))
    await client.close()
    assert first.stop() == 0
    service = launch(*flags(tmp_path), before=limited(files))
    client = CacheClient(service.address)
    assert await get(client, "none") is None  # a connection, and no segment file yet
    connect(crowd, service.address, files)
    await until(lambda: files_left(service, files) == 0)
    with pytest.raises(errors.Unavailable, match="Too many open files"):
        await get(client, "a")
    with pytest.raises(errors.ResourceExhausted, match="Too many open files"):
        await put(client, "c", payload("c", MIB))
    before = seconds_computed(service)
    await asyncio.sleep(1)
    assert seconds_computed(service) - before < 0.5
    for one in crowd:
        one.close()
    await until(lambda: files_left(service, files) > 32)
    for name in "ab":
        assert await get(client, name) == payload(name, MIB)
    assert await put(client, "c", payload("c", MIB))
    await client.close()
    assert service.stop() == 0
    assert "Traceback" not in service.log
