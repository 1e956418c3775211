"""A prompt: its parts as tokens, the source of each part's KV, and their places in the prompt and in the pool."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from fusionkv.fusion_worker.pool.chunks import PooledChunk
from fusionkv.fusion_worker.pool.slots import SlotRange, stretches
from fusionkv.kernels.segments import KVSegment
from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.client import Entry


@dataclass(frozen=True)
class Chunk:
    """A system prompt or a retrieved chunk. variants: those encoded ahead of time, most preferred first."""

    ids: tuple[int, ...]
    variants: tuple[bytes, ...] = ()

    @cached_property
    def digest(self) -> bytes:
        return keys.chunk_digest(self.ids)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Prompt:
    """A system prompt, chunks in order, and a question.

    corpus: the chunks' origin, by which answer quality is tracked, and which a primer is of.
    """

    system: Chunk
    chunks: tuple[Chunk, ...]
    question: tuple[int, ...]
    tenant: str = ""
    corpus: str = ""

    @cached_property
    def parts(self) -> tuple[Chunk, ...]:
        """The parts that may be cached: the system prompt, which may be empty, and the chunks."""
        return (self.system, *self.chunks)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Position of each part's first token."""
        starts, at = [], 0
        for part in self.parts:
            starts.append(at)
            at += len(part)
        return tuple(starts)

    @property
    def context_tokens(self) -> int:
        return sum(map(len, self.chunks))

    @property
    def question_start(self) -> int:
        return len(self.system) + self.context_tokens

    @property
    def tokens(self) -> int:
        return self.question_start + len(self.question)

    @cached_property
    def ids(self) -> torch.Tensor:
        """int64 [tokens]: the whole prompt. The tensor is shared: don't write to it."""
        return torch.tensor([i for part in self.parts for i in part.ids] + list(self.question))


@dataclass(frozen=True, slots=True)
class Primer:
    """What a corpus's chunks are encoded after (`Primed`).

    Attributes:
        chunk: the tokens.
        holds: digests of the chunks that it is made of.
        fallback: another one for these chunks, which would find a copy of themselves in it.
    """

    chunk: Chunk
    holds: tuple[bytes, ...]
    fallback: Chunk

    def before(self, chunk: Chunk) -> Chunk:
        """What a chunk is encoded after."""
        return self.fallback if chunk.digest in self.holds else self.chunk


@dataclass(frozen=True, slots=True)
class ChunkSource:
    """The source of a prompt's part: a cache entry to fetch, or an encoding by this worker.

    Attributes:
        position: position of its first token in this prompt.
        base: position of its first token where its keys were, or will be, rotated.
        path, variant, key: its name in the cache service (kvcache_service.keys).
        entry: the entry to fetch; None encodes the part here.
        alone: whether to encode it after the system prompt only, or after all parts before it.
        after: the pool's key of the primer that it is encoded after, too; empty for none.
        is_primer: whether it is a primer, which is loaded for chunks to be encoded, and is not part of the prompt.
        lossless: whether its KV equals that of full attention over this prompt.
    """

    chunk: Chunk
    position: int
    base: int
    path: tuple[bytes, ...]
    key: bytes
    variant: bytes = b""
    entry: Entry | None = None
    alone: bool = True
    after: bytes = b""
    is_primer: bool = False
    lossless: bool = False

    @classmethod
    def isolated(cls, prompt: Prompt, index: int, namespace: bytes) -> "ChunkSource":
        """A part to encode after the system prompt only; index 0 is the system prompt itself."""
        system, part, position = prompt.system, prompt.parts[index], prompt.starts[index]
        path = (system.digest, part.digest) if index else (system.digest,)
        base = len(system) if index else 0
        return cls(part, position, base, path, keys.entry_key(namespace, path), lossless=position == base)

    @classmethod
    def of_primer(cls, system: Chunk, primer: Chunk, namespace: bytes) -> "ChunkSource":
        """A primer to encode after a system prompt."""
        path, base = (system.digest, primer.digest), len(system)
        return cls(primer, base, base, path, keys.entry_key(namespace, path), is_primer=True, lossless=True)

    @classmethod
    def primed(cls, prompt: Prompt, index: int, namespace: bytes, primer: "ChunkSource") -> "ChunkSource":
        """A chunk to encode after the system prompt and a primer."""
        system, part, position = prompt.system, prompt.parts[index], prompt.starts[index]
        path, variant = (system.digest, part.digest), keys.primed_variant(primer.chunk.digest)
        key, base = keys.entry_key(namespace, path, variant), len(system) + len(primer.chunk)
        return cls(part, position, base, path, key, variant, after=primer.key)

    @classmethod
    def after_neighbours(cls, prompt: Prompt, namespace: bytes) -> "ChunkSource":
        """The last chunk of a prompt, to encode after the isolated KV of all other chunks (FusionRAG 3.1)."""
        (*neighbours, chunk), position = prompt.chunks, prompt.starts[-1]
        path, variant = (prompt.system.digest, chunk.digest), keys.neighbours_variant(n.digest for n in neighbours)
        key = keys.entry_key(namespace, path, variant)
        return cls(chunk, position, position, path, key, variant, alone=False)

    @property
    def is_system(self) -> bool:
        return len(self.path) == 1

    def follows(self, other: "ChunkSource") -> bool:
        """Whether it is to be encoded after another part, which precedes it."""
        return self.after == other.key if other.is_primer else other.is_system or not self.alone


@dataclass(frozen=True, slots=True)
class LoadedChunk:
    """A part of a prompt in the pool."""

    source: ChunkSource
    pooled: PooledChunk

    @property
    def loaded(self) -> bool:
        """Whether its KV is in the pool: written, and without an error."""
        ready = self.pooled.ready
        return ready.done() and not ready.cancelled() and ready.exception() is None

    def segments(self, hidden: torch.Tensor | None = None) -> tuple[KVSegment, ...]:
        """Its keys at their positions in the prompt. hidden: bool [tokens], tokens that are recomputed elsewhere."""
        position, shift = self.source.position, self.source.position - self.pooled.base
        return stretches(self.pooled.runs, len(self.source.chunk), position, shift, hidden)


def masked(parts: Sequence[LoadedChunk], computed: torch.Tensor) -> Iterator[tuple[LoadedChunk, torch.Tensor | None]]:
    """Yields each part with a mask of its recomputed tokens: bool [tokens], None if there are none.

    computed: bool [positions].
    """
    for part in parts:
        place = slice(part.source.position, part.source.position + len(part.source.chunk))
        yield part, computed[place] if computed[place].any() else None


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

    ends: int64 [chunks], the position after each chunk's last token, without links. ids: int64 [chunks * each].
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
        position = int(self.moved(torch.tensor(part.source.position)))
        return replace(part, source=replace(part.source, position=position))
