"""Tenants, each isolated from the others: corpora, KV, quotas, and shares of the gateway's capacities."""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import time
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fusionkv.gateway import plan
from fusionkv.gateway.auth import access
from fusionkv.gateway.retrieval.base import Retrieval
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime import cancellation
from fusionkv.protos.runtime.errors import ResourceExhausted, Unavailable
from fusionkv.protos.runtime.settings import parse_bytes
from fusionkv.protos.runtime.watched import BadFile, Watched, read_bytes

log = logging.getLogger(__name__)
_faults = logs.RateLimitedLog(log)
_MINUTE = 60.0
_MIN_KEY_BYTES = 32
# Opens the corpora of a tenant by its name, whether or not it is the default: another gateway, or the next start, may
# have another default, and must not hand its corpora over.
Open = Callable[[str], Awaitable[Retrieval]]


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of a tenant; None means no limit.

    Attributes:
        requests_per_minute: calls of any method but Stats.
        tokens_per_minute: tokens of ingested documents, prompts and answers.
        stored_bytes: bytes of documents' text.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    stored_bytes: int | None = None


class Quotas:
    """The quotas of all tenants, from a TOML file (docs/security.md) that is read again when it changes.

    Without a file, there are no limits. What a tenant's table omits is taken from [default].
    """

    def __init__(self, file: Path | None) -> None:
        """Raises BadFile if the file can't be read or does not have this form."""
        self._known = Watched([file], lambda: _read(file)) if file else None

    def of(self, tenant: str) -> Quota:
        """The current limits of a tenant."""
        if self._known is None:
            return Quota()
        default, by_tenant = self._known.value
        return by_tenant.get(tenant, default)


