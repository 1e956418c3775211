"""Primers: passages that a corpus's chunks are encoded after, so that their KV is as in the middle of a prompt."""

import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from fusionkv.fusion_worker.load.lookup import CacheFault, Lookups
from fusionkv.fusion_worker.load.passages import TOKENS
from fusionkv.fusion_worker.load.write_back import WriteBack
from fusionkv.fusion_worker.prompt import Chunk, ChunkSource, Primer, Prompt
from fusionkv.kvcache_service import keys
from fusionkv.protos.runtime.errors import ServiceError

# Tokens of the shortest primer that is made of a corpus.
_LEAST = 128
# Seconds until a primer is looked up again, which also keeps it from being evicted.
_SECONDS = 60.0
_MAX_KNOWN = 1024
_COUNT = _ID = struct.Struct("<I")
_HELD = struct.Struct("32s")


def choose(chunks: Sequence[Chunk], fallback: Chunk) -> Primer | None:
    """A primer of the first of these chunks; None if they are too short."""
    ids: list[int] = []
    held: dict[bytes, None] = {}
    for chunk in chunks:
        if chunk.digest not in held and len(ids) < TOKENS:
            ids += chunk.ids
            held[chunk.digest] = None
    return Primer(Chunk(tuple(ids[:TOKENS])), tuple(held), fallback) if len(ids) >= _LEAST else None


@dataclass(frozen=True, slots=True)
class _Known:
    """primer: None of a corpus that was deleted. stored: whether the cache service has had it.

    until: when it is looked up again.
    """

    primer: Primer | None
    stored: bool
    until: float


class Primers:
    """The primer of each corpus: made of the first prompt about it, and kept in the cache service for all workers."""

    def __init__(
        self,
        fallback: Chunk,
        lookups: Lookups,
        write_back: WriteBack | None,
        namespace: Callable[[str], bytes],
        vocabulary: int,
    ) -> None:
        """fallback: the primer of short corpora. namespace: of a tenant. write_back: None without a cache service.

        vocabulary: number of the model's token ids.
        """
        self._fallback = fallback
        self._lookups = lookups
        self._write_back = write_back
        self._namespace = namespace
        self._vocabulary = vocabulary
        self._known: OrderedDict[tuple[str, str], _Known] = OrderedDict()

    async def of(self, prompt: Prompt) -> Primer:
        """The primer of a prompt's corpus; if there is none, it is made of the prompt's chunks.

        Raises CacheFault as `Lookups.prompt` does.
        """
        key = prompt.tenant, prompt.corpus
        known = self._known.get(key)
        if known is not None and known.primer is not None and time.monotonic() < known.until:
            self._known.move_to_end(key)
            return known.primer
        primer, stored = await self._stored(key), True
        if primer is None:
            # One that the cache service no longer has may hold deleted text.
            kept = known.primer if known is not None and not known.stored else None
            primer = kept or choose(prompt.chunks, self._fallback)
            if primer is None:
                return Primer(self._fallback, (), self._fallback)
            primer, stored = await self._store(key, primer)
        now = self._known.get(key)
        if now is not None and now is not known and now.primer is None:
            # The corpus was deleted meanwhile, maybe before the primer was stored.
            await self.forget(*key)
            return primer
        self._remember(key, _Known(primer, stored, time.monotonic() + _SECONDS))
        return primer

    async def forget(self, tenant: str, corpus: str) -> None:
        """Deletes the primer of a corpus, here and in the cache service.

        Raises CacheFault as `Lookups.delete` does; it is deleted here.
        """
        self._remember((tenant, corpus), _Known(None, stored=False, until=0.0))
        await self._lookups.delete(keys.primer_name(corpus), self._namespace(tenant))

    def _remember(self, key: tuple[str, str], known: _Known) -> None:
        self._known[key] = known
        self._known.move_to_end(key)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    async def _stored(self, key: tuple[str, str]) -> Primer | None:
        tenant, corpus = key
        name, namespace = keys.primer_name(corpus), self._namespace(tenant)
        data = await self._lookups.named(name, namespace)
        try:
            return None if data is None else _unpacked(data, self._fallback, self._vocabulary)
        except CacheFault:
            # It would spoil every prompt about the corpus.
            with suppress(CacheFault):
                await self._lookups.delete(name, namespace)
            raise

    async def _store(self, key: tuple[str, str], primer: Primer) -> tuple[Primer, bool]:
        """Returns the primer to use, which is another worker's if that was faster, and whether it is stored."""
        if self._write_back is None:
            return primer, False
        tenant, corpus = key
        namespace, path = self._namespace(tenant), (keys.primer_name(corpus),)
        entry = ChunkSource(primer.chunk, 0, 0, path, keys.entry_key(namespace, path))
        with suppress(ServiceError):  # such as a quota
            if await self._write_back.send(namespace, entry, memoryview(_packed(primer)), offered=False):
                return primer, True
        other = await self._stored(key)
        return other or primer, other is not None


def _packed(primer: Primer) -> bytes:
    return b"".join((_COUNT.pack(len(primer.holds)), *primer.holds, *map(_ID.pack, primer.chunk.ids)))


def _unpacked(data: bytes, fallback: Chunk, vocabulary: int) -> Primer:
    """Raises CacheFault if the bytes are not a primer."""
    try:
        (count,) = _COUNT.unpack_from(data)
        holds = tuple(held for (held,) in _HELD.iter_unpack(data[_COUNT.size :][: count * _HELD.size]))
        ids = tuple(i for (i,) in _ID.iter_unpack(data[_COUNT.size + count * _HELD.size :]))
        if not _LEAST <= len(ids) <= TOKENS or max(ids) >= vocabulary:
            raise ValueError(f"{len(ids)} tokens")
    except (struct.error, ValueError) as error:
        raise CacheFault("the cache service returned the wrong entry as a primer") from error
    return Primer(Chunk(ids), holds, fallback)
