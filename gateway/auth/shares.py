"""What tenants share, such as requests in flight and parsers: no tenant holds all of it, and they wait in turn."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator


class Shares:
    """A capacity. A tenant holds at most all but `spare` of it; all of it where that would be less than half.

    Belongs to the event loop's thread.
    """

    def __init__(self, total: int, *, spare: int = 0) -> None:
        """spare: what is kept from a single tenant; 0 where there is only one."""
        self._total = total
        self._most = total - spare if total >= 2 * spare else total
        self._held: Counter[str] = Counter()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []
        # When each tenant was last given something that it had waited for.
        self._turns: dict[str, int] = {}
        self._turn = 0

    @property
    def held(self) -> int:
        """By all tenants together."""
        return self._held.total()

    def take(self, tenant: str, amount: int = 1) -> bool:
        """Takes it if that is possible now; `release` gives it back."""
        fits = self.held + amount <= self._total and self._held[tenant] + amount <= self._most
        if fits:
            self._held[tenant] += amount
        return fits

    @contextlib.contextmanager
    def holding(self, tenant: str, amount: int = 1) -> Iterator[bool]:
        """Whether it could be taken; it is given back at the end."""
        taken = self.take(tenant, amount)
        try:
            yield taken
        finally:
            if taken:
                self.release(tenant, amount)

    async def wait(self, tenant: str) -> None:
        """Takes one as soon as that is possible. Tenants that wait go in turn, however many calls each has."""
        if self.take(tenant):
            return
        given = asyncio.get_running_loop().create_future()
        self._waiting.append((tenant, given))
        try:
            await given
        except asyncio.CancelledError:
            if given.cancelled():
                self._waiting.remove((tenant, given))
            else:
                self.release(tenant)
            raise

    def release(self, tenant: str, amount: int = 1) -> None:
        """Gives back what was taken."""
        self._held[tenant] -= amount
        if not self._held[tenant]:
            del self._held[tenant]
        # The one who was longest without; the sort is stable, so of its calls the first.
        for tenant, given in sorted(self._waiting, key=lambda waiting: self._turns.get(waiting[0], 0)):
            if not given.done() and self.take(tenant):
                self._turn += 1
                self._turns[tenant] = self._turn
                self._waiting.remove((tenant, given))
                given.set_result(None)
                return
