"""A server for test_rpc.py: the real `serve` around methods that succeed, fail or hang as the request asks."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.observe import handshakes, logs
from fusionkv.protos.runtime import errors, rpc
from fusionkv.protos.serving import ServingConfig

TLS = ("TLS_CERT", "TLS_KEY", "TLS_CLIENT_CA")


class Servicer:
    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:
        """Raises the error that the namespace names, a ValueError for any other name."""
        name = request.namespace.decode()
        raise getattr(errors, name, ValueError)(f"what to do about {name}")

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> AsyncIterator[pb.FetchResponse]:
        """One frame, then an error or no end."""
        try:
            yield pb.FetchResponse(data=b"first")
            if request.key == b"fail":
                raise errors.DataLoss("bad checksum")
            await asyncio.Event().wait()
        finally:
            print("ended", flush=True)

    async def Prefetch(self, request: pb.PrefetchRequest, context: Any) -> pb.PrefetchResponse:
        """Never ends by itself."""
        print("begun", flush=True)
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            print("ended", flush=True)

    async def Put(self, requests: AsyncIterator[pb.PutRequest], context: Any) -> pb.PutResponse:
        """Answers with the number of bytes received."""
        received = 0
        async for request in requests:
            received += len(request.data)
            print(f"received {received}", flush=True)
        return pb.PutResponse(key=received.to_bytes(8, "big"))

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        return pb.ReleaseResponse()

    async def Delete(self, request: pb.DeleteRequest, context: Any) -> pb.DeleteResponse:
        return pb.DeleteResponse(deleted=len(request.namespace))

    async def Find(self, request: pb.FindRequest, context: Any) -> pb.FindResponse:
        return pb.FindResponse()

    async def Connect(self, request: pb.ConnectRequest, context: Any) -> pb.ConnectResponse:
        return pb.ConnectResponse()

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsResponse:
        return pb.StatsResponse()


async def main(drain_seconds: float, *addresses: str) -> None:
    service = pb.DESCRIPTOR.services_by_name["KVCacheService"]

    async def on_drain() -> None:
        print("drained", flush=True)

    tls = {name.lower(): Path(os.environ[name]) for name in TLS if name in os.environ}
    config = ServingConfig(addresses, drain_seconds, **tls)
    services = {service.full_name: rpc.handlers(service, Servicer())}
    await rpc.serve("test", config, rpc.Served(services, on_drain=on_drain))


if __name__ == "__main__":
    logs.attach("test")
    if TLS[0] in os.environ:
        handshakes.attach()
    asyncio.run(main(float(sys.argv[1]), *sys.argv[2:]))
