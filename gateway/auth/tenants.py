"""Tenants: each with corpora, KV and quotas of its own, and no way to another's."""

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
from fusionkv.protos.runtime.watched import BadFile, read_bytes

log = logging.getLogger(__name__)
_LEAST_KEY = 32
# Opens the corpora of one tenant; the empty name stands for the gateway's own.
Open = Callable[[str], Awaitable[Retrieval]]


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose documents, and whose KV. `salt` is what workers and the cache know the tenant by."""

    salt: str
    retrieval: Retrieval
    meter: Meter

    @property
    def label(self) -> str:
        """What telemetry calls it."""
        return plan.tenant_label(self.salt)

    async def stored_bytes(self) -> int:
        """Bytes of text in all of its corpora."""
        return sum(corpus.bytes for corpus in await self.retrieval.corpora())


class Tenants:
    """The tenants seen so far. Which one a call is for follows from its token, and from nothing in its request."""

    def __init__(self, own: str, key: bytes, quotas: Quotas, open: Open) -> None:
        """`own` is the tenant of calls without a token, `key` what names are hashed with; empty sends them as they
        are.
        """
        self._own = own
        self._key = key
        self._quotas = quotas
        self._open = open
        self._known: dict[str, Tenant] = {}
        self._opening = asyncio.Lock()

    async def current(self) -> Tenant:
        """The tenant of the call in progress.

        Raises:
            OSError: its corpora can't be opened.
        """
        caller = access.caller()
        return await self.get(caller.tenant if caller else self._own)

    async def get(self, name: str) -> Tenant:
        """The tenant of that name; its corpora are opened on first use. Raises as `current` does."""
        if (known := self._known.get(name)) is not None:
            return known
        async with self._opening:
            if name not in self._known:
                retrieval = await self._open("" if name == self._own else name)
                meter = Meter(lambda: self._quotas.of(name))
                self._known[name] = Tenant(self._salt(name), retrieval, meter)
                if name:
                    log.info("tenant %s is %s in telemetry", name, self._known[name].label)
            return self._known[name]

    @property
    def all(self) -> list[Tenant]:
        """Those seen so far."""
        return list(self._known.values())

    async def close(self) -> None:
        """Ends all work in flight."""
        for tenant in self._known.values():
            await tenant.retrieval.close()

    def _salt(self, name: str) -> str:
        if not self._key:
            return name
        return hmac.new(self._key, name.encode(), hashlib.sha256).hexdigest()


def read_key(file: Path | None) -> bytes:
    """The key that tenants' names are hashed with; empty without a file.

    Raises:
        BadFile: the file can't be read or is too short to be a key.
    """
    if file is None:
        return b""
    key = read_bytes(file, "the tenant key")
    if len(key) < _LEAST_KEY:
        raise BadFile(f"the tenant key {file} has {len(key)} bytes; at least {_LEAST_KEY} random ones are needed")
    return key
