"""Limits of tenants in this gateway process: quotas per minute and of stored bytes, and shares of its capacities."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fusionkv.protos.runtime.errors import ResourceExhausted
from fusionkv.protos.runtime.settings import parse_bytes, toml
from fusionkv.protos.runtime.watched import BadFile, Watched, read_bytes

_MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of a tenant; None means no limit.

    Attributes:
        requests_per_minute: calls of any method.
        tokens_per_minute: tokens of ingested documents, prompts and answers.
        stored_bytes: bytes of documents' text.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    stored_bytes: int | None = None


class Quotas:
    """The quotas of all tenants, from a TOML file that is read again when it changes; without a file, no limits.

        [default]
        requests_per_minute = 600

        [tenants.acme]
        tokens_per_minute = 200000
        stored_bytes = "1GiB"

    Settings that a tenant's table omits are taken from [default].
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


class Bucket:
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
        self._requests, self._tokens = Bucket(clock), Bucket(clock)
        self._reserved_bytes = 0
        self._reserving = asyncio.Lock()

    def admit(self) -> None:
        """Counts a request.

        Raises:
            ResourceExhausted: the quota of requests or tokens is used up; `retry_after` says when to retry.
        """
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

        Raises:
            ResourceExhausted: the document exceeds the quota. A document that it would replace counts as stored.
        """
        async with self._reserving:
            # Read before awaiting `stored`: a document stored meanwhile then counts twice rather than not at all.
            reserved = self._reserved_bytes
            limit, used = self._quota().stored_bytes, await stored() + reserved
            if limit is not None and used + size > limit:
                raise ResourceExhausted(
                    f"the document has {size} bytes of text, and {used} of the tenant's {limit} bytes are used: "
                    "delete documents"
                )
            self._reserved_bytes += size
        try:
            yield
        finally:
            self._reserved_bytes -= size

    def _check(self, bucket: Bucket, per_minute: int, what: str) -> None:
        seconds = bucket.wait(per_minute, 1)
        if seconds:
            raise ResourceExhausted(
                f"the tenant's quota of {per_minute} {what} per minute is used up; try again in {seconds:.1f} s",
                retry_after=seconds,
            )


class Shares:
    """A capacity, such as requests in flight or parsers, that tenants share.

    One tenant may hold all of it but `spare`; or all of it if `spare` is more than half.
    Not thread-safe: use it in the event loop only.
    """

    def __init__(self, total: int, *, spare: int = 0) -> None:
        """`spare` is the part that a single tenant can't hold; 0 if there is only one tenant."""
        self._total = total
        self._limit = total - spare if total >= 2 * spare else total
        self._held: Counter[str] = Counter()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []
        # Turn in which each tenant last received something that it had waited for.
        self._turns: dict[str, int] = {}
        self._turn = 0

    @property
    def held(self) -> int:
        """Amount held by all tenants together."""
        return self._held.total()

    def take(self, tenant: str, amount: int = 1) -> bool:
        """Takes an amount if it is available now, and returns whether it was; `release` returns it."""
        fits = self.held + amount <= self._total and self._held[tenant] + amount <= self._limit
        if fits:
            self._held[tenant] += amount
        return fits

    @contextlib.contextmanager
    def holding(self, tenant: str, amount: int = 1) -> Iterator[bool]:
        """Takes an amount if available and releases it at the end; yields whether it was available."""
        taken = self.take(tenant, amount)
        try:
            yield taken
        finally:
            if taken:
                self.release(tenant, amount)

    async def wait(self, tenant: str) -> None:
        """Takes one unit, waiting until it is available. Waiting tenants take turns, however many calls each has."""
        if self.take(tenant):
            return
        granted = asyncio.get_running_loop().create_future()
        self._waiting.append((tenant, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._waiting.remove((tenant, granted))
            else:
                self.release(tenant)
            raise

    def release(self, tenant: str, amount: int = 1) -> None:
        """Returns an amount that was taken."""
        self._held[tenant] -= amount
        if not self._held[tenant]:
            del self._held[tenant]
        # The tenant whose last turn is longest ago goes first; the sort is stable, so its oldest call does.
        for tenant, granted in sorted(self._waiting, key=lambda waiting: self._turns.get(waiting[0], 0)):
            if not granted.done() and self.take(tenant):
                self._turn += 1
                self._turns[tenant] = self._turn
                self._waiting.remove((tenant, granted))
                granted.set_result(None)
                return


def _read(file: Path) -> tuple[Quota, dict[str, Quota]]:
    try:
        table = toml(read_bytes(file, "the quotas").decode())
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
