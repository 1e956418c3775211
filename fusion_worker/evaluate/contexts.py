"""Contexts in the pool: each chunk once per encoding, shared by all recipes and ratios."""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from fusionkv.fusion_worker.evaluate.data.neighbours import Neighbours
from fusionkv.fusion_worker.evaluate.data.samples import Library
from fusionkv.fusion_worker.evaluate.report.cells import Cell
from fusionkv.fusion_worker.load.loader import Loader
from fusionkv.fusion_worker.load.lookup import RESTORED
from fusionkv.fusion_worker.load.primer import choose
from fusionkv.fusion_worker.pool.chunks import PooledChunk
from fusionkv.fusion_worker.prompt import Chunk, ChunkSource, LoadedChunk, Primer, Prompt, PromptLayout
from fusionkv.protos.contract.recipes import Isolated, Primed, Recipe, SimilarityGuided

# Passages of a library that its primer is made of.
_SAMPLE = 8
# Encodings that an evaluation compares: those of `recipes.Encode` that do not depend on earlier chunks.
Encoding = Isolated | Primed | SimilarityGuided


@dataclass(frozen=True, slots=True)
class Contexts:
    """The chunks of a few prompts, encoded and held in the pool.

    parts: by prompt and encoding; None: all its chunks encoded as a single one, as by full attention.
    """

    loader: Loader
    parts: Mapping[tuple[Prompt, Encoding | None], tuple[LoadedChunk, ...]]

    @asynccontextmanager
    async def placed(self, prompt: Prompt, encode: Encoding | None, fresh: int) -> AsyncIterator[PromptLayout]:
        """A prompt's parts with an encoding, and `fresh` new slots."""
        async with self.loader.plain(fresh) as room:
            # The parts are shared, so a request can't release them.
            yield PromptLayout(self.parts[prompt, encode], room.fresh, lambda: None)


@asynccontextmanager
async def hold(
    loader: Loader,
    neighbours: Neighbours,
    library: Library | None,
    prompts: Sequence[Prompt],
    encodes: Sequence[Encoding],
    restored: dict[bytes, PooledChunk],
) -> AsyncIterator[Contexts]:
    """Encodes the prompts' chunks with every encoding and as a whole, and holds them in the pool.

    library: passages among which neighbours are found, and of which the primer is made; None finds neighbours among
    the prompts' chunks, and uses the primer of short corpora. Neighbours are pinned while a chunk is encoded, and
    stay in the pool while there is room. restored: quantised chunks of earlier calls, by key. Raises
    ResourceExhausted if the chunks don't fit.
    """
    parts: dict[tuple[Prompt, Encoding | None], tuple[LoadedChunk, ...]] = {}
    async with AsyncExitStack() as stack:

        async def bring(sources: Sequence[ChunkSource]) -> tuple[LoadedChunk, ...]:
            filled = [source for source in sources if len(source.chunk)]
            layout = await stack.enter_async_context(loader.parts(filled))
            _restore(loader, layout.parts, restored)
            return layout.parts

        for prompt in prompts:
            one, namespace = whole(prompt), loader.namespace(prompt.tenant)
            sources = [ChunkSource.isolated(one, i, namespace) for i in range(len(one.parts))]
            parts[prompt, None] = await bring(sources)
            parts[prompt, Isolated()] = await bring(_wanted(loader, prompt, {}))
        if Primed() in encodes:
            # Of the last passages, so that few samples hold one of them.
            sample = () if library is None else neighbours.among(library, ()).chunks[-_SAMPLE:]
            primer = choose(sample, loader.fallback) or Primer(loader.fallback, (), loader.fallback)
            for prompt in prompts:
                parts[prompt, Primed()] = await bring(_primed(loader, prompt, primer))
        for encode in (encode for encode in encodes if isinstance(encode, SimilarityGuided)):
            # All but the first chunk, which is an exact hit.
            similarity = neighbours.among(library, prompts)
            for prompt in prompts:
                variants = {}
                for chunk in prompt.chunks[1:]:
                    near = neighbours.before(prompt.system, chunk, similarity.nearest(chunk, encode.neighbours))
                    *before, variant = _after(loader, replace(prompt, chunks=(*near, chunk)))
                    variants[chunk.digest] = variant
                    async with neighbours.turn, loader.parts([*before, variant]):
                        await bring([variant])
                parts[prompt, encode] = await bring(_wanted(loader, prompt, variants))
        yield Contexts(loader, parts)


