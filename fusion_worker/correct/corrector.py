"""Learns a correction of reused KV for every corpus, ahead of time or from the first prompts about it."""

import asyncio
import logging
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import SafetensorError

from fusionkv.fusion_worker.compute.engine import Engine
from fusionkv.fusion_worker.compute.kv_pool import KVPool, PooledChunk, SlotRange, behind, lay_out
from fusionkv.fusion_worker.compute.scheduler import ForwardJob
from fusionkv.fusion_worker.correct.correction import MADE, Correction, Fit, shape
from fusionkv.fusion_worker.library import cache
from fusionkv.fusion_worker.load.loader import Loader
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.prompt import Chunk, Prompt
from fusionkv.fusion_worker.transfer.storage import Storage
from fusionkv.kernels.segments import KVSegment
from fusionkv.protos.runtime.cancellation import to_the_end

log = logging.getLogger(__name__)
# With SmolLM2 and 1,400 tokens a prompt, five prompts teach no more than two.
PROMPTS, TOKENS = 4, 1000
# Drawn from a corpus that is learned ahead of time, at most: short chunks take more than four prompts.
_MOST_DRAWN = 16
_MOST_WAITING = 8
# Of corrections in memory: 40 corpora with SmolLM2, three with a model of 8B. The last one stays, however large.
_MOST_BYTES = 256 << 20
_MOST_NAMES = 4096  # of corpora, most of them without a correction
# Corpora that are learned about at the same time; whoever comes in between starts again.
_MOST_LESSONS = 2

# A chunk's KV alone, its KV behind other chunks, and where it starts there.
_Pair = tuple[torch.Tensor, torch.Tensor, int]


