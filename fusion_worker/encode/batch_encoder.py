"""A fusion worker without a server, which encodes batches of chunks in the calling process."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.config import WorkerConfig, cache_address, configured
from fusionkv.fusion_worker.servicer import FusionServicer
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.runtime.cancellation import all_of
from fusionkv.protos.runtime.errors import FailedPrecondition
from fusionkv.protos.runtime.process import cores

log = logging.getLogger(__name__)


def concurrency(device: torch.device) -> int:
    """Number of a batch's chunks to encode concurrently. Each may hold ten neighbours in the pool besides itself.

    A GPU computes those that wait in one step, and meanwhile copies out and stores those of the step before.
    """
    return 16 if device.type == "cuda" else 4


class BatchEncoder:
    """Encodes chunks with a model of its own, and stores them in a cache service. For one thread at a time."""

    def __init__(self, file: Path | None, flags: Mapping[str, Any], number: int = 0) -> None:
        """
        Args:
            file, flags: settings of a fusion worker; its environment variables are read as well.
            number: index of the encoder on this machine; with several GPUs, encoders take them in turn.

        Raises:
            SettingsError: a setting is unknown or has an invalid value.
            FailedPrecondition: there is no such model, or no cache service to store chunks in.
        """
        config = configured(file, flags)
        config = replace(config, cache=cache_address(config.cache))
        if not config.cache:
            raise FailedPrecondition("encoders need a cache service to store chunks in: set its address with --cache")
        if config.device == "auto" and torch.cuda.device_count() > 1:
            config = replace(config, device=f"cuda:{number % torch.cuda.device_count()}")
        self._loop = asyncio.Runner()
        self._servicer = self._loop.run(self._start(config))

    def encode(self, requests: Sequence[bytes]) -> tuple[int, int]:
        """Encodes and stores chunks of serialised EncodeRequests.

        Returns the number of chunks, and how many of them were stored already. Raises as the RPC Encode.
        """
        return self._loop.run(self._encode([pb.EncodeRequest.FromString(request) for request in requests]))

    async def _start(self, config: WorkerConfig) -> FusionServicer:
        torch.set_num_threads(config.threads or cores())
        model = models.load(
            config.model, config.device, config.dtype, config.max_prompt_tokens, today=config.template_date
        )
        self._slots = asyncio.Semaphore(concurrency(model.device))
        return FusionServicer(config, model)

    async def _encode(self, requests: Sequence[pb.EncodeRequest]) -> tuple[int, int]:
        return len(requests), sum(await all_of([self._one(request) for request in requests]))

    async def _one(self, request: pb.EncodeRequest) -> bool:
        async with self._slots:
            return (await self._servicer.Encode(request, None)).existed
