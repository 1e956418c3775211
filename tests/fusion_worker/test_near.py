"""Chunks of a cache service on the worker's machine: copied from its memory under a lease, or read from its files.

Without a GPU kvikio reads nothing, so a file that reads into the CPU's memory stands in for its own.
"""

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fusionkv.fusion_worker.transfer.gpudirect import DirectReader
from fusionkv.kvcache_service.client import Entry
from fusionkv.protos.runtime.errors import Unavailable
from tests.fusion_worker.oracle import Parts, oracle

pytestmark = pytest.mark.system
PLAIN = oracle("qwen3")
LENGTHS = (70, 13, 300)


def streamed(rig: Any, fault: Exception | None = None) -> list[Entry]:
    """The entries that a worker streams from now on; with a fault it gets none."""
    entries, fetch = list[Entry](), rig.servicer.cache.fetch

    async def counted(entry: Entry, into: memoryview, *, timeout: float) -> None:
        if fault is not None:
            raise fault
        entries.append(entry)
        await fetch(entry, into, timeout=timeout)

    rig.servicer.cache.fetch = counted
    return entries


@pytest.mark.parametrize("page_tokens", [4, 16])
async def test_chunks_are_copied_without_a_fetch(near: Any, parts: Parts, page_tokens: int) -> None:
    await near.fill(parts)
    rig = await near.worker(page_tokens=page_tokens)
    entries = streamed(rig)
    answer = await rig.ask(*parts, ratio=0.0, expected=PLAIN.full_reuse(parts))
    tokens = len(parts[0]) + sum(map(len, parts[1]))
    assert (answer.summary.degraded, answer.summary.bytes_fetched) == (False, tokens * rig.model.kv.token_bytes)
    # Until the service's memory is page-locked, a GPU copies from a buffer that a fetch has filled.
    assert len(entries) <= (4 if torch.cuda.is_available() else 0)
    await rig.ask(*parts, ratio=1.0, expected=PLAIN.full_attention(parts))


@pytest.mark.parametrize("gone", [False, True])
async def test_what_was_copied_after_the_lease_is_fetched_again(near: Any, parts: Parts, gone: bool) -> None:
    """Where that fails too, no slot holds what another entry may have left there."""
    await near.fill(parts)
    rig = await near.worker()
    # Every copy ends after its lease, and reads what another entry has left there by then: NaNs.
    rig.servicer.cache.view = lambda entry: memoryview(b"\xff" * entry.size)
    rig.servicer.cache.is_leased = lambda entry: False
    entries = streamed(rig, Unavailable("gone") if gone else None)
    expected = PLAIN.full_attention(parts) if gone else PLAIN.full_reuse(parts)
    answer = await rig.ask(*parts, ratio=0.0, expected=expected)
    assert (len(entries), answer.summary.degraded) == ((0, True) if gone else (4, False))
    await rig.settled()
    assert torch.isfinite(rig.pool.kv).all()


class HostFile:
    """What of kvikio.CuFile is used; on a GPU it is kvikio's."""

    reads: list[tuple[int, int]]

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self._direct = importlib.import_module("kvikio").CuFile(path) if torch.cuda.is_available() else None

    def __del__(self) -> None:
        os.close(self._file)

    def read(self, buffer: torch.Tensor, size: int, file_offset: int) -> int:
        self.reads.append((file_offset, size))
        if self._direct is not None:
            return int(self._direct.read(buffer, size, file_offset))
        return os.preadv(self._file, [buffer.numpy()[:size]], file_offset)


class BrokenFile(HostFile):
    def read(self, buffer: torch.Tensor, size: int, file_offset: int) -> int:
        self.reads.append((file_offset, size))
        raise RuntimeError("cuFile error: driver is not open")


async def reading(near: Any, parts: Parts, file: type[HostFile] = HostFile) -> tuple[Any, list[tuple[int, int]]]:
    """A new worker of a service that has a prompt's chunks on disk alone, and what the worker reads directly."""
    if torch.cuda.is_available():
        pytest.importorskip("kvikio")
    await near.fill(parts)
    near.restart()
    rig, kind = await near.worker(), type("File", (file,), {"reads": []})
    rig.servicer.loader.fetcher._direct = DirectReader(rig.servicer.loader.storage.rank, kind)
    return rig, kind.reads


async def test_chunks_come_from_disk_to_the_device(near: Any, parts: Parts) -> None:
    rig, reads = await reading(near, parts)
    for ratio, expected in ((0.0, PLAIN.full_reuse(parts)), (1.0, PLAIN.full_attention(parts))):
        answer = await rig.ask(*parts, ratio=ratio, expected=expected)
        assert (answer.summary.degraded, answer.summary.chunks_missed) == (False, 0)
    # The system prompt and three chunks, each once; then they are in the pool.
    assert len(reads) == 4
    assert all(offset % 4096 == 0 for offset, _ in reads)


async def test_damaged_bytes_are_not_used(near: Any, parts: Parts, tmp_path: Path) -> None:
    rig, reads = await reading(near, parts)
    (segment,) = (tmp_path / "data/segments").glob("*.kv")
    damaged = bytes(byte ^ 0x10 for byte in segment.read_bytes())
    with segment.open("r+b") as file:  # the file that the service has open
        file.write(damaged)
    answer = await rig.ask(*parts, ratio=0.0, expected=PLAIN.full_attention(parts))
    assert reads, "it was tried"
    assert answer.summary.degraded


async def test_what_fails_is_not_tried_again(near: Any, parts: Parts, caplog: Any) -> None:
    rig, reads = await reading(near, parts, BrokenFile)
    answer = await rig.ask(*parts, ratio=0.0, expected=PLAIN.full_reuse(parts))
    assert not answer.summary.degraded
    assert "read through host memory from now on: cuFile error" in caplog.text
    # Loads run side by side: the first ones may have begun before one had failed.
    tried = len(reads)
    assert 1 <= tried <= 4
    rig.pool.clear()
    await rig.ask(*parts, ratio=0.0)
    assert len(reads) == tried


@pytest.mark.skipif(torch.cuda.is_available(), reason="the pool is on a GPU")
async def test_without_a_gpu_nothing_is_read_directly(near: Any) -> None:
    assert DirectReader.find((await near.worker()).servicer.loader.storage.rank) is None
