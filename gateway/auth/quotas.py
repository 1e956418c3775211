"""What a tenant may use: requests and tokens a minute, and bytes stored; counted by this gateway, for itself."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fusionkv.protos.runtime.errors import ResourceExhausted
from fusionkv.protos.runtime.settings import parse_bytes, toml
from fusionkv.protos.runtime.watched import BadFile, Watched, read_bytes

_MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class Quota:
    """None sets no limit. Tokens are those of ingested documents, of prompts, and of answers; bytes are text's."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    stored_bytes: int | None = None


class Quotas:
    """The limits of all tenants, from a TOML file that is read anew when it changes; without one there are none.

        [default]
        requests_per_minute = 600

        [tenants.acme]
        tokens_per_minute = 200000
        stored_bytes = "1GiB"

    What a tenant's table leaves out is as in [default].
    """

    def __init__(self, file: Path | None) -> None:
        """Raises BadFile when the file can't be read or is not of this form."""
        self._known = Watched([file], lambda: _read(file)) if file else None

    def of(self, tenant: str) -> Quota:
        """The limits of a tenant now."""
        if self._known is None:
            return Quota()
        default, by_tenant = self._known.value
        return by_tenant.get(tenant, default)


class Bucket:
    """So much a minute: full at first, never fuller than a minute's worth. What is taken may put it in debt."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._level: float | None = None
        self._filled = clock()

    def wait(self, per_minute: int, wanted: float) -> float:
        """Seconds until it holds `wanted`; 0 when it does."""
        now = self._clock()
        level = per_minute if self._level is None else self._level + (now - self._filled) * per_minute / _MINUTE
        self._level, self._filled = min(level, per_minute), now
        return max(0.0, (wanted - self._level) * _MINUTE / per_minute)

    def take(self, amount: float) -> None:
        if self._level is not None:
            self._level -= amount


class Meter:
    """What one tenant has used. Belongs to the event loop's thread."""

    def __init__(self, quota: Callable[[], Quota], clock: Callable[[], float] = time.monotonic) -> None:
        self._quota = quota
        self._requests, self._tokens = Bucket(clock), Bucket(clock)
        self._arriving = 0
        self._counting = asyncio.Lock()

    def admit(self) -> None:
        """Counts a request.

        Raises:
            ResourceExhausted: there were too many of late, or their tokens were; it says when to come again.
        """
        self.check_tokens()
        quota = self._quota()
        if quota.requests_per_minute is not None:
            self._check(self._requests, quota.requests_per_minute, "requests")
            self._requests.take(1)

    def check_tokens(self) -> None:
        """Raises ResourceExhausted when no token is left.

        What a request costs is known only later, so one is let in while anything is left, and may leave a debt.
        """
        quota = self._quota()
        if quota.tokens_per_minute is not None:
            self._check(self._tokens, quota.tokens_per_minute, "tokens")

    def spend(self, tokens: int) -> None:
        """Counts tokens that a request is about to cost, or has cost."""
        self._tokens.take(tokens)

    def give_back(self, tokens: int) -> None:
        """Undoes `spend` for a request that cost nothing after all."""
        self._tokens.take(-tokens)

    @contextlib.asynccontextmanager
    async def storing(self, size: int, stored: Callable[[], Awaitable[int]]) -> AsyncIterator[None]:
        """Holds room for a document of `size` bytes beside those that are `stored`, until it is stored itself.

        Raises:
            ResourceExhausted: it does not fit beside what is stored, what it replaces included.
        """
        async with self._counting:
            # Before what is stored is counted: what is stored meanwhile counts twice, rather than not at all.
            arriving = self._arriving
            limit, used = self._quota().stored_bytes, await stored() + arriving
            if limit is not None and used + size > limit:
                raise ResourceExhausted(
                    f"the document has {size} bytes of text and {used} of the tenant's {limit} are taken: delete some"
                )
            self._arriving += size
        try:
            yield
        finally:
            self._arriving -= size

    def _check(self, bucket: Bucket, per_minute: int, what: str) -> None:
        seconds = bucket.wait(per_minute, 1)
        if seconds:
            raise ResourceExhausted(
                f"the tenant's quota of {per_minute} {what} a minute is used up; try again in {seconds:.1f} s",
                retry_after=seconds,
            )


def _read(file: Path) -> tuple[Quota, dict[str, Quota]]:
    try:
        table = toml(read_bytes(file, "the quotas").decode())
    except ValueError as error:
        raise BadFile(f"the quotas {file}: no TOML: {error}") from None
    unknown = set(table) - {"default", "tenants"}
    tenants = table.get("tenants", {})
    if unknown or not isinstance(tenants, dict):
        raise BadFile(f"the quotas {file}: it holds [default], [tenants.NAME] and nothing else")
    default = _quota(Quota(), table.get("default", {}), f"the quotas {file}: [default]")
    return default, {name: _quota(default, t, f"the quotas {file}: [tenants.{name}]") for name, t in tenants.items()}


def _quota(default: Quota, table: Any, where: str) -> Quota:
    known = [field.name for field in fields(Quota)]
    if not isinstance(table, dict) or set(table) - set(known):
        raise BadFile(f"{where} is a table of {', '.join(known)}")
    values = {}
    for name, value in table.items():
        try:
            number = parse_bytes(value) if name == "stored_bytes" and isinstance(value, str) else value
        except ValueError as error:
            raise BadFile(f"{where} {name}: {error}") from None
        if type(number) is not int or number < 1:
            raise BadFile(f"{where} {name}: {value!r} is no whole number of 1 or more")
        values[name] = number
    return replace(default, **values)
