"""A secondary tier of vLLM's offloading: KV blocks that vLLM instances share, and that outlive them.

vLLM's tiering manager loads it by `module_path`. Written for vLLM 0.32 and 0.33, whose interface of tiers is
experimental.
"""

import asyncio
import logging
import queue
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar

import vllm  # pyright: ignore[reportMissingImports]
from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
from vllm.v1.kv_offload.base import (  # pyright: ignore[reportMissingImports]
    LookupResult,
    Medium,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.file_mapper import FileMapper  # pyright: ignore[reportMissingImports]
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager  # pyright: ignore[reportMissingImports]
from vllm.v1.kv_offload.tiering.base import (  # pyright: ignore[reportMissingImports]
    JobResult,
    SecondaryTierManager,
    TransferJob,
)

from fusionkv.fusion_worker.library.cache import fingerprint
from fusionkv.fusion_worker.library.resolve import resolve
from fusionkv.kvcache_service.adapters.engine_blobs import EngineBlobs, EngineOptions
from fusionkv.kvcache_service.blobs import Blobs
from fusionkv.protos.runtime.errors import ServiceError

log = logging.getLogger("vllm.fusionkv")
# Bytes of blocks that are moved in one call, each within the time that a call has.
_BATCH_BYTES = 64 << 20


def layout_of(spec: Any, row_bytes: int) -> dict[str, Any]:
    """All that makes the bytes of a block, beside its tokens and the weights. spec: vLLM's OffloadingSpec."""
    return {
        "engine": "vllm",
        # Attention backends choose the order of bytes in a page, by version and device.
        "version": vllm.__version__,
        "device": current_platform.get_device_name(),
        "kv_cache_layout": spec.config.kv_cache_layout,
        "row_bytes": row_bytes,
        # Model, dtype, groups of layers, and the ranks if bytes depend on them.
        **FileMapper.from_offloading_spec("", spec, parallel_agnostic=True).get_run_config(),
    }


class _Lookups(AsyncLookupManager):
    """vLLM's batches of lookups, by `find`, which runs in a thread of theirs."""

    def __init__(self, tier_type: str, find: Callable[[list[bytes]], Iterable[bool]]) -> None:
        self._find = find
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> Iterable[bool]:
        return self._find(keys)


class FusionKVTier(SecondaryTierManager):
    """Stores, finds and loads blocks of vLLM's CPU tier.

    Methods run in vLLM's scheduler: none waits for the service, and none raises an error of it. A block that can't be
    found or loaded is a miss, and vLLM computes it.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **given: Any,
    ) -> None:
        """given: as EngineOptions. Raises ValueError if they are wrong, or the weights can't be read."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        options = EngineOptions.of(given, "secondary_tiers")
        options = replace(options, weights=options.weights or _digest_of(offloading_spec.config.model.name))
        self._blobs = EngineBlobs(options, layout_of(offloading_spec, self.block_size_bytes), log)
        self._rows = primary_kv_view.cast("B")
        self._batch = max(1, _BATCH_BYTES // self.block_size_bytes)
        # One batch at a time: eight blocks use all connections of a client, and a load waits for one of them.
        self._storing = asyncio.Lock()
        self._jobs: dict[int, TransferJob] = {}
        self._ended: queue.SimpleQueue[tuple[int, list[bool], float]] = queue.SimpleQueue()
        self._results: list[JobResult] = []
        self._lookups = _Lookups(tier_type, self._find)

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        async def store(blobs: Blobs, keys: list[bytes], rows: list[memoryview]) -> list[bool]:
            async with self._storing:
                if not self._blobs.away:
                    await blobs.store(keys, rows)
                    return [True] * len(keys)  # new, or stored before
            return [False] * len(keys)

        self._submit(job_metadata, store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        # Rows of a load that failed go to other blocks: `retrieve` writes nothing once it has ended.
        self._submit(job_metadata, Blobs.retrieve)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        while not self._ended.empty():
            self._results.append(self._result(*self._ended.get()))
        results, self._results = self._results, []
        return results

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    def drain_jobs(self) -> None:
        while self._jobs:
            self._results.append(self._result(*self._ended.get()))

    def shutdown(self) -> None:
        self._lookups.shutdown()
        self._blobs.close()
        self._rows.release()

    def _submit(self, job: TransferJob, move: Callable[[Blobs, list[bytes], list[memoryview]], Any]) -> None:
        keys, size = [bytes(key) for key in job.keys], self.block_size_bytes
        rows = [self._rows[row * size : (row + 1) * size] for row in map(int, job.chunk_ids)]
        done, began = [False] * len(keys), time.monotonic()

        async def batches(blobs: Blobs) -> list[bool]:
            for at in range(0, len(keys), self._batch):
                batch = slice(at, at + self._batch)
                done[batch] = await move(blobs, keys[batch], rows[batch])
            return done

        self._jobs[job.job_id] = job
        # After an error, what earlier batches moved.
        self._blobs.start(batches, done, lambda moved: self._ended.put((job.job_id, moved, time.monotonic() - began)))

    def _result(self, job_id: int, done: list[bool], seconds: float) -> JobResult:
        job = self._jobs.pop(job_id)
        moved = [key for key, each in zip(job.keys, done, strict=True) if each]
        if job.is_promotion:
            # Otherwise, a request would be told of the block again, and its load would be tried for ever.
            self._lookups.mark_miss([key for key, each in zip(job.keys, done, strict=True) if not each])
        size = len(moved) * self.block_size_bytes
        return JobResult(job_id, all(done), moved if job.is_promotion else None, seconds, size)

    def _find(self, keys: list[bytes]) -> list[bool]:
        return self._blobs.run(lambda blobs: blobs.touch(keys), [False] * len(keys))


def _digest_of(model: str) -> str:
    """SHA-256 of a model's files, in hexadecimal. Raises ValueError if they can't be read."""
    try:
        return fingerprint(resolve(model)).hex()
    except (ServiceError, OSError) as error:
        raise ValueError(f"the files of {model} can't be read: set weights of the FusionKV tier: {error}") from error
