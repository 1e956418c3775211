"""The processes of a chaos run: cache services over a remote tier, workers with a shipped model, a gateway."""

import asyncio
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.gateway.client.client import AsyncClient
from fusionkv.kvcache_service.client import CacheClient
from fusionkv.protos.kvcache.v1 import kvcache_pb2
from fusionkv.protos.runtime.errors import DeadlineExceeded, Unavailable
from tests.chaos.network import Network, Place, Relay, mounted, unmounted
from tests.chaos.process import Clock, Process
from tests.chaos.secured import Secured
from tests.chaos.versions import Version
from tests.services import pool_bytes
from tests.system.mooncake_process import MooncakeMaster
from tests.system.redis_process import RedisServer, takes_libfaketime

CACHES, WORKERS = 3, 2
DISK_MIB, MOUNT_MIB = 48, 96
# Little more than the largest prompt: what was used is evicted soon, and has to be fetched.
POOL_TOKENS = 1024
LOOKUP_SECONDS, FETCH_SECONDS, CACHE_SECONDS, LEASE_MS = 0.5, 2.0, 6.0, 4000
# A machine that others use as well must not look like a slow remote tier all the time.
REMOTE_MS = 300


class World:
    """All of them; `async with` starts them. They end with the process that started them."""

    def __init__(
        self, folder: Path, model: Path, network: Network | None, other: Version | None, secured: bool, kind: str
    ) -> None:
        """other: a version that services may be replaced by. secured: with TLS and encryption. kind: of remote tier,
        redis or mooncake.
        """
        self.kind = kind
        self.folder, self.model, self.network, self.other = folder, model, network, other
        self.secured = Secured(folder / "secrets") if secured else None
        self.caches: list[Process] = []
        self.workers: list[Process] = []
        self.clocks: dict[str, Clock] = {}
        self.mounted = True
        self.remote_clock = self._clock("remote")
        self.relays: list[Relay] = []

    async def __aenter__(self) -> "World":
        await self._start_remote()
        await asyncio.gather(*(self._start_cache(number) for number in range(CACHES)))
        for number in range(WORKERS):
            await self._start_worker(number)
        self.judge = self._process("judge", "fusionkv.fusion_worker", *self._compute())
        await self.judge.start()
        addresses = ",".join(worker.address for worker in self.workers)
        # What was fetched on this machine changes no answer.
        more = ("--request-seconds", "60", "--embedder", "none")
        flags = ("--workers", addresses, "--data-dir", str(self.folder / "gateway"), *more)
        clock = self._clock("gateway").environment
        self.gateway = self._process("gateway", "fusionkv.gateway", *flags, env=clock)
        await self.gateway.start()
        tls = self.secured.tls if self.secured else None
        self.cache_clients = [CacheClient(cache.address, tls) for cache in self.caches]
        self.worker_clients = [WorkerClient(worker.address, tls) for worker in self.workers]
        self.judge_client = WorkerClient(self.judge.address, tls)
        self.client = AsyncClient(self.gateway.address, tls=tls)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for client in (*self.cache_clients, *self.worker_clients, self.judge_client, self.client):
            await client.close()
        for process in (self.gateway, self.judge, *self.workers, *self.caches):
            if process.alive:
                process.kill9()
        self.remote.kill9()
        for relay in self.relays:
            await relay.close()
        for number in range(CACHES):
            unmounted(self.data(number).parent)

    @cached_property  # of a world that runs: two entries start processes of the other version
    def lacks(self) -> dict[str, str]:
        """By what a fault may need: why that is not there, or nothing."""
        none = "no network namespaces"
        return {
            "network": "" if self.network else none,
            "tc": self.network.no_shapes if self.network else none,
            "mount": "" if self.mounted else "no mounts",
            "clock": "" if Clock.preload else "no libfaketime",
            "clock of the remote tier": "" if self._remote_environment() else "no libfaketime for the remote tier",
            "history": "" if self.other else "no other version",
            "history of caches": self._unlike_caches(),
            "history of gateways": self._unlike_gateways(),
            "redis": "" if self.kind == "redis" else "no Redis",
            "secured": "" if self.secured else "not --secured",
        }

    @property
    def processes(self) -> list[Process]:
        return [*self.caches, *self.workers, self.gateway]

    def data(self, number: int) -> Path:
        """The directory of a cache service, on a small file system of its own where that can be."""
        return self.folder / f"disk{number}" / "data"

    async def settled(self, timeout: float) -> None:
        """Waits until every cache service reaches the remote tier and has written back all, and workers answer.

        Raises:
            TimeoutError: they don't come to that; the message says what is missing.
        """
        stats: list[object] = []
        try:
            async with asyncio.timeout(timeout):
                while not await self._written_back(stats):  # noqa: ASYNC110 - nobody announces it
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise TimeoutError(f"the cache services do not settle: {stats}") from None

    async def _written_back(self, said: list[object]) -> bool:
        said.clear()
        for client in self.cache_clients:
            try:
                said.append((await client.stats(timeout=5)).remote)
            except (Unavailable, DeadlineExceeded) as error:  # the connection is made anew within a second or two
                said.append(error)
                return False
        found = [stats for stats in said if isinstance(stats, kvcache_pb2.RemoteStats)]
        if not all(stats.reachable and not stats.waiting for stats in found):
            return False
        # A connection to one that was killed is made anew after up to some seconds.
        said += [await client.answers(timeout=5) for client in self.worker_clients]
        return all(said[CACHES:])

    def _place(self) -> Place:
        return self.network.place() if self.network else Place("127.0.0.1")

    def _process(self, name: str, module: str, *flags: str, env: Mapping[str, str] | None = None) -> Process:
        place = self._place()
        own = self.secured.flags(name, place) if self.secured else ()
        return Process(name, place, module, *own, *flags, env=env)

    def _clock(self, name: str) -> Clock:
        self.clocks[name] = Clock(self.folder / f"{name}.clock")
        return self.clocks[name]

    def _remote_environment(self) -> Mapping[str, str]:
        return self.remote_clock.environment if self.kind == "mooncake" or takes_libfaketime() else {}

    async def _start_remote(self) -> None:
        self.remote_place = self._place()
        at = self.remote_place.listen()
        host, _, port = at.rpartition(":")
        faked = [f"{name}={value}" for name, value in self._remote_environment().items()]
        before = (*self.remote_place.before, *(["env", *faked] if faked else []))
        self.remote: RedisServer | MooncakeMaster
        if self.kind == "mooncake":
            self.remote = MooncakeMaster(self.folder, port=int(port), host=host, before=before)
            return
        self.remote = RedisServer(self.folder, "--protected-mode", "no", port=int(port), host=host, before=before)
        here = self.network.here if self.network else Place("127.0.0.1")
        self.relays = [Relay(here.listen(), at) for _ in range(CACHES)]
        for relay in self.relays:
            await relay.start()

    def _remote_flags(self, number: int, place: Place) -> tuple[str, ...]:
        if self.kind == "mooncake":
            return "--remote-url", f"{self.remote.url}?host={place.address}", *self.remote.flags
        return "--remote-url", f"redis://{self.relays[number].address}"

    def _unlike_caches(self) -> str:
        """Why a cache service can't be replaced by another version's."""
        if self.other is None:
            return "no other version"
        alike = self.other.takes("fusionkv.kvcache_service", self.caches[0].flags)
        return "" if alike else "the other version's cache service has other settings"

    def _unlike_gateways(self) -> str:
        """Why the gateway can't be replaced by another version's."""
        if self.other is None:
            return "no other version"
        return "" if self.other.shares_corpora() else "the other version's gateway has another format of corpora"

    async def _start_cache(self, number: int) -> None:
        self.mounted &= mounted(self.data(number).parent, MOUNT_MIB)
        name = f"cache{number}"
        made = self._process(
            name, "fusionkv.kvcache_service", *(self.secured.disk if self.secured else ()),
            "--data-dir", str(self.data(number)),
            "--memory-bytes", "2MiB", "--disk-bytes", f"{DISK_MIB}MiB", "--lease-ms", str(LEASE_MS),
            "--remote-lookup-ms", str(REMOTE_MS), "--remote-timeout", "1", "--drain-seconds", "6",
            env=self._clock(name).environment,
        )  # fmt: skip
        made.add(*self._remote_flags(number, made.place))
        self.caches.append(made)
        await made.start()

    async def _start_worker(self, number: int) -> None:
        name = f"worker{number}"
        made = self._process(
            name, "fusionkv.fusion_worker", *self._compute(),
            "--cache", self.caches[number].address, "--lookup-timeout", str(LOOKUP_SECONDS),
            "--fetch-timeout", str(FETCH_SECONDS), "--cache-seconds", str(CACHE_SECONDS),
            env=self._clock(name).environment,
        )  # fmt: skip
        self.workers.append(made)
        await made.start()

    def _compute(self) -> tuple[str, ...]:
        where = ("--device", "cpu", "--dtype", "float32", "--threads", "1")
        return ("--model", str(self.model), *where, "--pool-bytes", pool_bytes(self.model, POOL_TOKENS))
