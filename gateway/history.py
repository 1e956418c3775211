"""Recent answers with their explanations, by tenant, for the gateway's pages; limited in number and in bytes."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from fusionkv.gateway.client import results
from fusionkv.gateway.client.results import Answer, Explanation, Token
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb

# For all tenants together, as protobuf. An answer over 8,000 tokens of context takes 0.1 MiB.
_MAX_BYTES = 64 << 20
Start = Callable[[pb.GenerateRequest], AsyncGenerator[pb.GenerateResponse]]


@dataclass
class Record:
    """One answer and its request.

    Attributes:
        at: seconds since the epoch.
        full: the answer by full attention, if the question was repeated with it.
        comparing: held while it is repeated.
    """

    tenant: str
    request: pb.GenerateRequest
    at: float = field(default_factory=time.time)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    full: "Record | None" = None
    comparing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _events: list[pb.GenerateResponse] = field(default_factory=list)  # all but tokens
    _text: str = ""

    def add(self, response: pb.GenerateResponse) -> None:
        if response.HasField("token"):
            self._text += response.token.text
        else:
            self._events.append(response)

    @property
    def bytes(self) -> int:
        own = sum(part.ByteSize() for part in (self.request, *self._events)) + len(self._text.encode())
        return own + (self.full.bytes if self.full is not None else 0)

    @property
    def answer(self) -> Answer:
        return results.answer([Token(text=self._text), *map(results.event, self._events)])

    @property
    def explanation(self) -> Explanation | None:
        """None if no worker computed the prompt: vLLM explains nothing."""
        return next((event for event in map(results.event, self._events) if isinstance(event, Explanation)), None)


class History:
    """The latest answers of every tenant. A tenant sees only its own."""

    def __init__(self, limit: int, max_bytes: int = _MAX_BYTES) -> None:
        self.limit = limit
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: dict[str, Record] = {}  # by id, oldest first

    async def watch(
        self, tenant: str, request: pb.GenerateRequest, start: Start
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """Streams the events of an answer, and stores the answer when it ends with its summary.

        The request always asks for an explanation. A caller that did not ask for one does not receive it.
        """
        explained = pb.GenerateRequest()
        explained.CopyFrom(request)
        explained.explain = True
        kept = Record(tenant, explained)
        async with contextlib.aclosing(start(explained)) as responses:
            async for response in responses:
                kept.add(response)
                if response.HasField("summary"):
                    self.keep(kept)
                if request.explain or not response.HasField("explanation"):
                    yield response

    def keep(self, kept: Record) -> None:
        """Adds an answer and drops the oldest ones over the limits."""
        self._kept[kept.id] = kept
        self._bytes += kept.bytes
        for old in self.of(kept.tenant)[self.limit :]:
            self._drop(old)
        self._make_room()

    def compare(self, kept: Record, full: Record) -> None:
        """Adds the answer by full attention to a stored record, and drops the oldest records over the limits."""
        if kept.id in self._kept:
            self._bytes -= kept.bytes
            kept.full = full
            self._bytes += kept.bytes
            self._make_room()

    def of(self, tenant: str) -> list[Record]:
        """A tenant's answers, latest first."""
        return [kept for kept in reversed(self._kept.values()) if kept.tenant == tenant]

    def get(self, tenant: str, id: str) -> Record | None:
        """A tenant's answer; None if there is none, or if it belongs to another tenant."""
        kept = self._kept.get(id)
        return kept if kept is not None and kept.tenant == tenant else None

    def _make_room(self) -> None:
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._kept.values())))

    def _drop(self, kept: Record) -> None:
        self._bytes -= kept.bytes
        del self._kept[kept.id]
