"""The fusion workers that there are: found by their addresses and names, with what is known of each."""

import asyncio
import contextlib
import logging
import math
import socket
import time
from collections import OrderedDict
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.runtime.cancellation import background
from fusionkv.protos.runtime.errors import Unavailable
from fusionkv.protos.runtime.tls import ClientTLS

log = logging.getLogger(__name__)
T = TypeVar("T")
_DNS = "dns:"
# Seconds between lookups, within which added and removed workers are noticed.
RESOLVE_SECONDS = 5.0
# A worker whose last reply is older than _FRESH_SECONDS must pass a health check within _CHECK_SECONDS before it
# receives a request.
_FRESH_SECONDS, _CHECK_SECONDS = 1.0, 2.0
# An unresponsive worker is tried last for so long.
_LAST_SECONDS = 10.0
# Tokens of a pool whose size is not known yet, and the most chunks to remember.
_FIRST_TOKENS, _MAX_CHUNKS = 1 << 16, 1 << 16
# What a reply says of a worker rather than of its model.
_OF_WORKER = ("device", "dtype", "kv_bytes_per_token", "verdicts")


class PrefixAffinity:
    """Chunks by name with their tokens, evicted least recently used first, as in the pool.

    An estimate, from the requests sent to the worker: other gateways may use it too, and requests' own tokens take
    room in its pool. An error costs a load from the cache service.
    """

    def __init__(self) -> None:
        self._tokens: OrderedDict[bytes, int] = OrderedDict()
        self._sum = 0
        self._capacity = _FIRST_TOKENS

    def share(self, chunks: Mapping[bytes, int]) -> float:
        """Share of the tokens of a prompt's chunks that the pool probably holds, 0..1."""
        held = sum(tokens for name, tokens in chunks.items() if name in self._tokens)
        return held / sum(chunks.values()) if held else 0.0

    def use(self, chunks: Mapping[bytes, int]) -> None:
        """Records that the worker receives a prompt with these chunks."""
        for name, tokens in chunks.items():
            self._sum += tokens - self._tokens.pop(name, 0)
            self._tokens[name] = tokens
        self._trim()

    def resize(self, tokens: int) -> None:
        """Sets the size of the pool, as reported by the worker."""
        self._capacity = tokens
        self._trim()

    def clear(self) -> None:
        """Forgets all chunks: the worker has, or may have, restarted."""
        self._tokens.clear()
        self._sum = 0

    def _trim(self) -> None:
        while self._sum > self._capacity or len(self._tokens) > _MAX_CHUNKS:
            _, tokens = self._tokens.popitem(last=False)
            self._sum -= tokens


