"""Prefixes that vLLM computed itself, as entries of a cache service: chunks of a fixed size, found by their path."""

from collections.abc import Sequence
from dataclasses import dataclass

from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.client import HitKind, Lookup

_NO_SYSTEM = keys.chunk_digest(())


@dataclass(frozen=True, slots=True)
class Prefix:
    """The chunks of a prompt, each behind all before it.

    tenant: whoever shares it; vLLM's cache_salt. digests: of every whole chunk of the prompt. tokens: of a chunk.
    """

    tenant: str
    digests: tuple[bytes, ...]
    tokens: int

    @classmethod
    def of(cls, prompt: Sequence[int], salt: str, tokens: int) -> "Prefix":
        """Of all but the prompt's last token, which is always computed."""
        starts = range(0, len(prompt) - tokens, tokens)
        return cls(salt, tuple(keys.chunk_digest(prompt[at : at + tokens]) for at in starts), tokens)

    def path(self, chunks: int) -> list[bytes]:
        """Of the first so many chunks, as the cache service has it: the system prompt first, which is empty."""
        return [_NO_SYSTEM, *self.digests[:chunks]]

    def found(self, lookup: Lookup) -> int:
        """How many chunks from the first on are there, each behind what stands before it here."""
        for count, hit in enumerate(lookup.hits[1:]):
            if hit.kind is not HitKind.EXACT or hit.entry is None or hit.entry.tokens != self.tokens:
                return count
        return len(lookup.hits) - 1
