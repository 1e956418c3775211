"""Answers of late with their explanations, by tenant, for the pages of a gateway; bounded in number and in bytes."""

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from fusionkv.gateway.client import results
from fusionkv.gateway.client.results import Answer, Explanation, Summary
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb

# Of all tenants together, as protobuf: an answer over 8,000 tokens of context has 0.1 MiB.
_MOST_BYTES = 64 << 20
Start = Callable[[pb.GenerateRequest], AsyncGenerator[pb.GenerateResponse]]


@dataclass
class Kept:
    """One answer. at: seconds since the epoch. full: that by full attention, once it was asked for."""

    tenant: str
    request: pb.GenerateRequest
    at: float = field(default_factory=time.time)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    full: "Kept | None" = None
    _sources: pb.GenerateResponse = field(default_factory=pb.GenerateResponse)
    _explanation: pb.GenerateResponse = field(default_factory=pb.GenerateResponse)
    _summary: pb.GenerateResponse = field(default_factory=pb.GenerateResponse)
    _text: str = ""

    def add(self, response: pb.GenerateResponse) -> None:
        """Notes one event of the answer."""
        if response.HasField("token"):
            self._text += response.token.text
        else:
            setattr(self, f"_{response.WhichOneof('event')}", response)

    @property
    def bytes(self) -> int:
        parts = (self.request, self._sources, self._explanation, self._summary)
        own = sum(part.ByteSize() for part in parts) + len(self._text)
        return own + (self.full.bytes if self.full is not None else 0)

    @property
    def answer(self) -> Answer:
        summary = results.event(self._summary)
        assert isinstance(summary, Summary)
        return Answer(self._text, results.passages(self._sources.sources), summary)

    @property
    def explanation(self) -> Explanation:
        found = results.event(self._explanation)
        assert isinstance(found, Explanation)
        return found


class History:
    """The last answers of every tenant; one tenant never sees another's."""

    def __init__(self, most: int, most_bytes: int = _MOST_BYTES) -> None:
        self.most = most
        self._most_bytes = most_bytes
        self._bytes = 0
        self._kept: dict[str, Kept] = {}  # by id, the oldest first

    async def watch(
        self, tenant: str, request: pb.GenerateRequest, start: Start
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """The events of an answer, which is kept when it ends with its summary. An explanation is always asked for;
        callers who did not ask see none of it.
        """
        asked = pb.GenerateRequest()
        asked.CopyFrom(request)
        asked.explain = True
        kept = Kept(tenant, asked)
        async with contextlib.aclosing(start(asked)) as responses:
            async for response in responses:
                kept.add(response)
                if response.HasField("summary"):
                    self.keep(kept)
                if request.explain or not response.HasField("explanation"):
                    yield response

    def keep(self, kept: Kept) -> None:
        """Adds an answer, in place of the oldest ones where there are too many."""
        self._kept[kept.id] = kept
        self._bytes += kept.bytes
        for old in self.of(kept.tenant)[self.most :]:
            self._drop(old)
        self._make_room()

    def compare(self, kept: Kept, full: Kept) -> None:
        """Adds the answer by full attention to one that is still there, in place of the oldest ones."""
        if kept.id in self._kept:
            self._bytes -= kept.bytes
            kept.full = full
            self._bytes += kept.bytes
            self._make_room()

    def of(self, tenant: str) -> list[Kept]:
        """A tenant's answers, the latest first."""
        return [kept for kept in reversed(self._kept.values()) if kept.tenant == tenant]

    def get(self, tenant: str, id: str) -> Kept | None:
        """A tenant's answer; None if there is none, or if it is another's."""
        kept = self._kept.get(id)
        return kept if kept is not None and kept.tenant == tenant else None

    def _make_room(self) -> None:
        while self._bytes > self._most_bytes:
            self._drop(next(iter(self._kept.values())))

    def _drop(self, kept: Kept) -> None:
        self._bytes -= kept.bytes
        del self._kept[kept.id]
