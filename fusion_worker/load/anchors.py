"""Anchor tokens: trained tokens after each segment of a chunk, whose KV replaces that of its text (KVLink 2.4)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fusionkv.fusion_worker.compute.engine import Engine
from fusionkv.fusion_worker.compute.jobs import encoding
from fusionkv.fusion_worker.compute.kv_pool import PooledChunk, SlotRange, behind, stretches
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.prompt import Chunk, LoadedChunk
from fusionkv.kvcache_service import keys


class Cut(NamedTuple):
    """A segment's text tokens, and the anchor tokens after them."""

    text: tuple[int, ...]
    anchors: tuple[int, ...]


def cuts(text: Sequence[int], anchors: Sequence[int], percent: int) -> tuple[Cut, ...]:
    """Splits a text into segments with their anchor tokens.

    A segment has len(anchors) * 100 / (100 - percent) tokens, so that all of `anchors` are `percent` percent fewer.
    The last segment overlaps the one before it rather than being shorter, and gets anchors only for the tokens that
    are not in the overlap.
    """
    size, found = len(anchors) * 100 // (100 - percent), []
    for start in range(0, len(text), size):
        stop = min(start + size, len(text))
        count = -(-(stop - start) * (100 - percent) // 100)
        found.append(Cut(tuple(text[max(0, stop - size) : stop]), tuple(anchors[:count])))
    return tuple(found)


@dataclass(frozen=True)
class AnchoredChunk(Chunk):
    """A chunk whose text is replaced by anchor tokens; its digest is that of the text.

    No KV of the text is kept, so text tokens take no positions in the prompt. Anchors of all segments follow each
    other, as they do in a prompt, and see their segment's text at the positions right before them. Earlier anchors
    have these positions too: positions repeat. A model can therefore be trained in one pass, and an anchor token is
    always at the same distance from its text. All segments have the same length, except that of a short chunk, so all
    keys share one base.
    """

    text: tuple[int, ...] = ()
    cuts: tuple[Cut, ...] = ()
    percent: int = 0

    @cached_property
    def digest(self) -> bytes:
        return keys.chunk_digest(self.text)

    @property
    def variant(self) -> bytes:
        return keys.anchors_variant(self.percent)

    @property
    def covered(self) -> int:
        return len(self.text)

    @property
    def scratch(self) -> int:
        return len(self.cuts[0].text)

    async def encode(
        self,
        pooled: PooledChunk,
        before: Sequence[LoadedChunk],
        scratch: Sequence[SlotRange],
        engine: Engine,
        model: Model,
    ) -> None:
        """Computes the chunk's KV after the system prompt. If cancelled, returns only once writing has stopped.

        pooled: slots for the anchor tokens. before: the system prompt. scratch: `self.scratch` temporary slots for
        a segment's text.
        """
        seen = tuple(segment for part in before for segment in part.segments())
        start, done = sum(len(part.source.chunk) for part in before), 0
        for text, anchors in self.cuts:
            await engine.run(encoding(text, start, scratch, seen, model.device))
            # Earlier anchors and the text share RoPE positions. As keys they are laid side by side before the rows,
            # so that all are visible; their shifts restore the RoPE positions.
            earlier = stretches(pooled.runs, done, start, shift=0)
            read = stretches(scratch, len(text), start + done, shift=done)
            at, runs, visible = start + done + len(text), behind(pooled.runs, done), (*seen, *earlier, *read)
            await engine.run(encoding(anchors, at, runs, visible, model.device))
            done += len(anchors)


def compressed(chunk: Chunk, anchors: Sequence[int], percent: int) -> AnchoredChunk:
    """The chunk with its text replaced by anchor tokens, `percent` percent fewer."""
    found = cuts(chunk.ids, anchors, percent)
    ids = tuple(i for cut in found for i in cut.anchors)
    return AnchoredChunk(ids, text=chunk.ids, cuts=found, percent=percent)
