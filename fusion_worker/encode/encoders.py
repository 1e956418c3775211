"""Encoders of a corpus: processes of this machine, or Ray actors on many, that hold a model each."""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fusionkv.fusion_worker.cores import cores
from fusionkv.protos.runtime.errors import FailedPrecondition, ResourceExhausted, ServiceError, Unavailable

if TYPE_CHECKING:
    from fusionkv.fusion_worker.encode.batch_encoder import BatchEncoder

log = logging.getLogger(__name__)
# Of a batch whose encoder died, or whose cache service did not answer.
_ATTEMPTS = 5
_PAUSE_SECONDS = 1.0
_CONNECT_SECONDS = 10.0

Batch = Sequence[bytes]
"""Serialised EncodeRequests."""


class EncoderLost(Unavailable):
    """An encoder died with a batch in work, of which some chunks may be stored."""


class Encoder(Protocol):
    async def ready(self) -> None:
        """Waits until it has loaded its model. Raises ServiceError if it can't, EncoderLost if it died of it."""

    async def encode(self, batch: Batch) -> int:
        """Encodes and stores a batch; returns how many chunks were stored already. Raises ServiceError."""


async def encode_all(
    batches: AsyncIterator[Batch], encoders: Sequence[Encoder], done: Callable[[int, int], None]
) -> None:
    """Encodes all batches, each on an encoder that is ready. A batch that fails is tried again, on any of them.

    batches: read as encoders have room for more.
    done: told of every batch that is stored: its chunks, and how many of them were stored already.

    Raises ServiceError when a batch can't be encoded; what was stored stays so.
    """
    # Two batches an encoder, so that it finds the next one when it has done one; and one that waits.
    room = asyncio.Semaphore(3 * len(encoders))
    waiting: asyncio.Queue[tuple[Batch, int]] = asyncio.Queue()

    async def work(encoder: Encoder) -> None:
        while True:
            await _started(encoder)
            batch, attempt = await waiting.get()
            try:
                existed = await encoder.encode(batch)
            except (Unavailable, ResourceExhausted) as error:
                if attempt == _ATTEMPTS:
                    raise
                log.warning("a batch of %d chunks is tried again: %s", len(batch), error)
                if not isinstance(error, EncoderLost):
                    await asyncio.sleep(error.retry_after or _PAUSE_SECONDS * 2**attempt)
                waiting.put_nowait((batch, attempt + 1))
            else:
                room.release()
                done(len(batch), existed)
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
    except* ServiceError as errors:
        raise errors.exceptions[0] from None


async def _started(encoder: Encoder) -> None:
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(EncoderLost):
            return await encoder.ready()
    return await encoder.ready()


@contextlib.asynccontextmanager
async def local(count: int, file: Path | None, flags: Mapping[str, Any]) -> AsyncGenerator[Sequence[Encoder]]:
    """`count` processes of this machine, which share its cores. file, flags: as of a fusion worker."""
    shares = {"threads": max(1, cores() // count), **flags}
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
    """`count` actors on a Ray cluster; 0: one a GPU, or one a node where there are none.

    Ray restarts an actor that dies as soon as there is room for it. file, flags: as of `local`, on every node.

    Raises:
        FailedPrecondition: Ray is not installed, or its cluster is of another version.
        Unavailable: there is no Ray cluster, or none but a head without CPUs.
    """
    try:
        import ray
    except ImportError as error:
        raise FailedPrecondition("--ray needs Ray: pip install 'fusionkv[ray]'") from error
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
            raise Unavailable(f"no node of the Ray cluster at {address} takes encoders, or not yet")
        gpus = int(resources.get("GPU", 0))
        count = count or gpus or sum(node["Alive"] for node in ray.nodes())
        threads = 1 if gpus else max(1, int(resources["CPU"]) // count)
        actor = ray.remote(_Holder).options(num_gpus=int(gpus > 0), num_cpus=threads, max_restarts=-1)
        yield [_Actor(actor.remote(file, {"threads": threads, **flags})) for _ in range(count)]
    finally:
        ray.shutdown()


def _check_listens(address: str) -> None:
    """Raises OSError unless somebody does. Ray itself tries for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()


class _Holder:
    """What an encoder's process has: the encoder, made when it is first wanted."""

    def __init__(self, file: Path | None, flags: Mapping[str, Any], number: int = 0) -> None:
        self._arguments = file, flags, number
        self._made: BatchEncoder | None = None

    def ready(self) -> None:
        if self._made is None:
            # Ray adds the folder that the command ran in, where a folder of any name may hide a package.
            sys.path[:] = [entry for entry in sys.path if entry not in ("", os.getcwd())]
            from fusionkv.fusion_worker.encode.batch_encoder import BatchEncoder

            self._made = BatchEncoder(*self._arguments)

    def encode(self, batch: Batch) -> int:
        self.ready()
        assert self._made is not None
        return self._made.encode(batch)


class _Actor:
    """An encoder that is a Ray actor."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def ready(self) -> None:
        await self._result(self._handle.ready.remote())

    async def encode(self, batch: Batch) -> int:
        existed: int = await self._result(self._handle.encode.remote(list(batch)))
        return existed

    @staticmethod
    async def _result(reference: Any) -> Any:
        from ray.exceptions import RayError, RayTaskError

        try:
            return await reference
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            raise EncoderLost(f"an encoder died: {error}") from error


class _Process:
    """An encoder in a process of this machine, which is started again when it dies."""

    def __init__(self, file: Path | None, flags: Mapping[str, Any], number: int) -> None:
        self._arguments = file, flags, number
        self._pool = self._start()

    async def ready(self) -> None:
        await self._call(_ready)

    async def encode(self, batch: Batch) -> int:
        return await self._call(_encode, batch)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def _call(self, work: Callable[..., Any], *arguments: Any) -> Any:
        pool = self._pool
        try:
            return await asyncio.wrap_future(pool.submit(work, *arguments))
        except BrokenProcessPool as error:
            # Others may have seen it first.
            if pool is self._pool:
                self._pool = self._start()
            raise EncoderLost("an encoder died") from error

    def _start(self) -> ProcessPoolExecutor:
        # A fork would share threads and connections of gRPC.
        spawn = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(1, mp_context=spawn, initializer=_hold, initargs=self._arguments)


_held: _Holder


def _hold(file: Path | None, flags: Mapping[str, Any], number: int) -> None:
    """Runs in a process of `_Process`, as the next two do."""
    global _held
    _held = _Holder(file, flags, number)


def _ready() -> None:
    _held.ready()


def _encode(batch: Batch) -> int:
    return _held.encode(batch)
