"""Locking the mapped memory of a cache service, with functions that record what a GPU's driver would be told."""

import asyncio
import mmap
import threading
from contextlib import nullcontext
from types import SimpleNamespace
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

    def register(self, address: int, size: int, device: torch.device, flags: int = 0) -> None:
        assert self.go.wait(60)
        self.sizes[address] = size
        self.calls.append(("lock", size))

    def unregister(self, address: int, device: torch.device) -> None:
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

    def fails(address: int, size: int, device: torch.device) -> None:
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

    def fails(address: int, size: int, device: torch.device, flags: int) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(pinned, "register", fails)
    with locked(data, torch.device("cuda")):
        assert "100 bytes can't be page-locked, and are copied twice: out of memory" in caplog.text
    assert len(driver.calls) == 2


def test_a_failure_is_not_that_of_the_next_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA keeps an error of a thread until torch asks for it, after a launch; with a context on the right GPU."""
    device, at, kept = torch.device("cuda:1"), [0], list[str]()

    class Context(nullcontext[None]):
        def __init__(self, of: torch.device) -> None:
            super().__init__()
            at.append(of.index)

    def call(address: int) -> int:
        kept.append("invalid argument")
        return at[-1]

    def launch(*sizes: int, device: torch.device) -> None:
        if kept:
            raise RuntimeError(f"CUDA error: {kept.pop()}")

    def check(error: int) -> None:
        raise RuntimeError(f"invalid argument of GPU {error}")

    monkeypatch.setattr(torch.cuda, "device", Context)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostUnregister=call))
    monkeypatch.setattr(torch.cuda, "check_error", check)
    monkeypatch.setattr(torch, "ones", launch)
    with pytest.raises(RuntimeError, match="of GPU 1"):
        pinned.unregister(1 << 20, device)
    launch(3, device=device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_goes_on_after_a_failure() -> None:
    device, data = torch.device("cuda:0"), memoryview(mmap.mmap(-1, mmap.PAGESIZE))
    with pytest.raises(RuntimeError):
        pinned.unregister(pinned.address_of(data), device)
    assert torch.ones(3, device=device).sum() == 3
    pinned.register(pinned.address_of(data), len(data), device, pinned._PORTABLE)
    pinned.unregister(pinned.address_of(data), device)


def test_a_tensor_in_host_memory_is_not_copied() -> None:
    there = torch.arange(3)
    assert to_host(there) is there
