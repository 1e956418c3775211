"""Interfaces of embedders, which turn texts into vectors, and of rerankers, which score passages."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

# Maximum characters of a text that are embedded or scored: most models accept at most 512 tokens.
CHARACTERS = 1 << 14


class _Model(ABC):
    name: str

    @abstractmethod
    async def close(self) -> None:
        """Ends all work in flight."""


class Embedder(_Model):
    """Turns texts into vectors of unit length. For concurrent use within one event loop, which it never blocks.

    Attributes:
        name: stored with a corpus's vectors; vectors of different names are never compared.
        dim: width of the vectors.
    """

    dim: int

    @abstractmethod
    async def embed(self, texts: Sequence[str], *, question: bool = False, tenant: str = "") -> np.ndarray:
        """Embeds texts.

        Args:
            question: whether the texts are questions, which some models embed differently from documents.
            tenant: whose texts they are: a local model takes batches of tenants in turn.

        Returns:
            Vectors, float32 `[text, dim]`.

        Raises:
            Unavailable: the model can't be reached at the moment.
            ResourceExhausted: the model is overloaded.
        """


class Reranker(_Model):
    """Scores passages for a question. Concurrency as for `Embedder`."""

    @abstractmethod
    async def score(self, question: str, passages: Sequence[str]) -> list[float]:
        """One score per passage; higher is better. Raises as `Embedder.embed`."""
