"""Answers the calls on a connection of the data plane in turn, and sends bytes from the tiers."""

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol

import grpc
from opentelemetry import propagate, trace

from fusionkv.kvcache_service.data_plane.messages import PIECE_BYTES, HungUp, Wire, encode
from fusionkv.kvcache_service.data_plane.spans import span
from fusionkv.kvcache_service.store.writing import Writer
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.observe import telemetry
from fusionkv.protos.runtime import errors
from fusionkv.protos.runtime.errors import ServiceError

log = logging.getLogger(__name__)


class Calls(Protocol):
    """What the data plane calls: the service's implementation of the same calls by gRPC."""

    async def lookup(
        self, request: pb.LookupRequest, *, near: bool, waiting: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> pb.LookupResponse:
        """waiting: entered while others are asked."""
        ...

    async def find(
        self, request: pb.FindRequest, *, near: bool, waiting: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> pb.FindResponse: ...

    def release(self, request: pb.ReleaseRequest) -> pb.ReleaseResponse: ...

    def reading(
        self, request: pb.FetchRequest
    ) -> contextlib.AbstractAsyncContextManager[tuple[int, AsyncIterator[memoryview]]]:
        """Number of an entry's bytes, and the bytes in frames."""
        ...

    def reading_all(
        self, request: pb.FetchAllRequest
    ) -> contextlib.AbstractAsyncContextManager[tuple[list[int], AsyncIterator[memoryview]]]:
        """The sizes of entries, and the bytes of all in frames."""
        ...

    def reading_found(
        self, found: pb.FindResponse, sizes: Sequence[int]
    ) -> contextlib.AbstractAsyncContextManager[AsyncIterator[memoryview]]:
        """The bytes of what was found, in frames; notes in the response which these are."""
        ...

    async def store(self, header: pb.PutHeader, receive: "Receive") -> pb.PutResponse: ...


class Receive(Protocol):
    """Receives the bytes of an entry for which space is reserved. Raises as `Writer.write` does."""

    def __call__(self, writer: Writer) -> Awaitable[None]: ...


class Answering:
    """The service's end of a connection. near: whether it is a unix socket's.

    If the caller reads nothing, or sends nothing, for 30 s, calls raise TimeoutError.
    """

    def __init__(self, wire: Wire, calls: Calls, near: bool) -> None:
        self._wire = wire
        self._calls = calls
        self._near = near
        self._sending = False  # whether bytes were announced that are not sent yet

    async def answer(self, request: pb.DataRequest) -> None:
        """Raises HungUp, upon which the connection is closed, if the call failed after bytes were announced."""
        call = request.WhichOneof("call")
        context = propagate.extract({"traceparent": request.traceparent})
        with span(str(call), trace.SpanKind.SERVER, context):
            try:
                await self._call(request, call)
            except (OSError, HungUp):
                raise
            except Exception as error:
                telemetry.record_error(error)
                status, message = grpc.StatusCode.INTERNAL, f"internal error: {type(error).__name__}"
                if isinstance(error, ServiceError):
                    status, message = error.status, errors.details(error)
                else:
                    log.exception("unexpected error in %s of the data plane", call)
                if self._sending:
                    raise HungUp from error
                await self._send(error=pb.DataError(status=status.value[0], message=message))

    async def _call(self, request: pb.DataRequest, call: str | None) -> None:
        cancelling = self._wire.ready.cancelling
        match call:
            case "lookup":
                hits = await self._calls.lookup(request.lookup, near=self._near, waiting=cancelling)
                await self._send_leased(hits.lease, lookup=hits)
            case "find":
                stored = await self._calls.find(request.find, near=self._near, waiting=cancelling)
                if request.find.sizes:
                    with cancelling():
                        async with self._calls.reading_found(stored, request.find.sizes) as frames:
                            await self._send_entries(frames, find=stored)
                else:
                    await self._send_leased(stored.lease, find=stored)
            case "release":
                await self._send(release=self._calls.release(request.release))
            case "fetch":
                # A caller that is gone may leave a full window, into which nothing can be sent.
                with cancelling():
                    async with self._calls.reading(request.fetch) as (size, frames):
                        await self._send_entries(frames, bytes=size)
            case "fetch_all":
                with cancelling():
                    async with self._calls.reading_all(request.fetch_all) as (sizes, frames):
                        await self._send_entries(frames, sizes=pb.Sizes(bytes=sizes))
            case "put":
                await self._send(put=await self._calls.store(request.put, self._receive_entry))
            case None:
                raise HungUp

    async def _receive_entry(self, writer: Writer) -> None:
        """Has the caller send an entry's bytes, and receives them where they are stored.

        If they can't be, receives and drops the rest.
        """
        await self._send(reserved=True)
        left = writer.size
        try:
            while left:
                space = writer.space(min(PIECE_BYTES, left))
                await self._fill(space)
                left -= len(space)
                await writer.filled(space)
        except ServiceError:
            writer.abort()
            scratch = memoryview(bytearray(min(left, PIECE_BYTES)))
            while left:
                await self._fill(scratch[:left])
                left -= min(left, len(scratch))
            raise

    async def _send_entries(self, frames: AsyncIterator[memoryview], **announced: Any) -> None:
        """Answers with what is announced, and sends the bytes of entries."""
        async for frame in frames:
            # Not before: the first one may fail with a status.
            if not self._sending:
                await self._send(**announced)
                self._sending = True
            await self._wire.send(frame)
        if not self._sending:
            await self._send(**announced)
        self._sending = False

    async def _send_leased(self, lease: int, **result: Any) -> None:
        """Sends a response; releases the lease if the caller hung up, who never learns of it."""
        try:
            await self._send(**result)
        except BaseException:
            self._calls.release(pb.ReleaseRequest(lease=lease))
            raise

    async def _send(self, **result: Any) -> None:
        await self._wire.send(encode(pb.DataResponse(**result)))

    async def _fill(self, into: memoryview) -> None:
        into = into[self._wire.take(into) :]
        while into:
            into = into[await self._wire.receive(into) :]
