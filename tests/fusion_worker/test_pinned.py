"""Locking the mapped memory of a cache service, with functions that record what a GPU's driver would be told."""

import asyncio
import mmap
import threading
from typing import Any

import pytest
import torch

from fusionkv.fusion_worker.transfer import pinned
from fusionkv.fusion_worker.transfer.pinned import PinnedMapping, locked, to_host
from tests.waiting import until


class Driver:
    """What was locked, by size, and unlocked; `go` lets a call end."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.sizes: dict[int, int] = {}
        self.go = threading.Event()

    def register(self, address: int, size: int, flags: int = 0) -> None:
        assert self.go.wait(60)
        self.sizes[address] = size
        self.calls.append(("lock", size))

    def unregister(self, address: int) -> None:
        self.calls.append(("unlock", self.sizes.pop(address)))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(pinned, "register", made.register)
    monkeypatch.setattr(pinned, "unregister", made.unregister)
    return made


async def test_a_mapping_is_used_once_it_is_locked(driver: Driver) -> None:
    first, second = (memoryview(mmap.mmap(-1, pages * mmap.PAGESIZE)) for pages in (1, 2))
    mapping = PinnedMapping(torch.device("cuda"))
    assert not mapping.holds(first[:5])
    assert not mapping.holds(second[5:]), "one after the other"
    driver.go.set()
    await until(lambda: mapping.holds(first[7:9]))
    with mapping.reading():
        assert not mapping.holds(second)
        assert not mapping.holds(first), "it is about to be unlocked"
        await asyncio.sleep(0.05)
        assert driver.calls == [("lock", mmap.PAGESIZE)], "a copy from it is running"
    await until(lambda: mapping.holds(second))
    assert driver.calls[1:] == [("unlock", mmap.PAGESIZE), ("lock", 2 * mmap.PAGESIZE)]


async def test_what_cannot_be_locked_is_not_tried_again(driver: Driver, monkeypatch: Any, caplog: Any) -> None:
    tries: list[int] = []

    def fails(address: int, size: int) -> None:
        tries.append(size)
        raise RuntimeError("operation not supported")

    monkeypatch.setattr(pinned, "register", fails)
    mapping, data = PinnedMapping(torch.device("cuda")), memoryview(mmap.mmap(-1, mmap.PAGESIZE))
    assert not mapping.holds(data)
    await until(lambda: "copied twice: operation not supported" in caplog.text)
    assert not mapping.holds(data)
    assert not mapping.holds(memoryview(mmap.mmap(-1, mmap.PAGESIZE)))
    assert len(tries) == 1


def test_a_cpu_needs_none() -> None:
    assert not PinnedMapping(torch.device("cpu")).holds(memoryview(mmap.mmap(-1, mmap.PAGESIZE)))


def test_memory_is_locked_while_a_gpu_writes_it(driver: Driver, monkeypatch: Any, caplog: Any) -> None:
    driver.go.set()
    data = memoryview(bytearray(100))
    with locked(data, torch.device("cpu")):
        assert not driver.calls
    with locked(data, torch.device("cuda")):
        assert driver.calls == [("lock", 100)]
    assert driver.calls == [("lock", 100), ("unlock", 100)]

    def fails(address: int, size: int, flags: int) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(pinned, "register", fails)
    with locked(data, torch.device("cuda")):
        assert "100 bytes can't be page-locked, and are copied twice: out of memory" in caplog.text
    assert len(driver.calls) == 2


def test_a_tensor_in_host_memory_is_not_copied() -> None:
    there = torch.arange(3)
    assert to_host(there) is there
