"""Several cache services over one remote tier, as processes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fusionkv.kvcache_service.client import CacheClient
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.runtime import errors
from fusionkv.protos.runtime.tls import ClientTLS
from tests.ports import free_port
from tests.system.cache_process import NAMESPACE, flags
from tests.system.mooncake_process import MooncakeMaster
from tests.system.object_process import Directory, ObjectServer
from tests.system.redis_process import RedisCluster, RedisServer
from tests.waiting import until

Remote = RedisServer | RedisCluster | MooncakeMaster | ObjectServer | Directory
REMOTES = {
    "redis": RedisServer,
    "redis cluster": RedisCluster,
    "mooncake": MooncakeMaster,
    "object store": ObjectServer,
    "directory": Directory,
}
# A busy machine must not look like a slow remote tier.
TIMING = ("--remote-lookup-ms", "5000", "--remote-timeout", "10")


class Services:
    """Cache services that share a remote tier. What happens to one of them, a test undoes."""

    def __init__(self, launch: Any, folder: Path, remote: Remote, *more: str, tls: ClientTLS | None = None) -> None:
        self._launch, self._folder, self._tls = launch, folder, tls
        self._flags = ("--remote-url", remote.url, *remote.flags, *TIMING, *more)
        self.services: list[Any] = []
        self.clients: list[CacheClient] = []

    def start(self, *more: str) -> None:
        data = self._folder / f"data{len(self.services)}"
        listen = ("--listen", f"127.0.0.1:{free_port()}")
        self.services.append(self._launch(*flags(data, *listen, *self._flags, *more)))

    def restart(self, number: int) -> None:
        self.services[number] = self._launch(*self.services[number].argv[3:])

    async def stats(self) -> list[pb.RemoteStats]:
        alive = [c for c, s in zip(self.clients, self.services, strict=True) if s.process.poll() is None]
        return [(await client.stats(timeout=20)).remote for client in alive]

    async def settled(self) -> None:
        """Waits until every service reaches the remote tier, and has written back all that was put."""

        async def met() -> bool:
            try:
                return all(s.reachable and not s.waiting for s in await self.stats())
            except errors.Unavailable:
                return False  # one that starts again

        await until(met)

    async def entries(self) -> list[int]:
        """Of the services' own."""
        return [(await client.stats()).tiers[-1].entries for client in self.clients]

    async def emptied(self) -> None:
        """All of it empty, and connected to anew: clients belong to the event loop that runs now."""
        self.clients = [CacheClient(service.address, self._tls) for service in self.services]
        await self.settled()
        for client in self.clients:
            await client.delete(namespace=NAMESPACE)

    async def kill9(self, number: int) -> None:
        await asyncio.to_thread(self.services[number].kill9)

    async def close(self) -> None:
        for client in self.clients:
            await client.close()


@asynccontextmanager
async def sharing(launch: Any, folder: Path, remote: Remote, *more: str, count: int = 2) -> AsyncIterator[Services]:
    """So many services, which are empty."""
    services = Services(launch, folder, remote, *more)
    for _ in range(count):
        await asyncio.to_thread(services.start)
    await services.emptied()
    try:
        yield services
    finally:
        await services.close()


def made(kind: str, folder: Path) -> Remote:
    """A remote tier of that kind, or the test is skipped."""
    folder.mkdir(exist_ok=True)
    remote = REMOTES[kind](folder)
    assert isinstance(remote, Remote)
    return remote