@dataclass(eq=False)
class Member:
    """One worker, with its calls in flight and its recent responsiveness."""

    client: WorkerClient
    in_flight: int = 0
    users: int = 0
    """Requests that call it, or may still choose it."""
    holdings: PrefixAffinity = field(default_factory=PrefixAffinity)
    described: pb.GetModelResponse | None = None
    """The reply that `vocabulary` was made from."""
    vocabulary: Vocabulary | None = None
    _deprioritised_until: float = 0.0
    _last_reply: float = -math.inf

    @property
    def deprioritised(self) -> bool:
        return time.monotonic() < self._deprioritised_until

    def record_timeout(self) -> None:
        """Records that the worker did not reply in time, or while another one did."""
        self._deprioritised_until = time.monotonic() + _LAST_SECONDS

    def record_reply(self) -> None:
        self._deprioritised_until, self._last_reply = 0.0, time.monotonic()

    async def is_responsive(self) -> bool:
        """Whether the worker replied within the last second, or passes a health check now."""
        if time.monotonic() - self._last_reply < _FRESH_SECONDS:
            return True
        healthy = await self.client.answers(_CHECK_SECONDS)
        self.record_reply() if healthy else self.record_timeout()
        return healthy

    async def monitored(self, reply: Awaitable[T]) -> T:
        """Awaits a reply while health checks succeed. Raises Unavailable when one fails."""
        replying = asyncio.ensure_future(reply)
        try:
            while not (await asyncio.wait([replying], timeout=_CHECK_SECONDS))[0]:
                if not await self.client.answers(_CHECK_SECONDS):
                    self.record_timeout()
                    raise Unavailable(f"fusion worker {self.client.address} does not reply to health checks")
            return replying.result()
        finally:
            replying.cancel()
            await asyncio.wait([replying])

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Members:
    """The workers at some addresses. Create it in a running event loop.

    An address `dns:HOST:PORT` means all addresses of the name, which is resolved every 5 s. If that fails, the known
    workers stay. Calls in flight to a removed worker continue.
    """

    def __init__(self, addresses: Sequence[str], tls: ClientTLS | None) -> None:
        self._tls = tls
        self._listed = {at: Member(WorkerClient(at, tls)) for at in addresses if not at.startswith(_DNS)}
        self._resolved: dict[str, dict[str, Member]] = {at: {} for at in addresses if at.startswith(_DNS)}
        self._looked_up = asyncio.Event()  # all names, once
        self._retiring: set[asyncio.Task[None]] = set()
        self._resolving = asyncio.create_task(self._follow())
        self._loading = asyncio.Lock()

    @property
    def known(self) -> list[Member]:
        resolved = {address: member for members in self._resolved.values() for address, member in members.items()}
        return [*{**resolved, **self._listed}.values()]

    async def found(self) -> list[Member]:
        """The known ones, once all names have been looked up."""
        await self._looked_up.wait()
        return self.known

    async def vocabulary(self, member: Member, model: pb.GetModelResponse) -> Vocabulary:
        """The vocabulary of a member that has described its model so; workers of one model share it.

        It takes about 50 MB and up to a second to make.
        """
        async with self._loading:
            if member.vocabulary is not None and member.described is model:
                return member.vocabulary
            # The first reply of a connection.
            shared = pb.GetModelResponse()
            shared.CopyFrom(model)
            for name in _OF_WORKER:
                shared.ClearField(name)
            known = {other.vocabulary for other in self.known if other.vocabulary is not None}
            same = [vocabulary for vocabulary in known if vocabulary.model == shared]
            member.vocabulary = same[0] if same else await asyncio.to_thread(Vocabulary, shared)
            member.described = model
            return member.vocabulary

    async def close(self) -> None:
        self._resolving.cancel()
        await asyncio.gather(*(member.client.close() for member in self.known))
        await asyncio.gather(*self._retiring)

    async def _follow(self) -> None:
        while True:
            await asyncio.gather(*map(self._resolve, self._resolved))
            self._looked_up.set()
            await asyncio.sleep(RESOLVE_SECONDS)

    async def _resolve(self, name: str) -> None:
        host, _, port = name.removeprefix(_DNS).rpartition(":")
        try:
            infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError for invalid names such as "a..b"
            log.warning("can't resolve %s: %s; keeping its known workers", name, error)
            return
        known = self._resolved[name]
        now = {_address(str(at[0]), int(at[1])) for *_, at in infos}
        for address in sorted(now - known.keys()):
            log.info("added worker of %s: %s", name, address)
            known[address] = Member(WorkerClient(address, self._tls, name=host))
        for address in sorted(known.keys() - now):
            log.info("removed worker of %s: %s", name, address)
            background(self._retiring, _retire(known.pop(address)))


@contextlib.contextmanager
def used(members: Sequence[Member]) -> Iterator[Sequence[Member]]:
    """Keeps the connections of members open, even if they are removed meanwhile."""
    for member in members:
        member.users += 1
    try:
        yield members
    finally:
        for member in members:
            member.users -= 1


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _retire(member: Member) -> None:
    while member.users:  # noqa: ASYNC110 - rare, and calls take up to minutes
        await asyncio.sleep(0.5)
    await member.client.close()
