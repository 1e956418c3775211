"""Services with few file descriptors: too few to start is an error, and with none left nothing is lost."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fusionkv.protos.runtime import errors
from tests.conftest import Service
from tests.processes import cpu_seconds
from tests.system.cache_process import MIB, check_refused, flags, get, payload, put
from tests.waiting import until

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
