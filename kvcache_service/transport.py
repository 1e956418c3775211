"""How a client's calls reach a cache service: on its data plane, and by gRPC where that is not possible."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import grpc
from opentelemetry import propagate, trace

from fusionkv.kvcache_service.data_plane.connection import Broken, Connection, Connections, Refused
from fusionkv.kvcache_service.data_plane.spans import SERVICE, span, tracer
from fusionkv.protos.deadline import Deadline
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.kvcache.v1.kvcache_pb2_grpc import KVCacheServiceStub
from fusionkv.protos.runtime import cancellation, errors, frames, process, rpc
from fusionkv.protos.runtime.tls import ClientTLS

T = TypeVar("T")

# Key in the initial metadata of a Put: space is reserved, and the client shall send the data.
RESERVED = "fusionkv-reserved"


class GRPCCalls:
    """The calls of a client to one service by gRPC."""

    def __init__(self, address: str, tls: ClientTLS | None) -> None:
        self._address, self._tls = address, tls
        self._channels: list[grpc.aio.Channel] = []
        self._stub: Any = None
        self._closed = False
        self._puts: set[asyncio.Timeout] = set()

    async def close(self) -> None:
        self._closed = True
        for put in self._puts:
            put.reschedule(0)  # grpc.aio would let it wait for ever
        for channel in self._channels:
            await channel.close()

    async def put(self, header: pb.PutHeader, data: memoryview, deadline: Deadline) -> pb.PutResponse:
        """As `Transport.send`."""
        with self.reported("put at"):
            async with asyncio.timeout(None) as put:
                self._puts.add(put)
                try:
                    return await self._put(header, data, deadline)
                finally:
                    self._puts.discard(put)

    @contextlib.contextmanager
    def reported(self, doing: str) -> Iterator[None]:
        """Raises gRPC's errors as this client's, which say what was done: "put at", for example."""
        try:
            yield
        except grpc.RpcError as error:
            raise errors.from_rpc(error, f"{doing} the cache service at {self._address}") from error
        except (TimeoutError, asyncio.CancelledError) as error:
            # `close` ends Puts by a timeout, and grpc.aio may cancel other calls.
            if not self._closed or cancellation.requests():
                raise
            raise self._unavailable(doing) from error

    def _unavailable(self, doing: str) -> errors.Unavailable:
        return errors.Unavailable(f"{doing} the cache service at {self._address}: the client is closed")

    def check(self, method: str, deadline: Deadline) -> None:
        """Raises DeadlineExceeded or Unavailable if a call is not worth a try."""
        if deadline.passed:
            raise errors.DeadlineExceeded(f"no time left for {method} at the cache service at {self._address}")
        if self._closed:
            raise self._unavailable(f"{method} at")

    def begin(self, method: str, request: Any, deadline: Deadline, **more: Any) -> Any:
        """Starts a call. The channel is created here, since it binds to the running event loop."""
        self.check(method.lower(), deadline)
        if not self._channels:
            process.keep_freed_memory()
            channel = rpc.dial(self._address, tls=self._tls)
            put_channel = rpc.dial(self._address, tls=self._tls, traced=False)
            self._channels, self._stub = [channel, put_channel], KVCacheServiceStub(channel)
            # KV bytes bypass protobuf (frames.py).
            self._stub.Fetch = channel.unary_stream(
                SERVICE + "Fetch", request_serializer=pb.FetchRequest.SerializeToString, response_deserializer=None
            )
            self._stub.Put = put_channel.stream_unary(
                SERVICE + "Put", request_serializer=_put_message, response_deserializer=pb.PutResponse.FromString
            )
        return getattr(self._stub, method)(request, timeout=deadline.remaining(), **more)

    async def _put(self, header: pb.PutHeader, data: memoryview, deadline: Deadline) -> pb.PutResponse:
        """Data that the server does not need would lose the status.

        grpc.aio reports INTERNAL for a write after the end of its call.
        """
        rpc_of = {"rpc.system": "grpc", "rpc.service": "kvcache.v1.KVCacheService", "rpc.method": "Put"}
        put = tracer.start_as_current_span(SERVICE + "Put", kind=trace.SpanKind.CLIENT, attributes=rpc_of)
        with put, self.reported("put at"):
            metadata: dict[str, str] = {}
            propagate.inject(metadata)
            call = self.begin("Put", None, deadline, metadata=tuple(metadata.items()))
            try:
                # The call has ended, and its status has the reason. InternalError: directly before the half-close.
                with suppress(asyncio.InvalidStateError, grpc.aio.InternalError):
                    await call.write(pb.PutRequest(header=header))
                    if RESERVED in await call.initial_metadata():
                        for frame in frames.split(data):
                            await call.write(frame)
                        await call.done_writing()
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.INTERNAL:
                    raise
                if deadline.passed:  # during a write, which does not say so
                    why = f"put at the cache service at {self._address}: not all bytes were sent in time"
                    raise errors.DeadlineExceeded(why) from error
                # A write on a broken connection: a server that ends cancels calls after its drain time.
                why = f"put at the cache service at {self._address}: it stopped during the call"
                raise errors.Unavailable(why) from error
            else:
                return await call
            finally:
                call.cancel()


class Transport:
    """The connections of a client to one service. Errors are raised as `fusionkv.protos.runtime.errors`."""

    def __init__(self, address: str, tls: ClientTLS | None) -> None:
        self.address = address
        self._tls = tls
        self._grpc = GRPCCalls(address, tls)
        self._data: Connections | None = None

    async def close(self) -> None:
        """Closes the connections; calls in progress and later ones raise Unavailable."""
        if self._data is not None:
            self._data.close()
        await self._grpc.close()

    async def exchange(self, name: str, request: Any, deadline: Deadline) -> Any:
        """A call with one response: on the data plane, or by gRPC if that is not possible."""
        asked = pb.DataRequest(**{name: request})
        try:
            response = await self._on_data_plane(asked, lambda connection: connection.call(asked), deadline)
        except Broken:
            return await self.call(name.capitalize(), request, deadline)
        return getattr(response, name)

    async def call(self, method: str, request: Any, deadline: Deadline) -> Any:
        """A call by gRPC."""
        with self._grpc.reported(f"{method.lower()} at"):
            return await self._grpc.begin(method, request, deadline)

    async def receive(self, request: pb.FetchRequest, into: memoryview, deadline: Deadline) -> bytes | None:
        """Fills `into` with the bytes of an entry; returns their checksum, or None if the sizes differ."""
        asked = pb.DataRequest(fetch=request)

        async def receive(connection: Connection) -> bytes:
            response = await connection.call(asked)
            if response.bytes != len(into):
                raise Broken(f"{response.bytes} bytes of an entry of {len(into)}")
            return (await connection.receive([into]))[0]

        with suppress(Broken):
            return await self._on_data_plane(asked, receive, deadline)
        call = self._grpc.begin("Fetch", request, deadline)
        try:
            with self._grpc.reported("fetch from"):
                return await frames.fill(into, call)
        except ValueError as error:
            raise errors.DataLoss(f"fetch from the cache service at {self.address}: {error}") from error
        finally:
            call.cancel()

    async def find(
        self, request: pb.FindRequest, into: Sequence[memoryview], deadline: Deadline
    ) -> tuple[pb.FindResponse, dict[int, bytes]]:
        """The response to a Find with the sizes of buffers, and the checksums of those that were filled, by index."""
        asked = pb.DataRequest(find=request)

        async def receive(connection: Connection) -> tuple[pb.FindResponse, dict[int, bytes]]:
            found = (await connection.call(asked)).find
            if len(found.hits) != len(into) or any(
                i >= len(into) or found.hits[i].entry.size_bytes != len(into[i]) for i in found.following
            ):
                raise Broken("entries of other sizes")
            digests = await connection.receive([into[i] for i in found.following])
            return found, dict(zip(found.following, digests, strict=True))

        try:
            return await self._on_data_plane(asked, receive, deadline)
        except Broken:
            return await self.call("Find", request, deadline), {}

    async def receive_all(
        self, requests: Sequence[pb.FetchRequest], into: Sequence[memoryview], deadline: Deadline
    ) -> list[bytes] | None:
        """Fills buffers with the bytes of an entry each; returns their checksums, empty for entries that are gone.

        Returns None if there is no data plane: they have to be received one by one.
        """
        asked = pb.DataRequest(fetch_all=pb.FetchAllRequest(entries=requests))

        async def receive(connection: Connection) -> list[bytes]:
            sizes = (await connection.call(asked)).sizes.bytes
            # Of an entry that is gone, 0.
            if len(sizes) != len(into) or any(
                size not in (0, len(view)) for size, view in zip(sizes, into, strict=True)
            ):
                raise Broken("entries of other sizes")
            views = [view[:size] for view, size in zip(into, sizes, strict=True)]
            digests = await connection.receive(views)
            return [digest if size else b"" for digest, size in zip(digests, sizes, strict=True)]

        try:
            return await self._on_data_plane(asked, receive, deadline)
        except Broken:
            return None

    async def send(self, header: pb.PutHeader, data: memoryview, deadline: Deadline) -> pb.PutResponse:
        """Sends the header of a Put, waits until the server has reserved space, then sends the data.

        If the server does not need the data, it responds at once.
        """
        asked = pb.DataRequest(put=header)

        async def send(connection: Connection) -> pb.PutResponse:
            response = await connection.call(asked)
            if response.WhichOneof("result") == "reserved":
                await connection.send(data)
                response = await connection.response()
            return response.put

        with suppress(Broken):
            return await self._on_data_plane(asked, send, deadline)
        return await self._grpc.put(header, data, deadline)

    async def _on_data_plane(
        self, request: pb.DataRequest, work: Callable[[Connection], Awaitable[T]], deadline: Deadline
    ) -> T:
        """Runs `work` on a connection, which makes this request there. Raises Broken if gRPC is to be used."""
        name = str(request.WhichOneof("call"))
        self._grpc.check(name, deadline)
        if self._data is None:
            # Here, since it binds to the running event loop.
            self._data = Connections(self.address, partial(self.call, "Connect", pb.ConnectRequest()), self._tls)
        doing = f"{name} at the cache service at {self.address}"
        with span(name, trace.SpanKind.CLIENT):
            context: dict[str, str] = {}
            propagate.inject(context)
            request.traceparent = context.get("traceparent", "")
            try:
                return await self._data.run(work, deadline)
            except Refused as error:
                raise errors.of_number(error.status, f"{doing}: {error}") from error
            except TimeoutError as error:
                raise errors.DeadlineExceeded(f"{doing}: no response in time") from error


def _put_message(message: pb.PutRequest | memoryview) -> bytes:
    return frames.encode_frame(message) if isinstance(message, memoryview) else message.SerializeToString()
