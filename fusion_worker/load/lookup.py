"""Asks the cache service where a prompt's parts are, in one call, and names those it lacks."""

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from fusionkv.fusion_worker.correct.correction import Correction
from fusionkv.fusion_worker.load.placement import ChunkSource, Stages
from fusionkv.fusion_worker.prompt import Chunk, Prompt
from fusionkv.fusion_worker.recipes.recipes import ISOLATED, Anchored, Encode, InPlace, Versions
from fusionkv.fusion_worker.transfer.signatures import DELETE_SECONDS, Signer
from fusionkv.fusion_worker.transfer.storage import Storage
from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.client import CacheClient, Hit, HitKind, Lookup
from fusionkv.protos.runtime.errors import ServiceError


class CacheFault(Exception):
    """The cache did not do its part: the request is answered by plain prefill instead."""


class EntryGone(CacheFault):
    """An entry of the remote tier is gone: another lookup knows that it is a miss."""


# Digest and preferred variants of the system prompt and each chunk.
Path = Sequence[tuple[bytes, Sequence[bytes]]]
_MISS = Hit(HitKind.MISS, None)
# Ends the key of what was stored in one byte a number, so that it is no other's in the pool.
RESTORED = b"restored"


def corrected(wanted: ChunkSource, base: int, correction: Correction | None) -> ChunkSource:
    """The part, corrected if it is a chunk that was encoded right behind a system prompt of `base` tokens and stands
    elsewhere: what was encoded behind other text has seen some."""
    # Not only where it is lossless: what was stored in one byte a number stands there as well.
    first = wanted.is_system or wanted.position == base
    return (
        wanted
        if correction is None or first or wanted.variant or wanted.base != base
        else wanted.corrected(correction.behind(wanted.position - base))
    )


