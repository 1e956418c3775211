"""A prompt as the engine sees it: token ids in parts, each with its digest."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fusionkv.kvcache_service import keys


@dataclass(frozen=True)
class Chunk:
    """A system prompt or a retrieved chunk. variants: how it was encoded ahead of time, best first."""

    ids: tuple[int, ...]
    variants: tuple[bytes, ...] = ()

    @cached_property
    def digest(self) -> bytes:
        return keys.chunk_digest(self.ids)

    @property
    def variant(self) -> bytes:
        """Of its entry when it is encoded after the system prompt alone."""
        return b""

    @property
    def covered(self) -> int:
        """Tokens of the request that it is or stands for."""
        return len(self.ids)

    @property
    def scratch(self) -> int:
        """Slots that encoding it takes beside its own."""
        return 0

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Prompt:
    """System prompt, chunks in order, question."""

    system: Chunk
    chunks: tuple[Chunk, ...]
    question: tuple[int, ...]
    tenant: str = ""

    @cached_property
    def parts(self) -> tuple[Chunk, ...]:
        """The system prompt, unless it is empty, and the chunks: all that may be cached."""
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
        """int64 [tokens]: the whole prompt; for everybody, so never written."""
        return torch.tensor([i for part in self.parts for i in part.ids] + list(self.question))


def stretch(start: int, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and positions, int64, of tokens that stand next to each other from `start` on."""
    return torch.tensor(ids, dtype=torch.int64), torch.arange(start, start + len(ids))
