"""Encoders of a corpus, each with its own model: processes on this machine, or actors on a Ray cluster."""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionkv.protos.runtime import process
from fusionkv.protos.runtime.errors import FailedPrecondition, ResourceExhausted, Unavailable
from fusionkv.protos.runtime.settings import extra

if TYPE_CHECKING:
    from fusionkv.fusion_worker.encode.batch_encoder import BatchEncoder

log = logging.getLogger(__name__)
# Attempts to encode a batch when an encoder dies or the cache service does not answer.
_ATTEMPTS = 5
_PAUSE_SECONDS = 1.0
_CONNECT_SECONDS = 10.0

Batch = Sequence[bytes]
"""Serialised EncodeRequests."""


class EncoderLost(Unavailable):
    """An encoder died while encoding a batch. Some of its chunks may be stored."""


class Encoder(ABC):
    """An encoder in another process."""

    async def ready(self) -> None:
        """Waits until the model is loaded. Raises ServiceError if that fails, EncoderLost if the process died."""
        await self._call("ready")

    async def encode(self, batch: Batch) -> tuple[int, int]:
        """Encodes and stores a batch; returns its chunks, and how many were stored already. Raises ServiceError."""
        return await self._call("encode", list(batch))

    @abstractmethod
    async def _call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the process's `_Holder`."""


async def encode_all(
    batches: AsyncIterator[Batch], encoders: Sequence[Encoder], done: Callable[[int, int], None]
) -> None:
    """Encodes all batches on several encoders. A batch that fails is retried, on any encoder.

    Args:
        batches: read only as fast as they are encoded.
        done: called for every stored batch with its number of chunks, and how many of them were stored already.

    Raises:
        ServiceError: a batch can't be encoded. Chunks stored so far stay stored.
        SettingsError, OSError: an encoder can't be started.
    """
    # For each encoder one batch being encoded, one that follows without a gap, and one waiting.
    room = asyncio.Semaphore(3 * len(encoders))
    waiting: asyncio.Queue[tuple[Batch, int]] = asyncio.Queue()

    async def work(encoder: Encoder) -> None:
        while True:
            await _started(encoder)
            batch, attempt = await waiting.get()
            try:
                chunks, existed = await encoder.encode(batch)
            except (Unavailable, ResourceExhausted) as error:
                if attempt == _ATTEMPTS:
                    raise
                log.warning("retrying a batch of %d chunks: %s", len(batch), error)
                if not isinstance(error, EncoderLost):
                    await asyncio.sleep(error.retry_after or _PAUSE_SECONDS * 2**attempt)
                waiting.put_nowait((batch, attempt + 1))
            else:
                room.release()
                done(chunks, existed)
            waiting.task_done()

    try:
        async with asyncio.TaskGroup() as group:
            working = [group.create_task(work(encoder)) for encoder in encoders for _ in range(2)]
            async for batch in batches:
                await room.acquire()
                waiting.put_nowait((batch, 1))
            await waiting.join()
            for task in working:
                task.cancel()
    except* Exception as errors:
        raise errors.exceptions[0] from None


async def _started(encoder: Encoder) -> None:
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(EncoderLost):
            return await encoder.ready()
    return await encoder.ready()


