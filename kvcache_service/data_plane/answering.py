"""Answers the calls on a connection of the data plane in turn, and sends bytes from the tiers."""

import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
from opentelemetry import propagate, trace

from fusionkv.kvcache_service.data_plane.messages import PIECE_BYTES, HungUp, Wire, encode
from fusionkv.kvcache_service.data_plane.spans import span
from fusionkv.kvcache_service.servicer import KVCacheServicer
from fusionkv.kvcache_service.store.writing import Writer
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.observe import telemetry
from fusionkv.protos.runtime import errors
from fusionkv.protos.runtime.errors import ServiceError

log = logging.getLogger(__name__)


class Answering:
    """The service's end of a connection. near: whether it is a unix socket's.

    If the caller takes 30 s to read or send a frame of 1 MiB, or less, calls raise TimeoutError.
    """

    def __init__(self, wire: Wire, service: KVCacheServicer, near: bool) -> None:
        self._wire = wire
        self._service = service
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
                hits = await self._service.lookups.lookup(request.lookup, near=self._near, waiting=cancelling)
                await self._send_leased(hits.lease, lookup=hits)
            case "find":
                stored = await self._service.lookups.find(request.find, near=self._near, waiting=cancelling)
                if request.find.sizes:
                    with cancelling():
                        async with self._service.reads.found(stored, request.find.sizes) as frames:
                            await self._send_entries(frames, find=stored)
                else:
                    await self._send_leased(stored.lease, find=stored)
            case "release":
                await self._send(release=self._service.release(request.release))
            case "fetch":
                # A caller that is gone may leave a full window, into which nothing can be sent.
                with cancelling():
                    async with self._service.reads.entry(request.fetch) as (size, frames):
                        await self._send_entries(frames, bytes=size)
            case "fetch_all":
                with cancelling():
                    async with self._service.reads.all(request.fetch_all) as (sizes, frames):
                        await self._send_entries(frames, sizes=pb.Sizes(bytes=sizes))
            case "put":
                await self._send(put=await self._service.store(request.put, self._receive_entry))
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
                await self._wire.fill(space)
                left -= len(space)
                await writer.filled(space)
        except ServiceError:
            writer.abort()
            scratch = memoryview(bytearray(min(left, PIECE_BYTES)))
            while left:
                await self._wire.fill(scratch[:left])
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
        with self._service.leases.kept(lease):
            await self._send(**result)

    async def _send(self, **result: Any) -> None:
        await self._wire.send(encode(pb.DataResponse(**result)))
