"""Trace spans of chunk loads, each linked with every request that waits for the load."""

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace import Span

from fusionkv.fusion_worker.compute.kv_pool import PooledChunk
from fusionkv.fusion_worker.load.placement import LoadedChunk

tracer = trace.get_tracer(__name__)


class LoadSpans:
    """The spans of running loads. A load's span belongs to the request that started it; others link to it."""

    def __init__(self) -> None:
        self._running: dict[PooledChunk, Span] = {}

    def begin(self, part: LoadedChunk) -> None:
        """Starts the span of a load in the current request's trace."""
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
        """Links the current request with a load, if that still runs."""
        load, waiting = self._running.get(resident), trace.get_current_span()
        if load is not None:
            load.add_link(waiting.get_span_context(), {"fusionkv.link": "waiting"})
            waiting.add_link(load.get_span_context(), {"fusionkv.link": "load"})

    @contextmanager
    def within(self, resident: PooledChunk) -> Iterator[None]:
        """Makes a load's span current, and records errors in it."""
        with trace.use_span(self._running[resident]):
            yield

    def end(self, resident: PooledChunk) -> None:
        """Ends the span of a load that succeeded or failed."""
        self._running.pop(resident).end()
