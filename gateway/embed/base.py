"""The contracts of an embedder, which makes vectors of texts, and of a reranker, which scores passages."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np


class Embedder(ABC):
    """Vectors of unit length. Safe for concurrent use within one event loop, and never blocks it.

    name: corpora keep it beside their vectors; vectors of two names are never compared. dim: their width.
    """

    name: str
    dim: int

    @abstractmethod
    async def embed(self, texts: Sequence[str], *, question: bool = False) -> np.ndarray:
        """float32 `[text, dim]`. question: some models want to be told what searches and what is searched.

        Raises:
            Unavailable: the model can't be reached now.
            ResourceExhausted: it has too much to do.
        """

    @abstractmethod
    async def close(self) -> None:
        """Ends all work in flight."""


class Reranker(ABC):
    """Scores of passages for a question. As safe as an Embedder."""

    name: str

    @abstractmethod
    async def score(self, question: str, passages: Sequence[str]) -> list[float]:
        """One score a passage, higher is better. Raises as `Embedder.embed` does."""

    @abstractmethod
    async def close(self) -> None:
        """Ends all work in flight."""
