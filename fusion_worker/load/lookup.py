"""Looks a prompt's parts up in the cache service in one call, and says how what it lacks is encoded."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Protocol

from fusionkv.fusion_worker.prompt import Chunk, ChunkSource, Primer, Prompt
from fusionkv.fusion_worker.transfer.signatures import DELETE_SECONDS, Signer
from fusionkv.fusion_worker.transfer.storage import Storage
from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.client import CacheClient, Hit, HitKind, Lookup
from fusionkv.protos.contract.recipes import Encode, InPlace, Primed, Versions
from fusionkv.protos.deadline import NO_DEADLINE, Deadline
from fusionkv.protos.runtime.cancellation import background
from fusionkv.protos.runtime.errors import ServiceError


class CacheFault(Exception):
    """The cache service failed; the request's prompt is prefilled in full instead."""


class EntryGone(CacheFault):
    """An entry was evicted after the lookup; another lookup reports it as a miss."""


class NotFiniteKV(CacheFault):
    """KV that was computed here holds NaN or infinity, so it is neither used nor stored."""


# Digest and preferred variants of the system prompt and each chunk.
Path = Sequence[tuple[bytes, Sequence[bytes]]]
_MISS = Hit(HitKind.MISS, None)
# Suffix of the pool's keys of chunks that were dequantised, which differ from the computed ones.
RESTORED = b"restored"
# Bytes of an entry that is no KV.
_MAX_NAMED = 1 << 16


class Rejecting(Protocol):
    """Counts entries that no worker had signed."""

    rejected: int


