"""Measures cells over a block of samples, in process with the real engine, many samples at a time."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from fusionkv.fusion_worker.compute.engine import Engine
from fusionkv.fusion_worker.compute.planner import Planner
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.evaluate.contexts import Encoding, encodings, hold
from fusionkv.fusion_worker.evaluate.data.neighbours import Neighbours
from fusionkv.fusion_worker.evaluate.data.prompts import Prompter
from fusionkv.fusion_worker.evaluate.data.samples import Block, Sample, Task
from fusionkv.fusion_worker.evaluate.examiner import Answer, Asked, Examiner, together
from fusionkv.fusion_worker.evaluate.report.cells import Cell, Measured
from fusionkv.fusion_worker.evaluate.trial import Tools, Trial
from fusionkv.fusion_worker.load.loader import Loader
from fusionkv.fusion_worker.load.passages import TOKENS
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.pool.chunks import PooledChunk
from fusionkv.fusion_worker.pool.kv_pool import KVPool, pool_size
from fusionkv.fusion_worker.select.auxiliary import Auxiliary
from fusionkv.protos.contract.capabilities import check_usable
from fusionkv.protos.contract.recipes import Isolated, Primed, SimilarityGuided
from fusionkv.protos.runtime.errors import ResourceExhausted

# Maximum concurrent groups of samples: enough rows for full steps of the engine.
_MAX_GROUPS = 8
# The same if neighbours come from a whole file, so that the pool has room to keep them for the next samples: all of
# them only if it holds the file's KV.
_MAX_GROUPS_WITH_LIBRARY = 2


class Runner:
    """Measures with one model, pool and engine. Create and use it inside one event loop."""

    def __init__(self, model: Model, config: WorkerConfig, chunk_tokens: int, auxiliary: Model | None = None) -> None:
        self._model = model
        # No answers are streamed, so steps need not be shorter during decoding.
        config = replace(config, max_mixed_tokens=config.max_step_tokens)
        self._pool = KVPool.of(model.kv, pool_size(config.pool_bytes, model), config.page_tokens, model.device)
        self._engine = Engine(model, self._pool, config)
        self._loader = Loader(config, model, self._pool, self._engine, None)
        self._auxiliary = Auxiliary(config, model, auxiliary, None) if auxiliary is not None else None
        planner, examiner = Planner(model, self._engine, self._auxiliary), Examiner(model, self._pool, self._engine)
        self._tools = Tools(model, self._loader, planner, examiner)
        self._prompter = Prompter(model, chunk_tokens)
        self._neighbours = Neighbours(model.max_tokens, self._prompter)
        self._restored: dict[bytes, PooledChunk] = {}

    async def close(self) -> None:
        if self._auxiliary is not None:
            await self._auxiliary.close()
        await self._loader.close()
        self._engine.close()

    async def measure(self, block: Block, cells: Sequence[Cell]) -> list[Measured]:
        """Measures cells over a block's samples. Returns the results in the order of `cells`.

        Raises:
            ResourceExhausted: a group of samples does not fit the pool.
            FailedPrecondition: the model can't follow a recipe.
        """
        task = block.task
        asked = [self._ask(task, sample) for sample in block.samples]
        described = self._model.described(self._auxiliary is not None)
        for cell in cells:
            check_usable(cell.recipe, max(len(a.prompt.chunks) for a in asked), described)
        groups = [asked[i : i + task.group] for i in range(0, len(asked), task.group)]
        slots = asyncio.Semaphore(self._at_once(task, groups, cells))

        async def one(group: list[Asked]) -> list[list[Answer]]:
            async with slots:
                return await self._group(group, cells)

        answers = [answer for group in await asyncio.gather(*map(one, groups)) for answer in group]
        self._pool.check_integrity(idle=True)
        return [together([of_sample[i] for of_sample in answers]) for i in range(len(cells))]

    def _ask(self, task: Task, sample: Sample) -> Asked:
        expected = self._prompter.expected(sample, task.chat)
        prompt, left_out = self._prompter.prompt(sample, task.chat, max(task.max_tokens, len(expected) + 1))
        return Asked(task, sample, prompt, expected, left_out)

    def _at_once(self, task: Task, groups: Sequence[Sequence[Asked]], cells: Sequence[Cell]) -> int:
        """How many groups fit the pool, besides one request's own slots, so that no request waits forever."""
        prompts = [asked.prompt for group in groups for asked in group]
        # Each encoding, and the whole context for full attention.
        ways = 1 + len({*encodings(cells), Isolated()})
        held = ways * task.group * max(sum(map(self._pool.free.needed, map(len, p.parts))) for p in prompts)
        links = sum(map(len, self._model.links))
        spare = self._pool.free.needed(
            max(a.prompt.tokens + a.answer_tokens for group in groups for a in group) + links
        )
        spare += self._beside(task, encodings(cells))
        if held + spare > self._pool.capacity:
            raise ResourceExhausted(
                f"{task.name}: {task.group} samples need {held + spare} tokens of KV and the pool holds "
                f"{self._pool.capacity}: raise pool_bytes to {(held + spare) * self._model.kv.token_bytes}"
            )
        limit = _MAX_GROUPS if task.library is None else _MAX_GROUPS_WITH_LIBRARY
        return max(1, min(limit, (self._pool.capacity - spare) // held))

    def _beside(self, task: Task, encodes: Sequence[Encoding]) -> int:
        """Slots of the primers, and of the neighbours that a chunk is encoded after, if they are not in its group."""
        primers = 2 * self._pool.free.needed(TOKENS) if Primed() in encodes else 0
        count = max((encode.neighbours for encode in encodes if isinstance(encode, SimilarityGuided)), default=0)
        if task.library is None or not count:
            return primers
        sizes = (self._pool.free.needed(len(chunk)) for chunk in self._neighbours.among(task.library, ()).chunks)
        return primers + sum(sorted(sizes)[-count:])

    async def _group(self, group: Sequence[Asked], cells: Sequence[Cell]) -> list[list[Answer]]:
        prompts = [asked.prompt for asked in group]
        library = group[0].task.library
        ways = encodings(cells)
        about = (self._loader, self._neighbours, library, prompts, ways, self._restored)
        async with hold(*about) as contexts:
            trials = [Trial(self._tools, asked, cells, contexts) for asked in group]
            return await asyncio.gather(*(trial.answers() for trial in trials))
