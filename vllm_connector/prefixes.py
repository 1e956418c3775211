"""Prefixes computed by vLLM as entries of a cache service: chunks of a fixed size, found by their path."""

from collections.abc import Sequence
from dataclasses import dataclass

from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.client import HitKind, Lookup

_NO_SYSTEM = keys.chunk_digest(())


@dataclass(frozen=True, slots=True)
class Prefix:
    """The chunks of a prompt, each found by its exact path.

    Attributes:
        tenant: vLLM's cache_salt; only requests with the same one share the prefix.
        digests: digest of every complete chunk of the prompt.
        tokens: size of a chunk.
    """

    tenant: str
    digests: tuple[bytes, ...]
    tokens: int

    @classmethod
    def of(cls, prompt: Sequence[int], salt: str, tokens: int) -> "Prefix":
        """The prefix of all tokens but the last, which is always computed."""
        starts = range(0, len(prompt) - tokens, tokens)
        return cls(salt, tuple(keys.chunk_digest(prompt[at : at + tokens]) for at in starts), tokens)

    def path(self, chunks: int) -> list[bytes]:
        """Path of the first `chunks` chunks in the cache service, beginning with the empty system prompt."""
        return [_NO_SYSTEM, *self.digests[:chunks]]

    def found(self, lookup: Lookup) -> int:
        """Number of consecutive chunks, from the first, with an exact hit."""
        for count, hit in enumerate(lookup.hits[1:]):
            if hit.kind is not HitKind.EXACT or hit.entry is None or hit.entry.tokens != self.tokens:
                return count
        return len(lookup.hits) - 1
