"""Anchor tokens: a chunk cut into segments, and the trained tokens behind each that alone are kept (KVLink 2.4)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from fusionkv.fusion_worker.compute.engine import Engine
from fusionkv.fusion_worker.compute.forward_job import ForwardJob, behind
from fusionkv.fusion_worker.compute.kv_pool import PooledChunk, SlotRange
from fusionkv.fusion_worker.load.placement import LoadedChunk, stretches
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.prompt import Chunk, Prompt, stretch
from fusionkv.fusion_worker.recipes.recipes import Anchored, Encode
from fusionkv.kernels.segments import KVSegment
from fusionkv.kvcache_service import keys


class Cut(NamedTuple):
    """A segment's tokens, and the anchor tokens behind it."""

    text: tuple[int, ...]
    anchors: tuple[int, ...]


def cuts(text: Sequence[int], anchors: Sequence[int], percent: int) -> tuple[Cut, ...]:
    """A text's segments, each of as many tokens as `anchors` are `percent` fewer than.

    The last one begins in the one before it, if it were shorter otherwise; it has anchors for what the others leave.
    """
    size, found = len(anchors) * 100 // (100 - percent), []
    for start in range(0, len(text), size):
        stop = min(start + size, len(text))
        count = -(-(stop - start) * (100 - percent) // 100)
        found.append(Cut(tuple(text[max(0, stop - size) : stop]), tuple(anchors[:count])))
    return tuple(found)


@dataclass(frozen=True)
class AnchoredChunk(Chunk):
    """Anchor tokens in the place of a chunk's text, whose digest they have.

    Nothing of the text is kept, so its tokens need no positions of their own: each segment is read as if it stood
    right before its anchors, where those of the segments before it stand too, and those are seen as if they followed
    each other, which is how a prompt has them. So a model is trained in one pass, and every anchor token finds its
    text at the same distance, whatever stands before. All segments but that of a short chunk are of one length: one
    base does for all keys.
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
        resident: PooledChunk,
        before: Sequence[LoadedChunk],
        scratch: Sequence[SlotRange],
        engine: Engine,
        model: Model,
    ) -> None:
        """Computes the anchors' KV behind the system prompt, into the chunk's pages; the text's goes to `scratch`.

        When the caller is cancelled, returns only once nothing is written any more.
        """
        seen = tuple(segment for part in before for segment in part.segments())
        start = sum(len(part.wanted.chunk) for part in before)

        async def run(
            ids: Sequence[int], position: int, runs: Sequence[SlotRange], seen: tuple[KVSegment, ...]
        ) -> None:
            rows, positions = stretch(position, ids)
            await engine.run(ForwardJob(rows.to(model.device), positions.to(model.device), runs, seen))

        done = 0
        for text, anchors in self.cuts:
            await run(text, start, scratch, seen)
            # The rows stand behind both, so both are laid side by side before them; their shifts bring them together.
            earlier = stretches(resident.runs, done, start, shift=0)
            read = stretches(scratch, len(text), start + done, shift=done)
            await run(anchors, start + done + len(text), behind(resident.runs, done), (*seen, *earlier, *read))
            done += len(anchors)


def laid(prompt: Prompt, encode: Encode | None, anchors: Mapping[int, Sequence[int]]) -> Prompt:
    """The prompt with what stands for its chunks when they are encoded so: themselves, or a model's anchor tokens."""
    if not isinstance(encode, Anchored):
        return prompt
    percent = encode.percent

    def compressed(chunk: Chunk) -> AnchoredChunk:
        found = cuts(chunk.ids, anchors[percent], percent)
        ids = tuple(i for cut in found for i in cut.anchors)
        return AnchoredChunk(ids, text=chunk.ids, cuts=found, percent=percent)

    return replace(prompt, chunks=tuple(map(compressed, prompt.chunks)))
