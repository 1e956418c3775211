"""The parts of a prompt and its link tokens: sources and positions, and slots once they are in the pool."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from fusionkv.fusion_worker.compute.kv_pool import PooledChunk, SlotRange, stretches
from fusionkv.fusion_worker.correct.correction import Average, PlacedCorrection
from fusionkv.fusion_worker.prompt import Chunk, Prompt
from fusionkv.kernels.segments import KVSegment
from fusionkv.kvcache_service.client import Entry


@dataclass(frozen=True, slots=True)
class ChunkSource:
    """The source of a prompt's part: a cache entry to fetch, or an encoding by this worker.

    Attributes:
        position: position of its first token in this prompt.
        base: position of its first token where its keys were, or will be, rotated.
        path, variant, key: its name in the cache service (kvcache_service.keys).
        entry: the entry to fetch; None encodes the part here.
        alone: whether to encode it after the system prompt only, or after all parts before it.
        lossless: whether its KV equals that of full attention over this prompt.
        correction: correction to apply in the pool; None for none.
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
    correction: PlacedCorrection | Average | None = None

    def corrected(self, correction: PlacedCorrection) -> "ChunkSource":
        """The same part with a correction, and with a key of its own in the pool."""
        return replace(self, key=self.key + correction.name, correction=correction)

    @property
    def uncorrected(self) -> bytes:
        """The pool's key of the same chunk without its correction."""
        return self.key if self.correction is None else self.key.removesuffix(self.correction.name)

    @property
    def scratch(self) -> int:
        """Temporary slots that loading it needs besides those that hold its KV."""
        return self.chunk.scratch if self.entry is None else 0

    @property
    def is_system(self) -> bool:
        return len(self.path) == 1


@dataclass(frozen=True, slots=True)
class LoadedChunk:
    """A part of a prompt in the pool."""

    wanted: ChunkSource
    resident: PooledChunk

    def segments(self, hidden: torch.Tensor | None = None) -> tuple[KVSegment, ...]:
        """Its keys at their positions in the prompt. hidden: bool [tokens], tokens that are recomputed elsewhere."""
        position, shift = self.wanted.position, self.wanted.position - self.resident.base
        return stretches(self.resident.runs, len(self.wanted.chunk), position, shift, hidden)


def masked(
    parts: Sequence[LoadedChunk], computed: torch.Tensor, device: torch.device
) -> Iterator[tuple[LoadedChunk, torch.Tensor | None]]:
    """Yields each part with a mask of its recomputed tokens: bool [tokens] on the device, None if there are none.

    computed: bool [positions] on the CPU; reading it from a GPU would synchronise once for each part.
    """
    there = computed.to(device)
    for part in parts:
        place = slice(part.wanted.position, part.wanted.position + len(part.wanted.chunk))
        yield part, there[place] if computed[place].any() else None


@dataclass(slots=True)
class Stages:
    """Statistics of loading, for the request's summary.

    Attributes:
        hits, hit_tokens: chunks and tokens by (kind, tier). Compressed chunks count with the tokens of their text.
        origins: kind and tier of every chunk, by its key.
        missed: chunks that were neither in the pool nor in the cache service.
        rejected: entries that no worker had signed.
        encoded_tokens: tokens of missed chunks.
        bytes_fetched: bytes fetched from the cache service.
        seconds: by stage.
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
        """Counts a part. present: whether it is in the pool already."""
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
        """Adds the seconds spent inside to the stage `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def start_over(self) -> None:
        """Resets the counts before another lookup; seconds and bytes stay."""
        self.hits.clear()
        self.hit_tokens.clear()
        self.origins.clear()
        self.missed = self.encoded_tokens = 0


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """A prompt's parts in the pool, and fresh slots for tokens to compute.

    let_go: unpins all chunks but the system prompt, for a request that has copied what it needs of them.
    """

    parts: tuple[LoadedChunk, ...]
    fresh: tuple[SlotRange, ...]
    let_go: Callable[[], None]

    @property
    def segments(self) -> tuple[KVSegment, ...]:
        """All keys of its parts, including those of stale tokens."""
        return tuple(segment for part in self.parts for segment in part.segments())


@dataclass(frozen=True, slots=True)
class Links:
    """`each` link tokens after every chunk of a prompt (KVLink 2.3). What follows a chunk shifts by `each` positions.

    Attributes:
        ends: int64 [chunks], the position after each chunk's last token, without links.
        ids: int64 [chunks * each].
    """

    ends: torch.Tensor
    ids: torch.Tensor
    each: int

    @classmethod
    def behind(cls, prompt: Prompt, tokens: Sequence[Sequence[int]], each: int) -> "Links":
        """Puts the first `each` of a model's link tokens, given by chunk, after the prompt's chunks; 0 puts none."""
        starts = zip(prompt.starts[1:], prompt.chunks, strict=True)
        ends = torch.tensor([start + len(chunk) for start, chunk in starts], dtype=torch.int64)
        used = tokens[: len(prompt.chunks)] if each else ()
        return cls(ends, torch.tensor([i for chunk in used for i in chunk[:each]], dtype=torch.int64), each)

    @property
    def positions(self) -> torch.Tensor:
        """int64 [chunks * each]: positions of the link tokens."""
        chunk = torch.arange(len(self.ends))
        return ((self.ends + self.each * chunk)[:, None] + torch.arange(self.each)).flatten()

    def moved(self, positions: torch.Tensor) -> torch.Tensor:
        """int64: the positions, with links, of tokens at `positions` without links."""
        return positions + self.each * torch.searchsorted(self.ends, positions, right=True)

    def placed(self, part: LoadedChunk) -> LoadedChunk:
        """The part at its position with links."""
        if not self.each:
            return part
        position = int(self.moved(torch.tensor(part.wanted.position)))
        return replace(part, wanted=replace(part.wanted, position=position))
