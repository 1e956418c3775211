"""Learns a correction of reused KV for every corpus, ahead of time or from the first prompts about it."""

import asyncio
import bisect
import contextlib
import itertools
import logging
import os
import random
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from safetensors import SafetensorError

from fusionkv.fusion_worker.compute.engine import Engine
from fusionkv.fusion_worker.compute.kv_pool import KVPool, PooledChunk, SlotRange, behind, lay_out
from fusionkv.fusion_worker.compute.scheduler import ForwardJob
from fusionkv.fusion_worker.correct import correction as fitting
from fusionkv.fusion_worker.correct import distillation, validation
from fusionkv.fusion_worker.correct.correction import Correction, Fit, shape
from fusionkv.fusion_worker.correct.distillation import Distillation, Lesson
from fusionkv.fusion_worker.correct.validation import Validation, refused
from fusionkv.fusion_worker.library import cache
from fusionkv.fusion_worker.load.loader import Loader
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.prompt import Chunk, Prompt
from fusionkv.fusion_worker.transfer.storage import Storage
from fusionkv.kernels.segments import KVSegment
from fusionkv.protos.runtime.cancellation import to_the_end

T = TypeVar("T")
log = logging.getLogger(__name__)
# The priority of learning: beside it, a request's threads get 90% of a core.
_NICE = 10
# Of the fit, which comes first. With SmolLM2 and 1,400 tokens each, five prompts teach it no more than two.
PROMPTS, TOKENS = 4, 1000
# Of a prompt that is drawn from a corpus to learn ahead of time: a quarter to all of it, but two chunks or more. With
# half as many, and quotes as questions, prompts of 2,500 tokens recover 3 points less of the KL at a ratio of 0.15
# (MuSiQue).
_DRAWN_TOKENS = 2800
# Such prompts, at most: short chunks take more than four prompts to fit.
_MOST_DRAWN = 16 + distillation.LESSONS
# How a correction is made, in its file's name: one made otherwise is not read, but learned again.
MADE = repr((PROMPTS, TOKENS, _DRAWN_TOKENS)).encode() + fitting.MADE + distillation.MADE + validation.MADE
_MOST_WAITING = 8
# Prompts until a verdict, if each of the first ones is long enough.
_ALL_PROMPTS = PROMPTS + distillation.LESSONS + validation.PROMPTS
# Of a corpus of so many chunks, every fourth is kept back for the validation; of a smaller one, only the prompts are.
_LARGE = 16
# Of corrections in memory: 40 corpora with SmolLM2, three with a model of 8B. The last one stays, however large.
_MOST_BYTES = 256 << 20
_MOST_NAMES = 4096  # of corpora, some of them with a file that can't be read
# Corpora that are learned about at the same time. A new one waits until one of these is done, or until nothing was
# learned about it for so many seconds: what followed its fit is then lost.
_MOST_LESSONS, _PATIENCE_SECONDS = 2, 600.0
# Tenants that wait for their turn to learn, and prompts that wait of all of them together.
_MOST_TENANTS, _MOST_WAITING_IN_ALL = 64, 64


@dataclass(slots=True)
class _Lessons:
    """What was learned about a corpus so far.

    Attributes:
        tenant: whose corpus it is.
        fit: None once there is a correction.
        training: of the correction, until it has ended.
        validation: of what was learned, once that is all.
        seen: prompts, by their digests.
        learned_at: when the last of them was learned from, by the monotonic clock.
        lock: held by the one that learns.
    """

    tenant: str
    fit: Fit | None
    training: Distillation | None
    validation: Validation | None = None
    seen: set[bytes] = field(default_factory=set)
    learned_at: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class _Known(NamedTuple):
    """A corpus's correction, if there is one. stamp: tells versions of its file apart; None without a file."""

    correction: Correction | None = None
    stamp: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        return self.correction.weights.nbytes if self.correction is not None else 0


