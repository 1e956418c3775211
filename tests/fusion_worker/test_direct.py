"""Chunks read from the cache service's files straight to the device: right, verified, and another way if it fails.

kvikio reads nothing without a GPU's driver, so a file that reads into the CPU's memory stands in for its own.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from fusionkv.fusion_worker.transfer.gpudirect import DirectReader
from tests.fusion_worker.host_file import HostFile
from tests.fusion_worker.oracle import error, oracle, random_ids

pytestmark = pytest.mark.system
CLOSE = 1e-4


class BrokenFile(HostFile):
    def read(self, buffer: torch.Tensor, size: int, file_offset: int) -> int:
        self.reads.append((file_offset, size))
        raise RuntimeError("cuFile error: driver is not open")


class Stage:
    """A cache service that holds a prompt's chunks on disk alone, and a new worker beside it."""

    def __init__(self, launch: Any, start: Any, folder: Path, file: type[HostFile]) -> None:
        self._launch, self._start, self._folder = launch, start, folder
        self.file = type("File", (file,), {"reads": []})
        self.system, self.question = random_ids(5, 0), random_ids(6, 99)
        self.chunks = [random_ids(n, n) for n in (70, 13, 300)]

    def _service(self) -> Any:
        at = ("--listen", f"unix:{self._folder}/s", "--data-dir", str(self._folder / "data"))
        return self._launch("fusionkv.kvcache_service", *at)

    async def open(self) -> Any:
        service = self._service()
        maker = await self._start("qwen3", cache=f"unix:{self._folder}/s")
        await maker.fill(self.system, self.chunks, self.question, ratio=0.0)
        service.kill9()
        self._service()
        return await self.worker()

    async def worker(self) -> Any:
        rig = await self._start("qwen3", cache=f"unix:{self._folder}/s")
        loader = rig.servicer.loader
        loader._direct = DirectReader(loader.storage, self.file)
        return rig

    async def ask(self, rig: Any, ratio: float) -> Any:
        return await rig.ask(self.system, self.chunks, self.question, ratio=ratio)


@pytest.fixture
def stage(launch: Any, start: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Stage:
    return Stage(launch, start, tmp_path, getattr(request, "param", HostFile))


async def test_chunks_come_from_disk_to_the_device(stage: Stage) -> None:
    rig, plain = await stage.open(), oracle("qwen3")
    full = plain.logits([*stage.system, *itertools.chain(*stage.chunks), *stage.question])
    reused = plain.after(plain.reused(stage.system, stage.chunks), stage.question)
    for ratio, expected in ((0.0, reused), (1.0, full)):
        answer = await stage.ask(rig, ratio)
        assert error(answer.logits[0], expected) < CLOSE
        assert not answer.summary.degraded
        assert answer.summary.chunks_missed == 0
    # The system prompt and three chunks, each once; then they are in the pool.
    assert len(stage.file.reads) == 4
    assert all(offset % 4096 == 0 for offset, _ in stage.file.reads)


async def test_damaged_bytes_are_not_used(stage: Stage, tmp_path: Path) -> None:
    rig, plain = await stage.open(), oracle("qwen3")
    (segment,) = (tmp_path / "data/segments").glob("*.kv")
    with segment.open("r+b") as file:
        whole = file.read()
        file.seek(0)
        file.write(bytes(byte ^ 0x10 for byte in whole))
    answer = await stage.ask(rig, 0.0)
    full = plain.logits([*stage.system, *itertools.chain(*stage.chunks), *stage.question])
    assert stage.file.reads, "it was tried"
    assert answer.summary.degraded
    assert error(answer.logits[0], full) < CLOSE


@pytest.mark.parametrize("stage", [BrokenFile], indirect=True)
async def test_what_fails_is_not_tried_again(stage: Stage, caplog: Any) -> None:
    rig, plain = await stage.open(), oracle("qwen3")
    answer = await stage.ask(rig, 0.0)
    reused = plain.after(plain.reused(stage.system, stage.chunks), stage.question)
    assert error(answer.logits[0], reused) < CLOSE
    assert not answer.summary.degraded
    assert "read through host memory from now on: cuFile error" in caplog.text
    # Loads run side by side: the first ones may have begun before one had failed.
    tried = len(stage.file.reads)
    assert 1 <= tried <= 4
    rig.pool.clear()
    await stage.ask(rig, 0.0)
    assert len(stage.file.reads) == tried


async def test_without_a_gpu_nothing_is_read_directly(stage: Stage) -> None:
    rig = await stage.open()
    storage = rig.servicer.loader.storage
    if storage.device.type == "cuda":
        pytest.skip("the pool is on a GPU")
    assert DirectReader.find(storage) is None
