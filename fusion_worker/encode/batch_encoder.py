"""A fusion worker without a server: encodes batches of chunks in the process that makes it."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.config import WorkerConfig, cache_address, configured
from fusionkv.fusion_worker.cores import cores
from fusionkv.fusion_worker.servicer import FusionServicer
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.runtime.errors import FailedPrecondition

# Chunks of a batch that are encoded together. Each may hold ten neighbours in the pool beside itself.
_TOGETHER = 4


class BatchEncoder:
    """Holds a model and a connection to a cache service. One thread uses it."""

    def __init__(self, file: Path | None, flags: Mapping[str, Any], number: int = 0) -> None:
        """file, flags: as of a fusion worker; its environment counts too. number: of the encoder among those of a
        machine, which take its GPUs in turn.

        Raises:
            SettingsError: settings that can't be used.
            FailedPrecondition: no such model, or no cache service to store chunks in.
        """
        config = configured(file, flags)
        config = replace(config, cache=cache_address(config.cache))
        if not config.cache:
            raise FailedPrecondition("encoders store what they encode in a cache service: name one by --cache")
        if config.device == "auto" and torch.cuda.device_count() > 1:
            config = replace(config, device=f"cuda:{number % torch.cuda.device_count()}")
        self._loop = asyncio.Runner()
        self._slots = asyncio.Semaphore(_TOGETHER)
        self._servicer = self._loop.run(self._start(config))

    def encode(self, requests: Sequence[bytes]) -> int:
        """Encodes and stores chunks, each a serialised EncodeRequest; returns how many were stored already.

        Raises ServiceError as the RPC Encode does.
        """
        return self._loop.run(self._encode([pb.EncodeRequest.FromString(request) for request in requests]))

    async def _start(self, config: WorkerConfig) -> FusionServicer:
        torch.set_num_threads(config.threads or cores())
        return FusionServicer(
            config, models.load(config.model, config.device, config.dtype, config.max_prompt_tokens)
        )

    async def _encode(self, requests: Sequence[pb.EncodeRequest]) -> int:
        tasks = [asyncio.create_task(self._one(request)) for request in requests]
        try:
            return sum(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, request: pb.EncodeRequest) -> bool:
        async with self._slots:
            return (await self._servicer.Encode(request, None)).existed