_NOTHING = _Known()


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
        self._known: OrderedDict[Path, _Known] = OrderedDict()
        self._lessons: OrderedDict[Path, _Lessons] = OrderedDict()
        self._studies = asyncio.Lock()
        self._waiting: asyncio.Queue[tuple[Prompt, str]] = asyncio.Queue()
        self._queued = Counter[str]()  # by tenant
        self._turned_away: OrderedDict[str, float] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "fusionkv-learn", _step_back)
        self._task = asyncio.create_task(self._loop())
        self._idle = idle

    async def find(self, tenant: str, corpus: str) -> Correction | None:
        """The validated correction of a corpus; None before there is one, and if it was refused."""
        known = await self.candidate(tenant, corpus)
        return known if known is not None and known.validated else None

    async def candidate(self, tenant: str, corpus: str) -> Correction | None:
        """What was learned about a corpus, whether or not it was validated; None before that."""
        return await self._find(self._file(tenant, corpus))

    async def learned(self, tenant: str, corpus: str) -> bool:
        """Whether there is no more to learn: there is a validated correction, or it was refused."""
        return self._is_final(await self.candidate(tenant, corpus))

    async def state(self, tenant: str, corpus: str) -> str:
        """What was learned about a corpus, as a sentence without its subject."""
        known = await self.candidate(tenant, corpus)
        return self._said(self._file(tenant, corpus), *((known.validated, known.why) if known else (None, "")))

    async def states(self, tenant: str, corpora: Sequence[str]) -> list[str]:
        """As `state`, of many corpora, whose corrections are not loaded."""
        files = [self._file(tenant, corpus) for corpus in corpora]
        held = {file: known.correction for file in files if (known := self._known.get(file)) and known.correction}
        final = {file: (each.validated, each.why) for file, each in held.items() if each.validated is not None}
        found = await asyncio.to_thread(lambda: [final.get(file) or _verdict(file) for file in files])
        return [self._said(file, *each) for file, each in zip(files, found, strict=True)]

    def _said(self, file: Path, validated: bool | None, why: str) -> str:
        if validated is not None:
            return f"{'validated' if validated else 'refused'}: {why}"
        if not self._learns:
            return "not learned: a worker with tensor parallelism does not learn"
        lessons = self._lessons.get(file)
        seen = 0 if lessons is None else len(lessons.seen)
        return f"not validated yet: {seen} of about {_ALL_PROMPTS} prompts were learned from"

    def offer(self, prompt: Prompt, corpus: str) -> None:
        """A prompt to learn from, as long as there is more to learn about the corpus and few wait."""
        if not self._learns:
            return
        file, mine = self._file(prompt.tenant, corpus), self._queued[prompt.tenant]
        full = mine >= _MOST_WAITING or self._waiting.qsize() >= _MOST_WAITING_IN_ALL
        final = self._is_final(self._known.get(file, _NOTHING).correction)
        if len(prompt.chunks) > 1 and not full and not final and self._has_room(file, prompt.tenant):
            # As long as a drawn prompt: the KV of all prompts of a training is kept until its end.
            chunks = _first(prompt.chunks, _DRAWN_TOKENS - len(prompt.system))
            self._queued[prompt.tenant] += 1
            self._waiting.put_nowait((replace(prompt, chunks=chunks, question=()), corpus))

    async def learn(self, prompt: Prompt, corpus: str, idle: asyncio.Event | None = None) -> None:
        """Computes a prompt's chunks behind each other and each alone, and learns from the difference.

        The first few prompts give a correction by least squares; it is trained on those that follow, and validated on
        those after them.

        Args:
            idle: waited for before every step of the training.

        Raises:
            ResourceExhausted: the prompt does not fit the pool.
        """
        file = self._file(prompt.tenant, corpus)
        known = await self._find(file)
        if self._is_final(known):
            self._lessons.pop(file, None)
            return
        lessons = await self._begun(file, known, prompt.tenant)
        # The same prompt may come twice at once, and a fit is not thread-safe.
        async with lessons.lock:
            enough = lessons.training is not None and lessons.training.ready
            if _digest(prompt) not in lessons.seen and not enough and self._lessons.get(file) is lessons:
                lesson = await self._lesson(prompt)
                if not all(torch.stack(kv.aminmax()).isfinite().all() for kv in (lesson.together, *lesson.alone)):
                    log.warning("nothing is learned from a prompt whose KV is not finite")
                    return
                # All or nothing of a prompt, even if the caller leaves: chunks added before would count again.
                lessons.seen.add(_digest(prompt))
                lessons.learned_at = time.monotonic()
                if lessons.fit is not None:
                    await self._fit(lessons, lessons.fit, lesson, file)
                elif lessons.training is not None:
                    await self._teach(lessons, partial(lessons.training.add, lesson))
                elif lessons.validation is not None:
                    await self._validate(lessons.validation, lesson, file)
        await self._train(lessons, file, idle)

    async def study(self, sample: Prompt, corpus: str, train: bool = True, validate: bool = True) -> bool:
        """Learns from prompts of random chunks, before any question; whether there is a correction now.

        One corpus at a time.

        Args:
            sample: its chunks come from all over the corpus; three or more that differ.
            train: whether to go on after the fit.
            validate: whether to go on after the training; without, what was learned is used by nobody.

        Raises:
            ResourceExhausted: a drawn prompt does not fit the pool.
        """
        if not self._learns:
            return await self.find(sample.tenant, corpus) is not None
        file = self._file(sample.tenant, corpus)
        chunks = [*{chunk.digest: chunk for chunk in sample.chunks}.values()]
        back = chunks[::4] if len(chunks) >= _LARGE else chunks
        # The same draws for the same corpus, so that a correction can be made again.
        chance = random.Random(corpus)
        kept = dict[bytes, Prompt]()
        for each in self._draws(sample, back, 4 * validation.PROMPTS, chance):
            if len(kept) < validation.PROMPTS:
                kept.setdefault(_digest(each), each)
        if back is not chunks:
            chunks = [chunk for chunk in chunks if chunk not in back]
        async with self._studies:
            for drawn in self._draws(sample, chunks, _MOST_DRAWN, chance):
                known, lessons = await self._find(file), self._lessons.get(file)
                ended = self._is_final(known) or (known is not None and (known.trained or not train))
                if ended or (lessons is not None and lessons.validation is not None):
                    break
                if _digest(drawn) not in kept:
                    await self.learn(drawn, corpus)
            lessons = self._lessons.get(file)
            if train and lessons is not None and lessons.training is not None:
                # There are fewer different prompts than a training takes.
                await self._trained(lessons, file)
            if train and validate:
                for each in kept.values():
                    await self.learn(each, corpus)
            return await self.candidate(sample.tenant, corpus) is not None

    def _draws(self, sample: Prompt, chunks: Sequence[Chunk], count: int, chance: random.Random) -> Iterator[Prompt]:
        """Prompts of random chunks."""
        system = len(sample.system)
        most = max(1, min(_DRAWN_TOKENS, self._model.max_tokens - system, self._pool.capacity - system))
        for _ in range(count):
            mixed = chance.sample(chunks, len(chunks))
            drawn = _first(mixed, chance.randint(most // 4, most))
            yield replace(sample, chunks=drawn, question=())

    async def settle(self) -> None:
        """Waits until every prompt offered so far was looked at."""
        await self._waiting.join()

    async def close(self) -> None:
        """Returns when nothing is computed any more."""
        self._task.cancel()
        await asyncio.wait([self._task])
        await asyncio.to_thread(self._thread.shutdown)

    async def _find(self, file: Path) -> Correction | None:
        known = before = self._known.get(file, _NOTHING)
        if before.correction is None or before.correction.validated is None:
            # Another process may have learned more.
            found = await asyncio.to_thread(self._read, file, before)
            known = self._known.get(file, before)
            if known is before and found is not before:  # nothing was learned here meanwhile
                self._remember(file, known := found)
        if file in self._known:
            self._known.move_to_end(file)
        return known.correction

    @property
    def _learns(self) -> bool:
        """Under tensor parallelism no rank can train or validate: it has only its heads."""
        return self._model.ranks.count == 1

    def _is_final(self, known: Correction | None) -> bool:
        """Whether there is no more to learn."""
        return (known is not None and known.validated is not None) or not self._learns

    async def _begun(self, file: Path, known: Correction | None, tenant: str) -> _Lessons:
        """The lessons about a corpus, which begin after what is known."""
        if file not in self._lessons:
            training = None if known is None or known.trained else await self._training(known)
            begun = _Lessons(tenant, Fit(self._shape) if known is None else None, training)
            if known is not None and known.trained:
                begun.validation = Validation(self._model, known, None)
            self._lessons.setdefault(file, begun)
        self._lessons.move_to_end(file)
        while len(self._lessons) > _MOST_LESSONS:
            held = Counter(each.tenant for each in self._lessons.values())
            # The oldest ones of the tenant that has the most.
            del self._lessons[
                max((f for f in self._lessons if f != file), key=lambda f: held[self._lessons[f].tenant])
            ]
        return self._lessons[file]

    def _has_room(self, file: Path, tenant: str) -> bool:
        """Whether to learn from a prompt about this corpus, in turn with other tenants.

        It may end lessons about which nothing was learned for long, or some of a tenant that has several, for one
        that has none.
        """
        if file in self._lessons:
            return True
        now, waiting = time.monotonic(), self._turned_away
        for each in [t for t, asked in waiting.items() if now - asked > _PATIENCE_SECONDS]:
            del waiting[each]
        held = Counter(each.tenant for each in self._lessons.values())
        room = max(0, _MOST_LESSONS - len(self._lessons))
        if not room:
            oldest = next(iter(self._lessons.values()))
            room = now - oldest.learned_at > _PATIENCE_SECONDS or (not held[tenant] and max(held.values()) > 1)
        if [*waiting, tenant].index(tenant) < room:
            waiting.pop(tenant, None)
            return True
        if tenant in waiting or len(waiting) < _MOST_TENANTS:
            waiting[tenant] = now
        return False

    async def _in_thread(self, compute: Callable[[], T]) -> T:
        """Computes in a thread of low priority, to the end even if the caller leaves."""
        return await to_the_end(asyncio.wrap_future(self._thread.submit(compute)))

    async def _fit(self, lessons: _Lessons, fit: Fit, lesson: Lesson, file: Path) -> None:
        """Adds a lesson to the fit, and makes a correction of it after the last of a few."""
        await self._in_thread(partial(self._add, fit, lesson))
        correction = await self._find(file)  # another process may have been faster
        if correction is None:
            if len(lessons.seen) < PROMPTS or fit.tokens < TOKENS:
                return
            correction = await self._in_thread(fit.solve)
            log.info("learned a correction of reused KV from %d tokens of a corpus", fit.tokens)
            await self._found(correction, file)
        if self._is_final(correction):
            self._lessons.pop(file, None)
        elif correction.trained:
            lessons.validation, lessons.fit = Validation(self._model, correction, None), None
        else:
            lessons.training = await self._training(correction)
            lessons.fit = None

    async def _training(self, correction: Correction) -> Distillation:
        """In a thread: torch takes a second for the first optimizer."""
        return await self._in_thread(partial(Distillation, self._model, correction))

    async def _train(self, lessons: _Lessons, file: Path, idle: asyncio.Event | None) -> None:
        """Trains a correction if there are enough lessons, a step at a time, so that others can go on with it."""
        while (training := lessons.training) is not None and training.ready and self._lessons.get(file) is lessons:
            if idle is not None:
                await idle.wait()
            async with lessons.lock:
                if self._lessons.get(file) is lessons and lessons.training is training:
                    if not training.finished:
                        await self._teach(lessons, training.step)
                    if training.finished:
                        await self._trained(lessons, file)

    async def _teach(self, lessons: _Lessons, part: Callable[[], object]) -> None:
        """Computes a part of a training, and ends the training if the GPU's memory is full."""
        try:
            await self._in_thread(part)
        except torch.OutOfMemoryError:
            log.warning("the training of a correction of reused KV ended early: the GPU's memory is full")
            assert lessons.training is not None
            lessons.training.end()

    async def _trained(self, lessons: _Lessons, file: Path) -> None:
        """Keeps a trained correction, which is to be validated."""
        training = lessons.training
        assert training is not None
        known = await self._find(file)
        if self._is_final(known):  # by another process
            self._lessons.pop(file, None)
            return
        log.info("trained a correction of reused KV on %d prompts", training.prompts)
        correction = replace(training.correction, trained=True)
        await self._found(correction, file)
        lessons.validation, lessons.training = Validation(self._model, correction, training.fit), None

    async def _validate(self, trials: Validation, lesson: Lesson, file: Path) -> None:
        """Adds a lesson to a validation, and takes its verdict after the last one."""
        try:
            await self._in_thread(partial(trials.add, lesson))
        except torch.OutOfMemoryError:
            await self._finish(refused("the GPU's memory is full, so it could not be validated"), file)
        else:
            if trials.ready:
                await self._finish(trials.verdict(), file)

    async def _finish(self, correction: Correction, file: Path) -> None:
        if not self._is_final(await self._find(file)):  # by another process
            if correction.validated:
                log.info("a correction of reused KV is validated: %s", correction.why)
            else:
                log.warning("a correction of reused KV is refused: %s", correction.why)
            await self._found(correction, file)
        self._lessons.pop(file, None)

    async def _found(self, correction: Correction, file: Path) -> None:
        self._remember(file, _Known(await asyncio.to_thread(self._keep, correction, file)))

    def _remember(self, file: Path, known: _Known) -> None:
        self._known[file] = known
        self._known.move_to_end(file)
        held = sum(each.size for each in self._known.values())
        while len(self._known) > 1 and (held > _MOST_BYTES or len(self._known) > _MOST_NAMES):
            held -= self._known.popitem(last=False)[1].size

    def _read(self, file: Path, before: _Known) -> _Known:
        """What the file holds now; `before` if it is unchanged, gone, or out of reach."""
        try:
            about = file.stat()
        except OSError:
            return before
        stamp = (about.st_ino, about.st_size, about.st_mtime_ns)
        if stamp == before.stamp:
            return before
        try:
            return _Known(self._ready(Correction.load(file, self._shape)), stamp)
        except (OSError, SafetensorError, ValueError) as error:
            log.warning("the correction in %s can't be read, and is learned again: %s", file, error)
            return before._replace(stamp=stamp)

    def _ready(self, correction: Correction) -> Correction:
        """On the model's device, and with its name made: it copies and digests all weights, so use a thread."""
        placed = correction.on(self._model.device)
        _ = placed.name
        return placed

    def _file(self, tenant: str, corpus: str) -> Path:
        parts = (self._model.fingerprint, MADE, tenant.encode(), corpus.encode())
        name = blake2b(b"\0".join(parts), digest_size=16)
        return self._folder / f"{name.hexdigest()}.safetensors"

    def _keep(self, correction: Correction, file: Path) -> Correction:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            correction.save(file)
        except (OSError, SafetensorError) as error:
            log.warning("a correction is not kept for the next start: %s", error)
        return self._ready(correction)

    async def _loop(self) -> None:
        while True:
            prompt, corpus = await self._waiting.get()
            try:
                if self._idle is not None:
                    await self._idle.wait()
                if self._pool.slots_for(prompt.tokens) <= self._pool.free + self._pool.idle:
                    await self.learn(prompt, corpus, self._idle)
            except Exception:
                log.exception("nothing was learned from a prompt")
            finally:
                self._queued -= Counter([prompt.tenant])
                self._waiting.task_done()

    async def _lesson(self, prompt: Prompt) -> Lesson:
        """Computes the chunks behind each other, and all but the first once more behind the system prompt alone."""
        base, alone = len(prompt.system), list[torch.Tensor]()
        async with self._loader.plain(prompt.question_start) as placement:
            runs = placement.fresh
            await self._run(prompt.ids[: prompt.question_start].tolist(), 0, runs)
            together = await self._kv(runs, prompt.question_start)
            seen, own = lay_out(torch.arange(base, device=self._model.device), runs), behind(runs, base)
            for chunk in prompt.chunks[1:]:
                await self._run(chunk.ids, base, own, seen)
                alone.append(await self._kv(own, len(chunk)))
        return Lesson(prompt, together, alone, prompt.starts[2:])

    def _add(self, fit: Fit, lesson: Lesson) -> None:
        for alone, start in zip(lesson.alone, lesson.starts, strict=True):
            there = lesson.together[:, :, start : start + alone.shape[2]]
            fit.add(alone, lesson.base, there, start, self._model.rotations)

    async def _run(
        self, ids: Sequence[int], start: int, runs: Sequence[SlotRange], seen: tuple[KVSegment, ...] = ()
    ) -> None:
        work = ForwardJob.consecutive(ids, start, runs, seen, self._model.device, background=True)
        await self._engine.run(work)

    async def _kv(self, runs: Sequence[SlotRange], tokens: int) -> torch.Tensor:
        """KV of the first tokens in the runs, [layers, 2, tokens, kv_heads of all ranks, head_dim], on the CPU."""
        chunk = PooledChunk(b"", tokens, 0, tuple(runs), asyncio.get_running_loop().create_future())
        return self._storage.numbers(await asyncio.to_thread(self._storage.take_out, chunk), tokens)


def _verdict(file: Path) -> tuple[bool | None, str]:
    try:
        return fitting.verdict(file)
    except (OSError, SafetensorError):
        return None, ""


def _digest(prompt: Prompt) -> bytes:
    return b"".join(part.digest for part in prompt.parts)


def _first(chunks: Sequence[Chunk], tokens: int) -> tuple[Chunk, ...]:
    """As many of the chunks as have at most `tokens` tokens, and at least two."""
    ends = list(itertools.accumulate(map(len, chunks)))
    return tuple(chunks[: max(2, bisect.bisect(ends, tokens))])


def _step_back() -> None:
    """Lowers the priority of this thread, and of those that torch starts from it."""
    with contextlib.suppress(OSError):  # the container may not allow it
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICE)
