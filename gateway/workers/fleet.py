"""Who the fusion workers are: those that are listed, and every address that a DNS name has at the time."""

import asyncio
import contextlib
import logging
import math
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.gateway.workers.prefix_affinity import PrefixAffinity
from fusionkv.protos.runtime.tls import ClientTLS

log = logging.getLogger(__name__)
DNS = "dns:"
# A worker that was added is found, and one that was taken away forgotten, within so long.
_RESOLVE_SECONDS = 5.0
# A worker that was not heard of for so long is asked whether it is there, before a request is given to it. It has to
# say so within the other.
_HEARD_SECONDS, CHECK_SECONDS = 1.0, 2.0
# So long a worker that kept somebody waiting comes last; twice as long each time, up to the most.
_LEAST_SUSPECT, _MOST_SUSPECT = 2.0, 30.0


@dataclass(eq=False)
class Member:
    """One worker, the calls in flight to it, and whether it kept its callers waiting of late."""

    client: WorkerClient
    in_flight: int = 0
    holdings: PrefixAffinity = field(default_factory=PrefixAffinity)
    _waits: int = 0
    _suspect_until: float = 0.0
    _heard: float = -math.inf

    @property
    def suspect(self) -> bool:
        return time.monotonic() < self._suspect_until

    def silent(self) -> None:
        """It did not answer while another did, or in time."""
        self._suspect_until = time.monotonic() + min(_LEAST_SUSPECT * 2**self._waits, _MOST_SUSPECT)
        self._waits += 1

    def answered(self) -> None:
        self._waits, self._suspect_until, self._heard = 0, 0.0, time.monotonic()

    async def answers(self) -> bool:
        """Whether it was heard of within the last second, or is now."""
        if time.monotonic() - self._heard < _HEARD_SECONDS:
            return True
        heard = await self.client.answers(CHECK_SECONDS)
        self.answered() if heard else self.silent()
        return heard

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Fleet:
    """`members` are the workers now. Make it inside a running event loop.

    An address `dns:HOST:PORT` stands for all that the name has, looked up again every 5 s. While it can't be looked
    up, those that were known stay. Calls in flight to one that is forgotten go on.
    """

    def __init__(self, addresses: Sequence[str], tls: ClientTLS | None) -> None:
        self._tls = tls
        self._listed = {at: Member(WorkerClient(at, tls)) for at in addresses if not at.startswith(DNS)}
        self._named: dict[str, dict[str, Member]] = {at: {} for at in addresses if at.startswith(DNS)}
        self._known = asyncio.Event()
        self._retiring: set[asyncio.Task[None]] = set()
        self._resolving = [asyncio.create_task(self._follow(name)) for name in self._named]
        if not self._named:
            self._known.set()

    @property
    def members(self) -> list[Member]:
        named = {address: member for found in self._named.values() for address, member in found.items()}
        return [*{**named, **self._listed}.values()]

    async def ready(self) -> None:
        """Waits until the names were looked up for the first time."""
        await self._known.wait()

    async def close(self) -> None:
        for task in self._resolving:
            task.cancel()
        await asyncio.gather(*(member.client.close() for member in self.members))
        await asyncio.gather(*self._retiring)

    async def _follow(self, name: str) -> None:
        while True:
            await self._resolve(name)
            self._known.set()
            await asyncio.sleep(_RESOLVE_SECONDS)

    async def _resolve(self, name: str) -> None:
        host, _, port = name.removeprefix(DNS).rpartition(":")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # the latter is for what can't be a name, as in "a..b"
            log.warning("can't look up the workers of %s: %s; those that are known stay", name, error)
            return
        known = self._named[name]
        now = {_address(str(at[0]), int(at[1])) for *_, at in found}
        for address in sorted(now - known.keys()):
            log.info("%s has a worker at %s", name, address)
            known[address] = Member(WorkerClient(address, self._tls, name=host))
        for address in sorted(known.keys() - now):
            log.info("%s has no worker at %s any more", name, address)
            task = asyncio.create_task(_retire(known.pop(address)))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _retire(member: Member) -> None:
    while member.in_flight:  # noqa: ASYNC110 - calls of up to minutes, seldom
        await asyncio.sleep(0.5)
    await member.client.close()
