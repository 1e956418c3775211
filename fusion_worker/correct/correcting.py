"""Goes over chunks in the pool with a correction."""

import asyncio
from functools import partial

from fusionkv.fusion_worker.compute.kv_pool import KVPool, PooledChunk
from fusionkv.fusion_worker.correct.correction import Average
from fusionkv.fusion_worker.load.placement import LoadedChunk
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.tensor_parallel.group import TPGroup
from fusionkv.fusion_worker.transfer.storage import Storage
from fusionkv.protos.runtime.cancellation import to_the_end


class Correcting:
    """Corrects parts that say how; leaves all others as they are."""

    def __init__(self, model: Model, pool: KVPool, tp: TPGroup) -> None:
        self._rotations = model.rotations
        self._pool = pool
        self._storage = Storage(pool, "plain", tp)

    async def in_place(self, part: LoadedChunk) -> None:
        """Corrects what lies in the part's slots."""
        await self._correct(part, part.resident)

    async def from_pool(self, part: LoadedChunk) -> bool:
        """Whether the chunk lay in the pool as it was before; then the part has it, corrected."""
        wanted = part.wanted
        source = self._pool.find(wanted.uncorrected) if wanted.uncorrected != wanted.key else None
        if source is None:
            return False
        try:
            if ready := source.ready.done():
                await self._correct(part, source)
            return ready
        finally:
            self._pool.unpin(source)

    async def average(self, part: LoadedChunk) -> Average:
        """What averages the same chunk's KV, encoded otherwise, with this one."""
        data = await asyncio.to_thread(self._storage.take_out, part.resident)
        return Average(self._storage.numbers(data, part.resident.tokens), part.resident.base)

    async def _correct(self, part: LoadedChunk, source: PooledChunk) -> None:
        """To the end, also when the caller is cancelled: its slots are not given away while they are written."""
        if (correction := part.wanted.correction) is not None:
            change = partial(correction.apply, base=source.base, rotations=self._rotations)
            await to_the_end(asyncio.to_thread(self._storage.rewrite, part.resident, change, source))
