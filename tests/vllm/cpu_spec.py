"""vLLM's tiering on a CPU: its own copies between an engine's blocks and the CPU tier need a GPU. Loaded by vLLM."""

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult  # pyright: ignore[reportMissingImports]
from vllm.v1.kv_offload.cpu.shared_offload_region import (  # pyright: ignore[reportMissingImports]
    SharedOffloadRegion,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec  # pyright: ignore[reportMissingImports]


class CPUTieringSpec(TieringOffloadingSpec):
    """Chunks of one block, of one rank."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        assert self.blocks_per_chunk == self.config.parallel.world_size == 1
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return _CopyingWorker([(t.tensor, t.page_size_bytes) for t in kv_caches.tensors], region)


class _CopyingWorker(OffloadingWorker):
    """Copies at once."""

    def __init__(self, tensors: list[tuple[torch.Tensor, int]], region: SharedOffloadRegion) -> None:
        self._pairs = [(blocks, region.create_next_worker_view(size)) for blocks, size in tensors]
        self._finished: list[TransferResult] = []
        self._region = region

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for blocks, chunks in self._pairs:
            chunks[torch.from_numpy(dst_spec.chunk_ids).long()] = blocks[torch.as_tensor(src_spec.block_ids).long()]
        return self._done(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for blocks, chunks in self._pairs:
            blocks[torch.as_tensor(dst_spec.block_ids).long()] = chunks[torch.from_numpy(src_spec.chunk_ids).long()]
        return self._done(job_id)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Does nothing: copies end at once."""

    def shutdown(self) -> None:
        self._pairs.clear()
        self._region.cleanup()

    def _done(self, job_id: int) -> bool:
        self._finished.append(TransferResult(job_id, True))
        return True
