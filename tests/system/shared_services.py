"""Several cache services behind one real Redis, as processes."""

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.client import CacheClient
from fusionkv.kvcache_service.cluster.rendezvous import ranking
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.runtime import errors
from fusionkv.protos.runtime.checksum import checksum as checksum_of
from fusionkv.protos.runtime.tls import ClientTLS
from tests.ports import free_port
from tests.system.cache_process import NAMESPACE, SYSTEM, chunk, flags
from tests.waiting import until

# A busy machine must not look like a slow Redis, nor like a service that died.
TIMEOUT_MS, EXPIRY = 3000, 5.0


class Services:
    """Cache services that share an index. What happens to one of them, a test undoes."""

    def __init__(self, launch: Any, folder: Path, url: str, *more: str, tls: ClientTLS | None = None) -> None:
        self._launch, self._folder, self._tls = launch, folder, tls
        timing = ("--redis-timeout-ms", str(TIMEOUT_MS), "--redis-expiry-seconds", str(EXPIRY))
        self._flags = ("--redis-url", url, *timing, *more)
        self.services: list[Any] = []
        self.clients: list[CacheClient] = []

    def start(self, *more: str) -> None:
        data = self._folder / f"data{len(self.services)}"
        listen = ("--listen", f"127.0.0.1:{free_port()}")
        self.services.append(self._launch(*flags(data, *listen, *self._flags, *more)))

    def restart(self, number: int) -> None:
        self.services[number] = self._launch(*self.services[number].argv[3:])

    async def stats(self) -> list[pb.SharedIndexStats]:
        alive = [c for c, s in zip(self.clients, self.services, strict=True) if s.process.poll() is None]
        return [(await client.stats(timeout=20)).shared_index for client in alive]

    async def settled(self, members: int = 3) -> None:
        """Waits until every service knows of all and has published all."""

        async def met() -> bool:
            try:
                return all(s.reachable and s.members == members and not s.waiting for s in await self.stats())
            except errors.Unavailable:
                return False  # one that starts again

        await until(met)

    async def entries(self) -> list[int]:
        return [(await client.stats()).tiers[-1].entries for client in self.clients]

    def home(self, name: object, services: Sequence[int] = (0, 1, 2)) -> int:
        """The service that an entry belongs to."""
        addresses = {self.services[i].address: i for i in services}
        return addresses[ranking(keys.replica_key(NAMESPACE, SYSTEM, chunk(name)), addresses)[0]]

    def names(self, count: int, prefix: str = "") -> list[str]:
        """Names of entries, `count` of which belong to each service; which, the ports of the services decide."""
        chosen: list[str] = []
        homes: Counter[int] = Counter()
        numbers = itertools.count()
        while len(chosen) < 3 * count:
            name = f"{prefix}{next(numbers)}"
            if homes[home := self.home(name)] < count:
                homes[home] += 1
                chosen.append(name)
        return chosen

    async def emptied(self, members: int = 3) -> None:
        """All of them empty, and connected to anew: clients belong to the event loop that runs now."""
        self.clients = [CacheClient(service.address, self._tls) for service in self.services]
        await self.settled(members)
        await self.clients[0].delete(namespace=NAMESPACE)
        await self.settled(members)

    async def close(self) -> None:
        for client in self.clients:
            await client.close()


async def put_here(client: CacheClient, path: list[bytes], data: bytes, variant: bytes = b"") -> None:
    """Stores an entry at a service, wherever it belongs."""
    header = pb.PutHeader(
        namespace=NAMESPACE, path=path, variant=variant, size_bytes=len(data), tokens=1, here=True,
        checksum=checksum_of(data),
    )  # fmt: skip
    response = await client.send(header, memoryview(data), 30)
    assert response.outcome == pb.PutResponse.OUTCOME_STORED
