"""Where a prompt's parts come from and where they stand: wanted, then placed in the pool."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from fusionkv.fusion_worker.compute.kv_pool import PooledChunk, SlotRange
from fusionkv.fusion_worker.correct.correction import PlacedCorrection
from fusionkv.fusion_worker.prompt import Chunk
from fusionkv.kernels.segments import KVSegment
from fusionkv.kvcache_service.client import Entry


@dataclass(frozen=True, slots=True)
class ChunkSource:
    """One part of a prompt and how it comes: `entry` is fetched; without one the part is encoded here.

    position: of its first token in this prompt. base: the same when its keys were or will be written.
    path, variant, key: its name in the cache service (kvcache_service.keys).
    alone: encoded after the system prompt alone; otherwise after all parts before it.
    lossless: its KV equals what full attention over this prompt gives.
    correction: goes over it in the pool, if any does.
    """

    chunk: Chunk
    position: int
    base: int
    path: tuple[bytes, ...]
    key: bytes
    variant: bytes = b""
    entry: Entry | None = None
    alone: bool = True
    lossless: bool = False
    correction: PlacedCorrection | None = None

    def corrected(self, correction: PlacedCorrection) -> "ChunkSource":
        """The same with a correction, by a key in the pool that is no other's."""
        return replace(self, key=self.key + correction.name, correction=correction)

    @property
    def uncorrected(self) -> bytes:
        """The pool's key of the same chunk as it was before it was corrected."""
        return self.key if self.correction is None else self.key.removesuffix(self.correction.name)

    @property
    def scratch(self) -> int:
        """Slots that loading it takes beside its own."""
        return self.chunk.scratch if self.entry is None else 0

    @property
    def is_system(self) -> bool:
        return len(self.path) == 1


@dataclass(frozen=True, slots=True)
class LoadedChunk:
    """One part of a prompt, in the pool."""

    wanted: ChunkSource
    resident: PooledChunk

    def segments(self, hidden: torch.Tensor | None = None) -> tuple[KVSegment, ...]:
        """Its keys at their place in the prompt. hidden: bool [tokens], those computed elsewhere."""
        position, shift = self.wanted.position, self.wanted.position - self.resident.base
        return stretches(self.resident.runs, len(self.wanted.chunk), position, shift, hidden)


def stretches(
    runs: Sequence[SlotRange], count: int, first: int, shift: int, hidden: torch.Tensor | None = None
) -> tuple[KVSegment, ...]:
    """The first `count` slots of the runs as keys of neighbouring tokens from position `first` on."""
    at, found = 0, list[KVSegment]()
    for run in runs:
        length = min(run.length, count - at)
        if length <= 0:
            break
        unseen = None if hidden is None else hidden[at : at + length]
        found.append(KVSegment(run.start, length, first + at, shift, hidden=unseen))
        at += length
    return tuple(found)


def masked(
    parts: Sequence[LoadedChunk], computed: torch.Tensor, device: torch.device
) -> Iterator[tuple[LoadedChunk, torch.Tensor | None]]:
    """The parts, each with its tokens that are computed elsewhere: bool [tokens] on the device, None if none is.

    computed: bool [positions], on the CPU: a GPU would be waited for once a part.
    """
    there = computed.to(device)
    for part in parts:
        place = slice(part.wanted.position, part.wanted.position + len(part.wanted.chunk))
        yield part, there[place] if computed[place].any() else None


@dataclass(slots=True)
class Stages:
    """What loading did, for the request's summary. hits: chunks and tokens by (kind, tier); tokens of the request,
    also where fewer anchor tokens stand for them.

    origins: kind and tier of every chunk, by its key. rejected: entries found that no worker had signed.
    """

    hits: Counter[tuple[str, str]] = field(default_factory=Counter)
    hit_tokens: Counter[tuple[str, str]] = field(default_factory=Counter)
    origins: dict[bytes, tuple[str, str]] = field(default_factory=dict)
    missed: int = 0
    rejected: int = 0
    encoded_tokens: int = 0
    bytes_fetched: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def count(self, wanted: ChunkSource, present: bool) -> None:
        """A part that is to be loaded, or is in the pool already."""
        if wanted.is_system:
            return
        tokens = wanted.chunk.covered
        if wanted.entry is None and not present:
            self.encoded_tokens += tokens
            self.missed += 1
            self.origins.setdefault(wanted.key, ("miss", "none"))
            return
        kind = "exact" if wanted.lossless else "alternative"
        tier = "device" if present or wanted.entry is None else wanted.entry.tier
        self.origins.setdefault(wanted.key, (kind, tier))
        self.hits[kind, tier] += 1
        self.hit_tokens[kind, tier] += tokens

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to a stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def start_over(self) -> None:
        """What was found is looked for once more: only the time and the bytes that it took count."""
        self.hits.clear()
        self.hit_tokens.clear()
        self.missed = self.encoded_tokens = 0


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """A prompt's parts in the pool and fresh slots for what will be computed.

    let_go: gives up the chunks, all but the system prompt; for a request that keeps copies of what it needs of them.
    """

    parts: tuple[LoadedChunk, ...]
    fresh: tuple[SlotRange, ...]
    let_go: Callable[[], None]

    @property
    def segments(self) -> tuple[KVSegment, ...]:
        """All keys of its parts, as they were reused."""
        return tuple(segment for part in self.parts for segment in part.segments())