@dataclass(slots=True)
class _Lessons:
    """What was learned about a corpus so far. seen: prompts, by their digests. lock: held by the one that learns."""

    fit: Fit
    seen: set[bytes] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Corrector:
    """One model's corrections, by tenant and corpus. Belongs to the event loop's thread."""

    def __init__(
        self, model: Model, pool: KVPool, engine: Engine, loader: Loader, idle: asyncio.Event | None = None
    ) -> None:
        """idle: set while no request runs or waits; offered prompts are learned from only then. None: always."""
        self._model = model
        self._pool = pool
        self._engine = engine
        self._loader = loader
        self._storage = Storage(pool, "plain", engine.tp)
        self._folder = cache.root() / "corrections"
        self._shape = shape(model.kv.layers, model.kv.kv_heads * model.ranks.count, model.kv.head_dim)
        # None: there is none yet, in no file either.
        self._known: OrderedDict[Path, Correction | None] = OrderedDict()
        self._lessons: OrderedDict[Path, _Lessons] = OrderedDict()
        self._waiting: asyncio.Queue[tuple[Prompt, str]] = asyncio.Queue()
        self._task = asyncio.create_task(self._loop())
        self._idle = idle

    async def find(self, tenant: str, corpus: str) -> Correction | None:
        """The correction of a corpus; None before there is one."""
        file = self._file(tenant, corpus)
        if file not in self._known:
            self._remember(file, await asyncio.to_thread(self._read, file))
        self._known.move_to_end(file)
        return self._known[file]

    def offer(self, prompt: Prompt, corpus: str) -> None:
        """A prompt to learn from, as long as the corpus has no correction and few wait."""
        known, full = self._known.get(self._file(prompt.tenant, corpus)), self._waiting.qsize() >= _MOST_WAITING
        if len(prompt.chunks) > 1 and not full and known is None:
            self._waiting.put_nowait((prompt, corpus))

    async def learn(self, prompt: Prompt, corpus: str) -> None:
        """Computes a prompt's chunks behind each other and each alone; makes the correction after the last of a few.

        Raises:
            ResourceExhausted: the prompt does not fit the pool.
        """
        file, digest = self._file(prompt.tenant, corpus), b"".join(part.digest for part in prompt.parts)
        if await self.find(prompt.tenant, corpus) is not None:
            return
        lessons = self._lessons.setdefault(file, _Lessons(Fit(self._shape)))
        self._lessons.move_to_end(file)
        while len(self._lessons) > _MOST_LESSONS:
            self._lessons.popitem(last=False)
        # The same prompt may come twice at once, and a fit is not thread-safe.
        async with lessons.lock:
            if digest in lessons.seen or await self.find(prompt.tenant, corpus) is not None:
                return
            pairs = await self._pairs(prompt)
            # All or nothing of a prompt, even if the caller leaves: chunks added before would count again.
            lessons.seen.add(digest)
            await to_the_end(asyncio.to_thread(self._add, lessons.fit, len(prompt.system), pairs))
            if len(lessons.seen) >= PROMPTS and lessons.fit.tokens >= TOKENS:
                correction = await asyncio.to_thread(lessons.fit.solve)
                log.info("learned a correction of reused KV from %d tokens of a corpus", lessons.fit.tokens)
                await asyncio.to_thread(self._keep, correction, file)
                self._remember(file, correction.on(self._model.device))
                self._lessons.pop(file, None)

    async def study(self, sample: Prompt, corpus: str, count: int) -> bool:
        """Learns from prompts of `count` random chunks each, before any question; whether there is a correction now.

        sample: its chunks come from all over the corpus; two or more that differ.

        Raises:
            ResourceExhausted: a drawn prompt does not fit the pool.
        """
        chunks = [*{chunk.digest: chunk for chunk in sample.chunks}.values()]
        # The same draws for the same corpus, so that a correction can be made again.
        chance = random.Random(corpus)
        for _ in range(_MOST_DRAWN):
            drawn = tuple(chance.sample(chunks, min(count, len(chunks))))
            await self.learn(replace(sample, chunks=drawn, question=()), corpus)
        return await self.find(sample.tenant, corpus) is not None

    async def settle(self) -> None:
        """Waits until every prompt offered so far was looked at."""
        await self._waiting.join()

    async def close(self) -> None:
        """Returns when nothing is computed any more."""
        self._task.cancel()
        await asyncio.wait([self._task])

    def _remember(self, file: Path, correction: Correction | None) -> None:
        self._known[file] = correction
        self._known.move_to_end(file)
        held = sum(known.weights.nbytes for known in self._known.values() if known is not None)
        while len(self._known) > 1 and (held > _MOST_BYTES or len(self._known) > _MOST_NAMES):
            _, gone = self._known.popitem(last=False)
            held -= gone.weights.nbytes if gone is not None else 0

    def _read(self, file: Path) -> Correction | None:
        try:
            return Correction.load(file, self._shape).on(self._model.device)
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            log.warning("the correction in %s can't be read, and is learned again: %s", file, error)
            return None

    def _file(self, tenant: str, corpus: str) -> Path:
        parts = (self._model.fingerprint, MADE, tenant.encode(), corpus.encode())
        name = blake2b(b"\0".join(parts), digest_size=16)
        return self._folder / f"{name.hexdigest()}.safetensors"

    @staticmethod
    def _keep(correction: Correction, file: Path) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            correction.save(file)
        except OSError as error:
            log.warning("a correction is not kept for the next start: %s", error)

    async def _loop(self) -> None:
        while True:
            prompt, corpus = await self._waiting.get()
            try:
                if self._idle is not None:
                    await self._idle.wait()
                if self._pool.slots_for(prompt.tokens) <= self._pool.free + self._pool.idle:
                    await self.learn(prompt, corpus)
            except Exception:
                log.exception("nothing was learned from a prompt")
            finally:
                self._waiting.task_done()

    async def _pairs(self, prompt: Prompt) -> list[_Pair]:
        """Computes the chunks behind each other, and all but the first once more behind the system prompt alone."""
        base, pairs = len(prompt.system), list[_Pair]()
        async with self._loader.plain(prompt.question_start) as placement:
            runs = placement.fresh
            await self._run(prompt.ids[: prompt.question_start].tolist(), 0, runs)
            together = await self._kv(runs, prompt.question_start)
            seen, own = lay_out(torch.arange(base, device=self._model.device), runs), behind(runs, base)
            chunks: Sequence[tuple[int, Chunk]] = [*zip(prompt.starts[1:], prompt.chunks, strict=True)]
            for start, chunk in chunks[1:]:
                await self._run(chunk.ids, base, own, seen)
                alone = await self._kv(own, len(chunk))
                pairs.append((alone, together[:, :, start : start + len(chunk)], start))
        return pairs

    def _add(self, fit: Fit, base: int, pairs: Sequence[_Pair]) -> None:
        for alone, there, start in pairs:
            fit.add(alone, base, there, start, self._model.rotations)

    async def _run(
        self, ids: Sequence[int], start: int, runs: Sequence[SlotRange], seen: tuple[KVSegment, ...] = ()
    ) -> None:
        work = ForwardJob.consecutive(ids, start, runs, seen, self._model.device, background=True)
        await self._engine.run(work)

    async def _kv(self, runs: Sequence[SlotRange], tokens: int) -> torch.Tensor:
        """KV of the first tokens in the runs, [layers, 2, tokens, kv_heads of all ranks, head_dim], on the CPU."""
        chunk = PooledChunk(b"", tokens, 0, tuple(runs), asyncio.get_running_loop().create_future())
        return self._storage.numbers(await asyncio.to_thread(self._storage.take_out, chunk), tokens)
