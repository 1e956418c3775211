"""Tenants, each isolated from the others with its own corpora, KV and quotas."""

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from fusionkv.gateway import plan
from fusionkv.gateway.auth import access
from fusionkv.gateway.auth.quotas import Meter, Quotas
from fusionkv.gateway.retrieval.base import Retrieval
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime import cancellation
from fusionkv.protos.runtime.errors import Unavailable
from fusionkv.protos.runtime.watched import BadFile, read_bytes

log = logging.getLogger(__name__)
_faults = logs.RateLimitedLog(log)
_MIN_KEY_BYTES = 32
# Opens the corpora of a tenant; the empty name means the gateway's default tenant.
Open = Callable[[str], Awaitable[Retrieval]]


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant. `salt` identifies it to workers and the cache service."""

    salt: str
    retrieval: Retrieval
    meter: Meter

    @property
    def label(self) -> str:
        """The tenant's name in telemetry."""
        return plan.tenant_label(self.salt)

    async def stored_bytes(self) -> int:
        return sum(corpus.bytes for corpus in await self.retrieval.corpora())


class Tenants:
    """The tenants used so far. A call's tenant follows from its token alone, never from its request."""

    def __init__(self, own: str, key: bytes, quotas: Quotas, open: Open) -> None:
        """Creates a registry without tenants.

        Args:
            own: the tenant of calls without a token.
            key: HMAC key that hashes tenants' names into salts; if empty, the name itself is the salt.
        """
        self._own = own
        self._key = key
        self._quotas = quotas
        self._open = open
        self._known: dict[str, Tenant] = {}
        self._opening = asyncio.Lock()

    async def current(self) -> Tenant:
        """The tenant of the current call. Raises Unavailable if the tenant's corpora can't be opened."""
        caller = access.CALLER.get()
        try:
            return await self.get(caller.tenant if caller else self._own)
        except OSError as error:
            _faults.warning("a tenant's corpora can't be opened", error)
            raise Unavailable("the tenant's corpora can't be opened at the moment; try again later") from error

    async def get(self, name: str) -> Tenant:
        """The tenant with a name, whose corpora are opened at the first use. Raises OSError if they can't be."""
        if (known := self._known.get(name)) is not None:
            return known
        async with self._opening:
            if name not in self._known:
                # Even if the caller leaves: what is half open keeps its lock, or its connection.
                await cancellation.to_the_end(self._add(name))
            return self._known[name]

    @property
    def all(self) -> list[Tenant]:
        return list(self._known.values())

    async def close(self) -> None:
        """Ends all work in flight and closes the corpora."""
        for tenant in self._known.values():
            await tenant.retrieval.close()

    async def _add(self, name: str) -> None:
        retrieval = await self._open("" if name == self._own else name)
        meter = Meter(lambda: self._quotas.of(name))
        salt = hmac.new(self._key, name.encode(), hashlib.sha256).hexdigest() if self._key else name
        self._known[name] = Tenant(salt, retrieval, meter)
        if name:
            log.info("tenant %s is %s in telemetry", name, self._known[name].label)


def read_key(file: Path | None) -> bytes:
    """The key that hashes tenants' names; empty without a file. Raises BadFile if it is unusable or too short."""
    if file is None:
        return b""
    key = read_bytes(file, "the tenant key")
    if len(key) < _MIN_KEY_BYTES:
        raise BadFile(
            f"the tenant key {file} has {len(key)} bytes; at least {_MIN_KEY_BYTES} random bytes are needed"
        )
    return key