class Lookups:
    """Names parts and finds them. Without a cache service everything is a miss."""

    def __init__(
        self, storage: Storage, cache: CacheClient | None, timeout: float, signer: Signer | None = None
    ) -> None:
        """signer: without one every entry is taken."""
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
        encode: Encode = ISOLATED,
        most: float = math.inf,
        stages: Stages | None = None,
        correction: Correction | None = None,
    ) -> AsyncIterator[list[ChunkSource]]:
        """All parts but an empty system prompt at their places, leased for as long as the context is open.

        encode: `InPlace`: only what was encoded on the same path serves. `Versions`: that, and versions that share an
            earlier chunk. What is missing is encoded after all before it then; with all others what is found in any
            way serves, and what is missing is encoded alone. `Anchored`: the prompt's chunks are anchor tokens, and
            those alone serve.
        most: seconds that the cache service is waited for, if that is less than always.
        stages: where entries are counted that no worker signed. correction: of chunks that were encoded alone.

        Raises:
            CacheFault: the cache service is down, slow, or answers what can't be.
        """
        if isinstance(encode, Anchored):
            variant = keys.anchors_variant(encode.percent)
            async with self._anchored(prompt, namespace, variant, most, stages) as anchored:
                yield anchored
            return
        versions = keys.versions_variant(encode.most) if isinstance(encode, Versions) else b""
        variants = [(versions,) if versions and i > 1 else p.variants for i, p in enumerate(prompt.parts)]
        async with self._lookup(
            namespace, [(p.digest, v) for p, v in zip(prompt.parts, variants, strict=True)], most, stages
        ) as hits:
            path = tuple(part.digest for part in prompt.parts)
            exact = keys.path_keys(namespace, path)
            wanted: list[ChunkSource] = []
            for i, (part, hit) in enumerate(zip(prompt.parts, hits, strict=True)):
                start = prompt.starts[i]
                if not self._serves(hit, encode, versions):
                    # What stands behind lossless parts alone is lossless. In the pool it has that name then, and one
                    # that was computed behind stale parts never has; in the cache service both are versions.
                    lossless, variant = all(w.lossless for w in wanted), versions if i > 1 else b""
                    key = exact[i] if lossless else keys.variant_key(exact[i], variant)
                    here = ChunkSource(
                        part, start, start, path[: i + 1], key, variant, alone=False, lossless=lossless
                    )
                    wanted.append(here)
                    continue
                found = self._from_hit(part, start, path[: i + 1], hit, exact[i], start)
                wanted.append(found or self.alone(prompt, i, start, namespace))
            base = len(prompt.system)
            yield [corrected(w, base, correction) for w in wanted if len(w.chunk)]

    def _serves(self, hit: Hit, encode: Encode, versions: bytes) -> bool:
        """Whether what was found, or what is encoded alone for want of it, is what `encode` asks for."""
        if isinstance(encode, InPlace):
            return hit.kind is HitKind.EXACT and self._storage.lossless
        if isinstance(encode, Versions):
            return hit.kind is HitKind.EXACT or (hit.entry is not None and hit.entry.variant == versions)
        return True

    @asynccontextmanager
    async def _anchored(
        self, prompt: Prompt, namespace: bytes, variant: bytes, most: float, stages: Stages | None
    ) -> AsyncIterator[list[ChunkSource]]:
        """The parts of a prompt whose chunks are anchor tokens. Raises as `prompt` does."""
        # No exact entry may come before the variant: nothing is stored behind an element that is no chunk's digest.
        path = [(prompt.system.digest, ()), (variant, ()), *((c.digest, (variant,)) for c in prompt.chunks)]
        async with self._lookup(namespace, path, most, stages) as hits:
            wanted: list[ChunkSource] = []
            for i, (hit, start) in enumerate(zip((hits[0], *hits[2:]), prompt.starts, strict=True)):
                own = self.alone(prompt, i, start, namespace)
                serves = hit.entry is not None and hit.entry.variant == own.variant
                found = self._from_hit(own.chunk, start, own.path, hit, own.key, own.base) if serves else None
                wanted.append(found or own)
            yield [w for w in wanted if len(w.chunk)]

    @asynccontextmanager
    async def isolated(self, prompt: Prompt, namespace: bytes) -> AsyncIterator[list[ChunkSource]]:
        """The system prompt and every chunk as encoded after it alone, each at its place.

        Raises:
            CacheFault: as for `prompt`.
        """
        wanted = []
        system = prompt.system.digest
        async with AsyncExitStack() as stack:
            lookups = [self._lookup(namespace, [(system, ()), (c.digest, ())]) for c in prompt.chunks]
            found = [await stack.enter_async_context(lookup) for lookup in lookups]
            for i, (part, start) in enumerate(zip(prompt.parts, prompt.starts, strict=True)):
                hit = (found[0][0] if found else _MISS) if i == 0 else found[i - 1][1]
                path = (system,) if i == 0 else (system, part.digest)
                exact = hit if hit.kind is HitKind.EXACT else _MISS
                base = len(prompt.system) if i else 0
                known = self._from_hit(part, start, path, exact, keys.entry_key(namespace, path), base)
                wanted.append(known or self.alone(prompt, i, start, namespace))
            yield [w for w in wanted if len(w.chunk)]

    @asynccontextmanager
    async def stored(self, path: tuple[bytes, bytes], variant: bytes, namespace: bytes) -> AsyncIterator[bool]:
        """Whether the cache service has this variant of the chunk at the end of `path` (system prompt, chunk).

        Raises:
            CacheFault: as for `prompt`.
        """
        # An exact hit would come before the variant; nothing is stored behind an element that is no chunk's digest.
        async with self._lookup(namespace, [(path[0], ()), (variant, ()), (path[1], (variant,))]) as hits:
            yield hits[2].entry is not None and hits[2].entry.variant == variant

    def alone(self, prompt: Prompt, index: int, position: int, namespace: bytes) -> ChunkSource:
        """A part to be encoded after the system prompt alone (index 0: the system prompt itself)."""
        system, part = prompt.system, prompt.parts[index]
        path = (system.digest, part.digest) if index else (system.digest,)
        base = len(system) + part.scratch if index else 0
        key = keys.entry_key(namespace, path, part.variant)
        return ChunkSource(
            part, position, base, path, key, part.variant, lossless=position == base and not part.variant
        )

    def _from_hit(
        self, part: Chunk, position: int, path: tuple[bytes, ...], hit: Hit, exact: bytes, base: int
    ) -> ChunkSource | None:
        """The part as found. exact, base: the key of the entry at the end of `path`, and where that entry stands."""
        entry = hit.entry
        if entry is None:
            return None
        if entry.tokens != len(part) or entry.size != self._storage.size(len(part)):
            raise CacheFault(f"the cache service answered an entry of {entry.tokens} tokens, {entry.size} bytes")
        if hit.kind is HitKind.EXACT and (entry.key != exact or entry.base != base):
            raise CacheFault("the cache service answered another entry as an exact hit")
        if self._storage.lossless:
            lossless = hit.kind is HitKind.EXACT and base == position
            return ChunkSource(part, position, entry.base, path, entry.key, entry.variant, entry, lossless=lossless)
        # What comes back otherwise than it was computed is stale everywhere. The system prompt is never recomputed.
        if len(path) == 1:
            return None
        return ChunkSource(part, position, entry.base, path, entry.key + RESTORED, entry.variant, entry)

    @asynccontextmanager
    async def _lookup(
        self, namespace: bytes, path: Path, most: float = math.inf, stages: Stages | None = None
    ) -> AsyncIterator[Sequence[Hit]]:
        if self._cache is None:
            yield [_MISS] * len(path)
            return
        asking = asyncio.create_task(self._cache.lookup(namespace, path, timeout=min(self._timeout, most)))
        try:
            found = await asyncio.shield(asking)
        except asyncio.CancelledError:
            # Asked is leased: the answer is waited for, to be let go of.
            self._later(self._forget(asking))
            raise
        except ServiceError as error:
            raise CacheFault(f"lookup failed: {error}") from error
        try:
            if len(found.hits) != len(path):
                raise CacheFault(f"the cache service answered {len(found.hits)} hits for a path of {len(path)}")
            yield await self._genuine(namespace, path, found.hits, most, stages)
        finally:
            if found.lease:
                # Nobody waits for it: a lease that is not released expires.
                self._later(self._release(found.lease))

    async def _genuine(
        self, namespace: bytes, path: Path, hits: Sequence[Hit], most: float, stages: Stages | None
    ) -> Sequence[Hit]:
        """What of these hits a worker signed; the rest turns into misses, and is deleted.

        As long as it is there, it hides what was signed (an exact entry comes before all others), and keeps a Put of
        the same key from being stored.
        """
        if self._signer is None or self._cache is None:
            return hits
        genuine, rejected = self._signer.genuine(namespace, path, hits)
        if rejected:
            if stages is not None:
                stages.rejected += len(rejected)
            with suppress(ServiceError):
                await self._cache.delete(list(dict.fromkeys(rejected)), timeout=min(DELETE_SECONDS, most))
        return genuine

    def _later(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _forget(self, asking: "asyncio.Task[Lookup]") -> None:
        with suppress(ServiceError):
            if lease := (await asking).lease:
                await self._release(lease)

    async def _release(self, lease: int) -> None:
        assert self._cache is not None
        with suppress(ServiceError):
            await self._cache.release(lease, timeout=self._timeout)
