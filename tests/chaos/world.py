"""The processes of a chaos run: cache services behind a Redis, workers with a shipped model, a gateway."""

import asyncio
import json
from pathlib import Path

from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.gateway.client import AsyncClient
from fusionkv.kvcache_service.client import CacheClient
from fusionkv.protos.errors import DeadlineExceeded, Unavailable
from fusionkv.protos.kvcache.v1 import kvcache_pb2
from tests.chaos.network import Network, Place, Relay, mounted, unmounted
from tests.chaos.process import Clock, Process
from tests.system.redis_process import RedisServer

CACHES, WORKERS = 3, 2
DISK_MIB, MOUNT_MIB = 48, 96
# Little more than the largest prompt: what was used is evicted soon, and has to be fetched.
POOL_TOKENS = 1024
LOOKUP_SECONDS, FETCH_SECONDS, EXPIRY_SECONDS, LEASE_MS = 0.5, 2.0, 2.0, 4000
# A machine that others use as well must not look like a slow Redis all the time.
REDIS_MS = 300


class World:
    """All of them; `async with` starts them. They end with the process that started them."""

    def __init__(self, folder: Path, model: Path, network: Network | None) -> None:
        self.folder, self.model, self.network = folder, model, network
        self.caches: list[Process] = []
        self.workers: list[Process] = []
        self.clocks: dict[str, Clock] = {}
        self.mounted = True
        self.redis_clock = self._clock("redis")

    async def __aenter__(self) -> "World":
        self.redis_place = self._place()
        host, _, port = self.redis_place.listen().rpartition(":")
        faked = [f"{name}={value}" for name, value in self.redis_clock.environment.items()]
        before = (*self.redis_place.before, *(["env", *faked] if faked else []))
        more = ("--protected-mode", "no")
        self.redis = RedisServer(self.folder, *more, port=int(port), host=host, before=before)
        here = self.network.here if self.network else Place("127.0.0.1")
        self.relay = Relay(here.listen(), f"{host}:{port}")
        await self.relay.start()
        await asyncio.gather(*(self._start_cache(number) for number in range(CACHES)))
        for number in range(WORKERS):
            await self._start_worker(number)
        addresses = ",".join(worker.address for worker in self.workers)
        data = ("--data-dir", str(self.folder / "gateway"), "--request-seconds", "60")
        self.gateway = Process("gateway", self._place(), "fusionkv.gateway", "--workers", addresses, *data)
        await self.gateway.start()
        self.cache_clients = [CacheClient(cache.address) for cache in self.caches]
        self.worker_clients = [WorkerClient(worker.address) for worker in self.workers]
        self.client = AsyncClient(self.gateway.address)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for client in (*self.cache_clients, *self.worker_clients, self.client):
            await client.close()
        for process in (self.gateway, *self.workers, *self.caches):
            if process.alive:
                process.kill9()
        self.redis.kill9()
        await self.relay.close()
        for number in range(CACHES):
            unmounted(self.data(number).parent)

    @property
    def processes(self) -> list[Process]:
        return [*self.caches, *self.workers, self.gateway]

    def data(self, number: int) -> Path:
        """The directory of a cache service, on a small file system of its own where that can be."""
        return self.folder / f"disk{number}" / "data"

    async def settled(self, timeout: float) -> None:
        """Waits until every cache service knows all others and has published all that it holds.

        Raises:
            TimeoutError: they don't come to that; the message says what is missing.
        """
        stats: list[object] = []
        try:
            async with asyncio.timeout(timeout):
                while not await self._knows_all(stats):  # noqa: ASYNC110 - nobody announces it
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise TimeoutError(f"the shared index does not settle: {stats}") from None

    async def _knows_all(self, said: list[object]) -> bool:
        said.clear()
        for client in self.cache_clients:
            try:
                said.append((await client.stats(timeout=5)).shared_index)
            except (Unavailable, DeadlineExceeded) as error:  # the connection is made anew within a second or two
                said.append(error)
                return False
        shared = [found for found in said if isinstance(found, kvcache_pb2.SharedIndexStats)]
        return all(found.reachable and found.members == CACHES and not found.waiting for found in shared)

    def _place(self) -> Place:
        return self.network.place() if self.network else Place("127.0.0.1")

    def _clock(self, name: str) -> Clock:
        self.clocks[name] = Clock(self.folder / f"{name}.clock")
        return self.clocks[name]

    async def _start_cache(self, number: int) -> None:
        self.mounted &= mounted(self.data(number).parent, MOUNT_MIB)
        name = f"cache{number}"
        made = Process(
            name, self._place(), "fusionkv.kvcache_service", "--data-dir", str(self.data(number)),
            "--memory-bytes", "2MiB", "--disk-bytes", f"{DISK_MIB}MiB", "--lease-ms", str(LEASE_MS),
            "--redis-url", f"redis://{self.relay.address}", "--redis-timeout-ms", str(REDIS_MS),
            "--redis-expiry-seconds", str(EXPIRY_SECONDS), "--drain-seconds", "6",
            env=self._clock(name).environment,
        )  # fmt: skip
        self.caches.append(made)
        await made.start()

    async def _start_worker(self, number: int) -> None:
        shape = json.loads((self.model / "config.json").read_text())
        head = shape["hidden_size"] // shape["num_attention_heads"]
        token = shape["num_hidden_layers"] * 2 * shape["num_key_value_heads"] * head * 4
        made = Process(
            f"worker{number}", self._place(), "fusionkv.fusion_worker", "--model", str(self.model),
            "--device", "cpu", "--dtype", "float32", "--threads", "1", "--pool-bytes", str(POOL_TOKENS * token),
            "--cache", self.caches[number].address, "--lookup-timeout", str(LOOKUP_SECONDS),
            "--fetch-timeout", str(FETCH_SECONDS),
        )  # fmt: skip
        self.workers.append(made)
        await made.start()
