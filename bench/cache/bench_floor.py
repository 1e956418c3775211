"""Baselines of the cache service's speed: a bare gRPC stream, and copies within a process."""

import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from fusionkv.protos.runtime import frames, process, rpc
from fusionkv.protos.serving import ServingConfig

_MIB = 1 << 20


class Floor(grpc.GenericRpcHandler):
    """The bare gRPC server: `/floor/get` streams as many bytes as requested, `/floor/put` drops them."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(64 * _MIB))

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        if details.method == "/floor/get":
            return grpc.unary_stream_rpc_method_handler(self._get, response_serializer=frames.encode_frame)
        return grpc.stream_unary_rpc_method_handler(self._put)

    async def _get(self, request: bytes, _: object) -> AsyncIterator[memoryview]:
        for frame in frames.split(self._buffer[: int(request)]):
            yield frame

    async def _put(self, requests: AsyncIterator[bytes], _: object) -> bytes:
        async for _request in requests:
            pass
        return b""


async def serve(addresses: Sequence[str]) -> None:
    process.keep_freed_memory()
    await rpc.serve("floor", ServingConfig(tuple(addresses), drain_seconds=0), rpc.Served({"floor": Floor()}))


class FloorClient:
    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=[("grpc.max_receive_message_length", 4 * _MIB)])

    async def get(self, into: memoryview) -> None:
        at = 0
        call: Callable[..., Any] = self._channel.unary_stream("/floor/get")
        async for message in call(str(len(into)).encode(), timeout=60):
            data = frames.decode_frame(message)
            into[at : at + len(data)] = data
            at += len(data)

    async def put(self, data: memoryview) -> None:
        call: Callable[..., Any] = self._channel.stream_unary("/floor/put", request_serializer=frames.encode_frame)
        await call(frames.split(data), timeout=60)

    async def close(self) -> None:
        await self._channel.close()


def memcpy(into: Sequence[memoryview], data: memoryview) -> float:
    """Fills buffers by plain copies, each from different bytes as far as possible; GB/s of CPU time."""
    start = time.process_time()
    for n, buffer in enumerate(into):
        at = n * len(buffer) % (len(data) - len(buffer) + 1)
        buffer[:] = data[at : at + len(buffer)]
    return sum(map(len, into)) / (time.process_time() - start) / 1e9


def preadv(
    into: Sequence[memoryview], places: Sequence[tuple[int, int]], clock: Callable[[], float] = time.process_time
) -> float:
    """Fills buffers one after another, each from a file descriptor and an offset; GB/s by the given clock."""
    start = clock()
    for buffer, (file, offset) in zip(into, places, strict=True):
        os.preadv(file, [buffer], offset)
    return sum(map(len, into)) / (clock() - start) / 1e9


def drop_pages(file: int) -> None:
    """Drops an open file from the page cache, so that the next read goes to its device, if that is local."""
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
