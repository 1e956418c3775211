"""Encodes chunks ahead of time: under their exact path, or after their neighbours (FusionRAG 3.1)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from fusionkv.fusion_worker.load.loader import Loader
from fusionkv.fusion_worker.load.lookup import CacheFault, NotFiniteKV
from fusionkv.fusion_worker.prompt import ChunkSource, Prompt
from fusionkv.kvcache_service import keys
from fusionkv.protos.contract.recipes import InPlace, Primed
from fusionkv.protos.runtime.errors import FailedPrecondition, Unavailable


@dataclass(frozen=True, slots=True)
class Encoded:
    """An entry of the cache service. existed: whether it was stored before."""

    key: bytes
    variant: bytes
    existed: bool


class Encoder:
    """Stores entries before a request needs them. The chunk to encode is the last one of the prompt."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    async def exact(self, prompt: Prompt) -> Encoded:
        """Computes full attention over the path, and stores every chunk of it under its exact path.

        Raises:
            FailedPrecondition: this worker has no cache service, or the computed KV is not finite.
            Unavailable: the cache service can't be reached or refused the bytes.
        """
        namespace = self._loader.namespace(prompt.tenant)
        with _errors():
            # Not left to the next lookup: it finds nothing in quantised entries, which full attention can't use.
            async with self._loader.lookups.exact(prompt, namespace) as known:
                if known:
                    path = [part.digest for part in prompt.parts]
                    return Encoded(keys.entry_key(namespace, path), b"", existed=True)
            async with self._loader.lookups.prompt(prompt, namespace, InPlace()) as sources:
                return await self._store(sources, namespace)

    async def primed(self, prompt: Prompt) -> Encoded:
        """Stores the last chunk as encoded after the corpus's primer, and, for first places, after the system prompt.

        If the corpus has no primer yet, it is made of the other chunks. Raises as `exact` does.
        """
        namespace, (*sample, chunk) = self._loader.namespace(prompt.tenant), prompt.chunks
        both = replace(prompt, chunks=(chunk, chunk))
        with _errors():
            primer = await self._loader.primers.of(replace(prompt, chunks=tuple(sample)))
            async with self._loader.lookups.prompt(both, namespace, Primed(), primer=primer) as sources:
                return await self._store(sources, namespace)

    async def after_neighbours(self, prompt: Prompt) -> Encoded:
        """Computes the last chunk after the isolated KV of all other chunks, and stores it as a variant.

        Raises as `exact` does.
        """
        namespace = self._loader.namespace(prompt.tenant)
        new = ChunkSource.after_neighbours(prompt, namespace)
        with _errors():
            async with self._loader.lookups.stored(new, namespace) as known:
                if known:
                    return Encoded(new.key, new.variant, existed=True)
            neighbours = replace(prompt, chunks=prompt.chunks[:-1])
            async with self._loader.lookups.isolated(neighbours, namespace) as sources:
                return await self._store([*sources, new], namespace)

    async def _store(self, sources: list[ChunkSource], namespace: bytes) -> Encoded:
        """Computes missing parts and waits until the cache service has stored all of them."""
        async with self._loader.parts(sources) as layout:
            for part in layout.parts:
                if part.source.entry is None:
                    await self._loader.put(part, namespace)
        last = sources[-1]
        key = last.key if last.entry is None else last.entry.key
        return Encoded(key, last.variant, existed=last.entry is not None)


@contextmanager
def _errors() -> Iterator[None]:
    """Raises a `CacheFault` as the error of a call."""
    try:
        yield
    except CacheFault as fault:
        raise (FailedPrecondition if isinstance(fault, NotFiniteKV) else Unavailable)(str(fault)) from fault
