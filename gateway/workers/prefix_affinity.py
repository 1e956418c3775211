"""What a worker's pool likely holds: the chunks that it was given of late, as many as fit."""

from collections import OrderedDict
from collections.abc import Mapping

# Of a pool whose size is not known yet.
_FIRST_TOKENS = 1 << 16
_MOST_CHUNKS = 1 << 16


class PrefixAffinity:
    """Chunks by name, with their tokens. As in the pool, the one that was used least recently goes first.

    A guess: others may send the worker requests too, and a request's own tokens take room in its pool. A wrong one
    costs a load from the cache service.
    """

    def __init__(self) -> None:
        self._tokens: OrderedDict[bytes, int] = OrderedDict()
        self._sum = 0
        self._room = _FIRST_TOKENS

    def share(self, chunks: Mapping[bytes, int]) -> float:
        """Of the tokens of a prompt's chunks those that are likely there, 0..1."""
        held = sum(tokens for name, tokens in chunks.items() if name in self._tokens)
        return held / sum(chunks.values()) if held else 0.0

    def use(self, chunks: Mapping[bytes, int]) -> None:
        """The worker is given a prompt of these."""
        for name, tokens in chunks.items():
            if name not in self._tokens:
                self._sum += tokens
            self._tokens[name] = tokens
            self._tokens.move_to_end(name)
        self._trim()

    def resize(self, tokens: int) -> None:
        """The worker said how large its pool is."""
        self._room = tokens
        self._trim()

    def clear(self) -> None:
        """It is another process now, or may be."""
        self._tokens.clear()
        self._sum = 0

    def _trim(self) -> None:
        while self._sum > self._room or len(self._tokens) > _MOST_CHUNKS:
            _, tokens = self._tokens.popitem(last=False)
            self._sum -= tokens
