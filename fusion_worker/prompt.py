"""A tokenised prompt in parts: system prompt, chunks and question, each part with its digest."""

from dataclasses import dataclass
from functools import cached_property

import torch

from fusionkv.kvcache_service import keys


@dataclass(frozen=True)
class Chunk:
    """A system prompt or a retrieved chunk. variants: those encoded ahead of time, most preferred first."""

    ids: tuple[int, ...]
    variants: tuple[bytes, ...] = ()

    @cached_property
    def digest(self) -> bytes:
        return keys.chunk_digest(self.ids)

    @property
    def variant(self) -> bytes:
        """The variant of its entry when it is encoded after the system prompt only."""
        return b""

    @property
    def covered(self) -> int:
        """Tokens of the request that it represents, more than its length for compressed chunks."""
        return len(self.ids)

    @property
    def scratch(self) -> int:
        """Temporary slots that encoding it needs besides those that hold its KV."""
        return 0

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Prompt:
    """A system prompt, chunks in order, and a question."""

    system: Chunk
    chunks: tuple[Chunk, ...]
    question: tuple[int, ...]
    tenant: str = ""

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