class Lookups:
    """Makes the keys of a prompt's parts and looks them up. Without a cache service every part is a miss."""

    def __init__(
        self,
        storage: Storage,
        cache: CacheClient | None,
        timeout: float,
        max_tokens: int,
        signer: Signer | None = None,
    ) -> None:
        """timeout: seconds for one lookup. max_tokens: the model's limit.

        signer: verifies entries; without one every entry is accepted.
        """
        self._max_tokens = max_tokens
        self._storage = storage
        self._cache = cache
        self._timeout = timeout
        self._signer = signer
        self._releases: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def prompt(
        self,
        prompt: Prompt,
        namespace: bytes,
        encode: Encode,
        deadline: Deadline = NO_DEADLINE,
        load: Rejecting | None = None,
        primer: Primer | None = None,
    ) -> AsyncIterator[list[ChunkSource]]:
        """Looks up all parts but an empty system prompt; leases them while the context is open.

        Args:
            encode: which hits are used. `InPlace`: exact hits. `Versions`: exact hits, and versions that share an
                earlier chunk. `Primed`: exact hits, and chunks that were encoded after the primer. Others use any
                hit. Misses are encoded after all parts before them with `InPlace` and `Versions`, otherwise after
                the system prompt only, or, except for the first chunk, after it and the primer with `Primed`.
            deadline: of the lookup, besides the timeout of all lookups.
            load: counts entries that were rejected because no worker signed them.
            primer: the corpus's, for `Primed`.

        Raises:
            CacheFault: the cache service is down, too slow, or gave an invalid reply.
        """
        made = [self._made(encode, prompt, i, primer) for i in range(len(prompt.parts))]
        variants = [(variant,) if variant else p.variants for variant, p in zip(made, prompt.parts, strict=True)]
        async with self._lookup(
            namespace, [(p.digest, v) for p, v in zip(prompt.parts, variants, strict=True)], deadline, load
        ) as hits:
            path = tuple(part.digest for part in prompt.parts)
            exact = keys.path_keys(namespace, path)
            sources: list[ChunkSource] = []
            primers: dict[bytes, ChunkSource] = {}
            for i, (part, hit) in enumerate(zip(prompt.parts, hits, strict=True)):
                start = prompt.starts[i]
                if self._serves(hit, encode, made[i]):
                    stored = self._from_hit(part, start, path[: i + 1], hit, exact[i], start)
                    sources.append(stored or ChunkSource.isolated(prompt, i, namespace))
                elif primer is not None and made[i]:
                    first = ChunkSource.of_primer(prompt.system, primer.before(part), namespace)
                    primers[first.key] = first
                    sources.append(ChunkSource.primed(prompt, i, namespace, first))
                elif isinstance(encode, Primed):
                    sources.append(ChunkSource.isolated(prompt, i, namespace))
                else:
                    # A part computed after lossless parts only is lossless, and gets the exact key in the pool,
                    # unlike one computed after stale parts. In the cache service both are versions.
                    lossless = all(source.lossless for source in sources)
                    key = exact[i] if lossless else keys.variant_key(exact[i], made[i])
                    own = (path[: i + 1], key, made[i])
                    sources.append(ChunkSource(part, start, start, *own, alone=False, lossless=lossless))
            sources[1:1] = primers.values()
            yield [source for source in sources if len(source.chunk)]

    def _made(self, encode: Encode, prompt: Prompt, index: int, primer: Primer | None) -> bytes:
        """The variant that `encode` makes of a prompt's part; empty for the first chunk and the system prompt."""
        if index > 1 and isinstance(encode, Versions):
            return keys.versions_variant(encode.most)
        if index > 1 and primer is not None:
            part, first = prompt.parts[index], primer.before(prompt.parts[index])
            if first.ids and len(prompt.system) + len(first) + len(part) <= self._max_tokens:
                return keys.primed_variant(first.digest)
        return b""

    def _serves(self, hit: Hit, encode: Encode, made: bytes) -> bool:
        """Whether `encode`, which makes the variant `made`, allows this hit.

        For a miss, whether the chunk is to be encoded after the system prompt only.
        """
        if isinstance(encode, InPlace):
            return hit.kind is HitKind.EXACT and self._storage.lossless
        if isinstance(encode, Versions | Primed):
            return hit.kind is HitKind.EXACT or (hit.entry is not None and hit.entry.variant == made)
        return True

    @asynccontextmanager
    async def isolated(self, prompt: Prompt, namespace: bytes) -> AsyncIterator[list[ChunkSource]]:
        """Looks up the system prompt, and every chunk as encoded after it alone, each at its position.

        Raises CacheFault as `prompt` does.
        """
        sources = []
        async with AsyncExitStack() as stack:
            lookups = [self._lookup(namespace, [(prompt.system.digest, ()), (c.digest, ())]) for c in prompt.chunks]
            by_chunk = [await stack.enter_async_context(lookup) for lookup in lookups]
            for i in range(len(prompt.parts)):
                alone = ChunkSource.isolated(prompt, i, namespace)
                hit = (by_chunk[0][0] if by_chunk else _MISS) if i == 0 else by_chunk[i - 1][1]
                exact = hit if hit.kind is HitKind.EXACT else _MISS
                stored = self._from_hit(alone.chunk, alone.position, alone.path, exact, alone.key, alone.base)
                sources.append(stored or alone)
            yield [source for source in sources if len(source.chunk)]

    @asynccontextmanager
    async def stored(self, source: ChunkSource, namespace: bytes) -> AsyncIterator[bool]:
        """Whether the cache service stores this variant of a chunk. Raises CacheFault as `prompt` does."""
        (system, chunk), variant = source.path, source.variant
        # An exact hit would win over the variant. The variant's digest in the path prevents one: no chunk has it.
        async with self._lookup(namespace, [(system, ()), (variant, ()), (chunk, (variant,))]) as hits:
            yield hits[2].entry is not None and hits[2].entry.variant == variant

    @asynccontextmanager
    async def exact(self, prompt: Prompt, namespace: bytes) -> AsyncIterator[bool]:
        """Whether the cache service stores all parts of a prompt under their exact paths.

        Raises CacheFault as `prompt` does.
        """
        async with self._lookup(namespace, [(part.digest, ()) for part in prompt.parts]) as hits:
            pairs = zip(prompt.parts, hits, strict=True)
            yield all(hit.kind is HitKind.EXACT for part, hit in pairs if len(part))

    async def named(self, name: bytes, namespace: bytes) -> bytes | None:
        """The bytes of an entry that is no KV, whose path is `name` alone; None if there is none.

        Raises CacheFault as `prompt` does, or if the entry is too large.
        """
        async with self._lookup(namespace, [(name, ())]) as (hit,):
            if hit.entry is None or self._cache is None:
                return None
            if hit.entry.size > _MAX_NAMED or hit.entry.key != keys.entry_key(namespace, (name,)):
                raise CacheFault("the cache service returned the wrong entry for a name")
            data = bytearray(hit.entry.size)
            try:
                await self._cache.fetch(hit.entry, memoryview(data), timeout=self._timeout)
                if self._signer is not None:
                    await self._signer.verify(self._cache, hit.entry, memoryview(data))
            except ServiceError as error:
                raise CacheFault(f"fetch failed: {error}") from error
            return bytes(data)

    async def delete(self, name: bytes, namespace: bytes) -> None:
        """Deletes the entry of `named`, if there is one.

        Raises CacheFault as `prompt` does, or if the entry was not deleted everywhere.
        """
        # The cache service deletes from its remote tier what it stores itself, or has found there.
        async with self._lookup(namespace, [(name, ())]):
            if self._cache is None:
                return
            try:
                await self._cache.delete([keys.entry_key(namespace, (name,))], timeout=self._timeout)
            except ServiceError as error:
                raise CacheFault(f"delete failed: {error}") from error

    def _from_hit(
        self, part: Chunk, position: int, path: tuple[bytes, ...], hit: Hit, exact: bytes, base: int
    ) -> ChunkSource | None:
        """The part of a hit; None if the part has to be computed.

        exact, base: key and base position of the exact entry at the end of `path`.
        """
        entry = hit.entry
        if entry is None:
            return None
        if entry.tokens != len(part) or entry.size != self._storage.size(len(part)):
            raise CacheFault(
                f"the cache service returned an entry of {entry.tokens} tokens and {entry.size} bytes for a chunk of "
                f"{len(part)} tokens"
            )
        if hit.kind is HitKind.EXACT and (entry.key, entry.base) != (exact, base):
            raise CacheFault("the cache service returned the wrong entry as an exact hit")
        if self._storage.lossless:
            lossless = hit.kind is HitKind.EXACT and base == position
            return ChunkSource(part, position, entry.base, path, entry.key, entry.variant, entry, lossless=lossless)
        # Quantised KV is stale at every position, but the system prompt is never recomputed: compute it instead.
        if len(path) == 1:
            return None
        return ChunkSource(part, position, entry.base, path, entry.key + RESTORED, entry.variant, entry)

    @asynccontextmanager
    async def _lookup(
        self, namespace: bytes, path: Path, deadline: Deadline = NO_DEADLINE, load: Rejecting | None = None
    ) -> AsyncIterator[Sequence[Hit]]:
        if self._cache is None:
            yield [_MISS] * len(path)
            return
        timeout = min(self._timeout, deadline.remaining())
        asking = asyncio.create_task(self._cache.lookup(namespace, path, timeout=timeout))
        try:
            lookup = await asyncio.shield(asking)
        except asyncio.CancelledError:
            # The cache service grants the lease all the same: release it when the reply arrives.
            background(self._releases, self._release(asking))
            raise
        except ServiceError as error:
            raise CacheFault(f"lookup failed: {error}") from error
        try:
            if len(lookup.hits) != len(path):
                raise CacheFault(f"the cache service returned {len(lookup.hits)} hits for a path of {len(path)}")
            hits: Sequence[Hit] = lookup.hits
            if self._signer is not None:
                hits, rejected = self._signer.genuine(namespace, path, hits)
                if load is not None:
                    load.rejected += len(rejected)
                # While such an entry exists, it hides signed ones (exact hits win), and a Put of its key stores
                # nothing.
                if rejected:
                    with suppress(ServiceError):
                        seconds = min(DELETE_SECONDS, deadline.remaining())
                        await self._cache.delete(list(dict.fromkeys(rejected)), timeout=seconds)
            yield hits
        finally:
            if lookup.lease:
                # In the background: a lease that is not released expires.
                background(self._releases, self._release(asking))

    async def _release(self, asking: "asyncio.Task[Lookup]") -> None:
        assert self._cache is not None
        with suppress(ServiceError):
            if lease := (await asking).lease:
                await self._cache.release(lease, timeout=self._timeout)