@contextlib.asynccontextmanager
async def local(count: int, file: Path | None, flags: Mapping[str, Any]) -> AsyncGenerator[Sequence[Encoder]]:
    """Runs `count` processes on this machine, which share its cores. file, flags: settings, as for BatchEncoder."""
    shares = {"threads": max(1, process.cores() // count), **flags}
    started = [_Process(file, shares, number) for number in range(count)]
    try:
        yield started
    finally:
        for each in started:
            each.close()


@contextlib.asynccontextmanager
async def on_ray(
    address: str, count: int, file: Path | None, flags: Mapping[str, Any]
) -> AsyncGenerator[Sequence[Encoder]]:
    """Runs actors on a Ray cluster. Ray restarts an actor that dies as soon as resources are free.

    Args:
        count: number of actors; 0 runs one for each GPU, or one for each node without GPUs.
        file, flags: settings, as for BatchEncoder; the file is read on every node.

    Raises:
        FailedPrecondition: Ray is not installed, or the cluster runs another version.
        Unavailable: there is no Ray cluster, or none of its nodes has CPUs.
    """
    with extra("ray", "--ray", FailedPrecondition):
        import ray
    try:
        await asyncio.to_thread(_check_listens, address)
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, ValueError) as error:
        raise Unavailable(f"no Ray cluster at {address}: {error}") from error
    except RuntimeError as error:
        raise FailedPrecondition(f"Ray at {address}: {error}") from error
    try:
        resources = ray.cluster_resources()
        if "CPU" not in resources:
            raise Unavailable(f"no node of the Ray cluster at {address} has CPUs for encoders yet")
        gpus, nodes = int(resources.get("GPU", 0)), [node for node in ray.nodes() if node["Alive"]]
        count = count or gpus or len(nodes)
        threads = 1 if gpus else _cpus([int(node["Resources"].get("CPU", 0)) for node in nodes], count)
        actor = ray.remote(_Holder).options(num_gpus=int(gpus > 0), num_cpus=threads, max_restarts=-1)
        yield [_Actor(actor.remote(file, {"threads": threads, **flags})) for _ in range(count)]
    finally:
        ray.shutdown()


def _cpus(nodes: Sequence[int], count: int) -> int:
    """The most CPUs that each of `count` actors can have: one with more than any node has never starts."""
    most = sum(nodes) // count
    return next((each for each in range(most, 1, -1) if sum(node // each for node in nodes) >= count), 1)


def _check_listens(address: str) -> None:
    """Raises OSError if nothing listens at the address. Ray itself would retry for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()


class _Holder:
    """Holds a process's encoder, which is created at first use."""

    def __init__(self, file: Path | None, flags: Mapping[str, Any], number: int = 0) -> None:
        self._arguments = file, flags, number
        self._made: BatchEncoder | None = None

    def ready(self) -> None:
        if self._made is None:
            # Ray adds the working directory, where any folder may shadow a package.
            sys.path[:] = [entry for entry in sys.path if entry not in ("", os.getcwd())]
            from fusionkv.fusion_worker.encode.batch_encoder import BatchEncoder

            self._made = BatchEncoder(*self._arguments)

    def encode(self, batch: Batch) -> tuple[int, int]:
        self.ready()
        assert self._made is not None
        return self._made.encode(batch)


class _Actor(Encoder):
    """An encoder that is a Ray actor."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def _call(self, method: str, *arguments: Any) -> Any:
        from ray.exceptions import RayError, RayTaskError

        try:
            return await getattr(self._handle, method).remote(*arguments)
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            raise EncoderLost(f"an encoder died: {error}") from error


class _Process(Encoder):
    """An encoder in a process on this machine, which is restarted when it dies."""

    def __init__(self, file: Path | None, flags: Mapping[str, Any], number: int) -> None:
        self._arguments = file, flags, number
        self._pool = self._start()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def _call(self, method: str, *arguments: Any) -> Any:
        pool = self._pool
        try:
            return await asyncio.wrap_future(pool.submit(_do, method, *arguments))
        except BrokenProcessPool as error:
            # Another call may have restarted it already.
            if pool is self._pool:
                self._pool = self._start()
            raise EncoderLost("an encoder died") from error

    def _start(self) -> ProcessPoolExecutor:
        # A fork would break gRPC's threads and connections.
        spawn = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(1, mp_context=spawn, initializer=_hold, initargs=(os.getpid(), *self._arguments))


_held: _Holder


def _hold(parent: int, file: Path | None, flags: Mapping[str, Any], number: int) -> None:
    """Runs in the process of a `_Process`, as does `_do`."""
    global _held
    process.end_with_parent(parent=parent)
    _held = _Holder(file, flags, number)


def _do(method: str, *arguments: Any) -> Any:
    return getattr(_held, method)(*arguments)
