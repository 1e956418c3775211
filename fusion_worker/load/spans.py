"""One span a load, linked with every request that waits for it."""

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace import Span

from fusionkv.fusion_worker.compute.kv_pool import PooledChunk
from fusionkv.fusion_worker.load.placement import LoadedChunk

tracer = trace.get_tracer(__name__)


class LoadSpans:
    """The spans of the loads that run. A load belongs to the request that began it, and others may join."""

    def __init__(self) -> None:
        self._running: dict[PooledChunk, Span] = {}

    def begin(self, part: LoadedChunk) -> None:
        """A load that the current request waits for."""
        wanted = part.wanted
        entry = wanted.entry
        attributes: dict[str, str | int] = {
            "fusionkv.tokens": len(wanted.chunk),
            "fusionkv.position": wanted.position,
            "fusionkv.kind": "miss" if entry is None else "exact" if wanted.lossless else "alternative",
        }
        if entry is not None:
            attributes |= {"fusionkv.tier": entry.tier, "fusionkv.bytes": entry.size}
        name = "fusionkv.encode_chunk" if entry is None else "fusionkv.fetch"
        self._running[part.resident] = tracer.start_span(name, attributes=attributes)

    def join(self, resident: PooledChunk) -> None:
        """The current request waits for it too, if it still runs."""
        load, waiting = self._running.get(resident), trace.get_current_span()
        if load is not None:
            load.add_link(waiting.get_span_context(), {"fusionkv.link": "waiting"})
            waiting.add_link(load.get_span_context(), {"fusionkv.link": "load"})

    @contextmanager
    def within(self, resident: PooledChunk) -> Iterator[None]:
        """Makes the span current for what the load does, and notes its errors."""
        with trace.use_span(self._running[resident]):
            yield

    def end(self, resident: PooledChunk) -> None:
        """The load is over, whatever became of it."""
        self._running.pop(resident).end()