class TokenBucket:
    """A token bucket that holds at most one minute's amount, and starts full. Its level may become negative."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._level: float | None = None
        self._filled = clock()

    def wait(self, per_minute: int, amount: float) -> float:
        """Seconds until the bucket holds `amount`; 0 if it does now."""
        now = self._clock()
        level = per_minute if self._level is None else self._level + (now - self._filled) * per_minute / _MINUTE
        self._level, self._filled = min(level, per_minute), now
        return max(0.0, (amount - self._level) * _MINUTE / per_minute)

    def take(self, amount: float) -> None:
        if self._level is not None:
            self._level -= amount


class Meter:
    """Counts what one tenant uses. Not thread-safe: use it in the event loop only."""

    def __init__(self, quota: Callable[[], Quota], clock: Callable[[], float] = time.monotonic) -> None:
        self._quota = quota
        self._requests, self._tokens = TokenBucket(clock), TokenBucket(clock)
        self._reserved_bytes = 0
        self._reserving = asyncio.Lock()

    def admit(self) -> None:
        """Counts a request. Raises ResourceExhausted, with `retry_after`, if a quota per minute is used up."""
        self.check_tokens()
        quota = self._quota()
        if quota.requests_per_minute is not None:
            self._check(self._requests, quota.requests_per_minute, "requests")
            self._requests.take(1)

    def check_tokens(self) -> None:
        """Raises ResourceExhausted if the quota of tokens is used up.

        A request's tokens are known only later: it is admitted while any token is left, and may overdraw the quota.
        """
        quota = self._quota()
        if quota.tokens_per_minute is not None:
            self._check(self._tokens, quota.tokens_per_minute, "tokens")

    def spend(self, tokens: int) -> None:
        """Counts tokens that a request has used or is about to use."""
        self._tokens.take(tokens)

    def give_back(self, tokens: int) -> None:
        """Undoes `spend` for a request that was not served."""
        self._tokens.take(-tokens)

    @contextlib.asynccontextmanager
    async def storing(self, size: int, stored: Callable[[], Awaitable[int]]) -> AsyncIterator[None]:
        """Reserves room for a document of `size` bytes until it is stored; `stored` counts the tenant's stored bytes.

        Raises ResourceExhausted if the document exceeds the quota. A document that it would replace counts as stored.
        """
        async with self._reserving:
            if (limit := self._quota().stored_bytes) is not None:
                # Read before awaiting `stored`: a document stored meanwhile then counts twice rather than not at all.
                reserved = self._reserved_bytes
                used = await stored() + reserved
                if used + size > limit:
                    raise ResourceExhausted(
                        f"the document has {size} bytes of text, and {used} of the tenant's {limit} bytes are used: "
                        "delete documents"
                    )
            self._reserved_bytes += size
        try:
            yield
        finally:
            self._reserved_bytes -= size

    def _check(self, bucket: TokenBucket, per_minute: int, what: str) -> None:
        seconds = bucket.wait(per_minute, 1)
        if seconds:
            raise ResourceExhausted(
                f"the tenant's quota of {per_minute} {what} per minute is used up; try again in {seconds:.1f} s",
                retry_after=seconds,
            )


class Shares:
    """A capacity, such as requests in flight, that tenants share.

    One tenant may hold all of it but `spare`; or all of it if `spare` is more than half.
    Not thread-safe: use it in the event loop only.
    """

    def __init__(self, total: int, *, spare: int = 0) -> None:
        """`spare` is the part that a single tenant can't hold; 0 if there is only one tenant."""
        self._total = total
        self._limit = total - spare if total >= 2 * spare else total
        self._held: Counter[str] = Counter()

    @property
    def held(self) -> int:
        """Amount held by all tenants together."""
        return self._held.total()

    @contextlib.contextmanager
    def holding(self, tenant: str, amount: int = 1) -> Iterator[bool]:
        """Takes an amount if available and releases it at the end; yields whether it was available."""
        fits = self.held + amount <= self._total and self._held[tenant] + amount <= self._limit
        taken = amount if fits else 0
        self._held[tenant] += taken
        try:
            yield fits
        finally:
            self._held[tenant] -= taken
            if not self._held[tenant]:
                del self._held[tenant]


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

    def __init__(self, default: str, key: bytes, quotas: Quotas, open: Open) -> None:
        """Creates a registry without tenants.

        Args:
            default: the tenant of calls without a token.
            key: HMAC key that hashes tenants' names into salts; if empty, the name itself is the salt.
        """
        self._default = default
        self._key = key
        self._quotas = quotas
        self._open = open
        self._known: dict[str, Tenant] = {}
        self._opening = asyncio.Lock()

    def name(self) -> str:
        """The name of the current call's tenant."""
        caller = access.CALLER.get()
        return caller.tenant if caller else self._default

    async def current(self) -> Tenant:
        """The tenant of the current call. Raises Unavailable if the tenant's corpora can't be opened."""
        try:
            return await self.get(self.name())
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
        retrieval = await self._open(name)
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


def _read(file: Path) -> tuple[Quota, dict[str, Quota]]:
    try:
        table = tomllib.loads(read_bytes(file, "the quotas").decode())
    except ValueError as error:
        raise BadFile(f"the quotas {file}: not valid TOML: {error}") from None
    unknown = set(table) - {"default", "tenants"}
    tenants = table.get("tenants", {})
    if unknown or not isinstance(tenants, dict):
        raise BadFile(f"the quotas {file}: only the tables [default] and [tenants.NAME] are allowed")
    default = _quota(Quota(), table.get("default", {}), f"the quotas {file}: [default]")
    return default, {name: _quota(default, t, f"the quotas {file}: [tenants.{name}]") for name, t in tenants.items()}


def _quota(default: Quota, table: Any, where: str) -> Quota:
    known = [field.name for field in fields(Quota)]
    if not isinstance(table, dict) or set(table) - set(known):
        raise BadFile(f"{where} must be a table with no other keys than {', '.join(known)}")
    values = {}
    for name, value in table.items():
        try:
            number = parse_bytes(value) if name == "stored_bytes" and isinstance(value, str) else value
        except ValueError as error:
            raise BadFile(f"{where} {name}: {error}") from None
        if type(number) is not int or number < 1:
            raise BadFile(f"{where} {name}: {value!r} is not an integer of at least 1")
        values[name] = number
    return replace(default, **values)