def encoding(recipe: Recipe) -> Encoding:
    """The encoding of a recipe's chunks; not for recipes that are full attention."""
    assert isinstance(recipe.encode, Encoding)
    return recipe.encode


def encodings(cells: Iterable[Cell]) -> list[Encoding]:
    """The distinct encodings of cells."""
    return list(dict.fromkeys(encoding(cell.recipe) for cell in cells if not cell.recipe.lossless))


def whole(prompt: Prompt) -> Prompt:
    """The prompt with its chunks joined to one."""
    ids = tuple(token for chunk in prompt.chunks for token in chunk.ids)
    return replace(prompt, chunks=(Chunk(ids),) if ids else ())


def encoded_tokens(prompt: Prompt, encode: Encoding) -> int:
    """Tokens that are computed ahead of time to encode a prompt's chunks."""
    # Twice for each chunk of a corpus: alone, for other chunks' neighbours or first places, and after the others.
    return prompt.context_tokens * (2 if isinstance(encode, SimilarityGuided | Primed) else 1)


def _wanted(loader: Loader, prompt: Prompt, variants: Mapping[bytes, ChunkSource]) -> list[ChunkSource]:
    """The sources of a prompt's parts. variants: chunks not encoded alone, by digest."""
    namespace = loader.namespace(prompt.tenant)
    sources = [ChunkSource.isolated(prompt, 0, namespace)]
    for i, chunk in enumerate(prompt.chunks, 1):
        alone = ChunkSource.isolated(prompt, i, namespace)
        # A chunk right after the system prompt is an exact hit, which wins over variants.
        variant = None if alone.lossless else variants.get(chunk.digest)
        sources.append(_stored(loader, alone) if variant is None else replace(variant, position=alone.position))
    return sources


def _stored(loader: Loader, source: ChunkSource) -> ChunkSource:
    """A source of KV as the storage format gives it back."""
    return source if loader.storage.lossless else replace(source, key=source.key + RESTORED, lossless=False)


def _primed(loader: Loader, prompt: Prompt, primer: Primer) -> list[ChunkSource]:
    """The sources of a prompt's parts, all chunks but the first encoded after the primer; and the primer's."""
    namespace = loader.namespace(prompt.tenant)
    first, parts, primers = _wanted(loader, prompt, {})[:2], list[ChunkSource](), dict[bytes, ChunkSource]()
    for i, part in enumerate(prompt.parts[2:], 2):
        before = ChunkSource.of_primer(prompt.system, primer.before(part), namespace)
        primers[before.key] = before
        parts.append(_stored(loader, ChunkSource.primed(prompt, i, namespace, before)))
    return [*first[:1], *primers.values(), *first[1:], *parts]


def _restore(loader: Loader, placed: Sequence[LoadedChunk], done: dict[bytes, PooledChunk]) -> None:
    """Quantises new chunks as if they had been stored and fetched, and adds them to `done`."""
    for key, pooled in {p.source.key: p.pooled for p in placed if p.source.key.endswith(RESTORED)}.items():
        # One that left the pool is computed again, as another chunk.
        if done.get(key) is not pooled:
            runs, tokens = pooled.runs, pooled.tokens
            loader.storage.rank.write(runs, tokens, loader.storage.rank.read(runs, tokens))
            done[key] = pooled


def _after(loader: Loader, prompt: Prompt) -> list[ChunkSource]:
    """The sources of a prompt whose last chunk is encoded after the others, its neighbours, which are alone."""
    namespace = loader.namespace(prompt.tenant)
    alone = [ChunkSource.isolated(prompt, i, namespace) for i in range(len(prompt.chunks))]
    last = _stored(loader, ChunkSource.after_neighbours(prompt, namespace))
    return [*(source for source in alone if len(source.chunk)), last]
