"""Fair sharing of a capacity, such as requests in flight or parsers, among tenants."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator


class Shares:
    """A capacity of which one tenant may hold all but `spare`; or all of it if `spare` is more than half.

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
