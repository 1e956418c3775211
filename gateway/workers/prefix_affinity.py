"""Estimates which chunks a worker's KV pool holds, from the requests sent to it."""

from collections import OrderedDict
from collections.abc import Mapping

# Tokens of a pool whose size is not known yet.
_FIRST_TOKENS = 1 << 16
_MAX_CHUNKS = 1 << 16


class PrefixAffinity:
    """Chunks by name with their tokens, evicted least recently used first, as in the pool.

    An estimate: other gateways may use the worker too, and requests' own tokens take room in its pool. An error costs
    a load from the cache service.
    """

    def __init__(self) -> None:
        self._tokens: OrderedDict[bytes, int] = OrderedDict()
        self._sum = 0
        self._capacity = _FIRST_TOKENS

    def share(self, chunks: Mapping[bytes, int]) -> float:
        """Share of the tokens of a prompt's chunks that the pool probably holds, 0..1."""
        held = sum(tokens for name, tokens in chunks.items() if name in self._tokens)
        return held / sum(chunks.values()) if held else 0.0

    def use(self, chunks: Mapping[bytes, int]) -> None:
        """Records that the worker receives a prompt with these chunks."""
        for name, tokens in chunks.items():
            if name not in self._tokens:
                self._sum += tokens
            self._tokens[name] = tokens
            self._tokens.move_to_end(name)
        self._trim()

    def resize(self, tokens: int) -> None:
        """Sets the size of the pool, as reported by the worker."""
        self._capacity = tokens
        self._trim()

    def clear(self) -> None:
        """Forgets all chunks: the worker has, or may have, restarted."""
        self._tokens.clear()
        self._sum = 0

    def _trim(self) -> None:
        while self._sum > self._capacity or len(self._tokens) > _MAX_CHUNKS:
            _, tokens = self._tokens.popitem(last=False)
            self._sum -= tokens
