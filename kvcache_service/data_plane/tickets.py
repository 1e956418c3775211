"""Tickets: each admits one connection to the data plane to whoever was given it by gRPC."""

import secrets
import time
from collections.abc import Callable

from fusionkv.kvcache_service.data_plane.messages import TICKET_BYTES

# From the grant of a ticket until it is shown.
TICKET_SECONDS = 10.0
# Tickets that are granted and not shown. A new one replaces the oldest.
_MAX_TICKETS = 1024


class Tickets:
    """The tickets that are granted and were not shown yet."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: of seconds."""
        self._clock = clock
        self._ends: dict[bytes, float] = {}  # in order of the grants

    def grant(self) -> bytes:
        """A new ticket, valid for 10 s."""
        if len(self._ends) == _MAX_TICKETS:
            del self._ends[next(iter(self._ends))]
        ticket = secrets.token_bytes(TICKET_BYTES)
        self._ends[ticket] = self._clock() + TICKET_SECONDS
        return ticket

    def redeem(self, ticket: bytes) -> bool:
        """Whether a ticket is valid; it is not any more afterwards."""
        # By its hash, which has a key of its own in each process: the time of a miss says nothing of other tickets.
        return self._clock() < self._ends.pop(ticket, 0.0)
