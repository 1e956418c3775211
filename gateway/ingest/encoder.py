"""One of any number of processes that encode corpora ahead of time, document by document, out of a shared queue."""

import asyncio
import contextlib
import functools
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from opentelemetry import metrics

from fusionkv.gateway.cli.console import awaited, patiently
from fusionkv.gateway.client.client import AsyncClient
from fusionkv.gateway.client.results import Progress
from fusionkv.gateway.ingest.work_queue import END, MOST_ITEMS, Item, Standing, WorkQueue
from fusionkv.protos.runtime.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    ServiceError,
    Unauthenticated,
    Unavailable,
)

log = logging.getLogger(__name__)
T = TypeVar("T")
_meter = metrics.get_meter(__name__)
_documents = _meter.create_counter("fusionkv.encoder.documents", description="documents ended here, by outcome")
_chunks = _meter.create_counter("fusionkv.encoder.chunks", description="chunks of those, by whether they were stored")
_taken_over = _meter.create_counter("fusionkv.encoder.taken_over", description="documents whose encoder fell silent")
# Documents that are added to the queue at once, when it has room for so many.
_PAGE = 500
# Seconds that the queue is waited at for something to do; and between two tries of what can't be done now, twice as
# long each time.
_WAIT, _LEAST_PAUSE, _MOST_PAUSE = 1.0, 0.5, 60.0
# Whoever meets these meets them with every document.
_HOPELESS = (Unauthenticated, PermissionDenied, FailedPrecondition)
# It may be whoever should answer, and not the document.
_ELSEWHERE = (Unavailable, ResourceExhausted, DeadlineExceeded)


def check_there(corpus: str, chunks: int, end: float) -> None:
    """A corpus is made before its first document is stored: raises NotFound if it has no chunks and time.monotonic()
    is not `end` yet; later it is taken for an empty one.
    """
    if not chunks and time.monotonic() < end:
        raise NotFound(f"corpus {corpus!r} has no document yet")


class Encoder:
    """Takes part in one run over some corpora. All who take part feed the queue, whoever finds it empty first."""

    def __init__(
        self,
        client: AsyncClient,
        queue: WorkQueue,
        corpora: Sequence[str],
        recipe: str,
        *,
        attempts: int,
        concurrency: int,
        patience: float,
        wait: float,
    ) -> None:
        """attempts: deliveries of a document that fails, until it is set aside. concurrency: documents at once.
        patience: seconds of silence of the gateway, or without anything done by anybody, until this process gives up.
        wait: seconds for gateway, workers and corpora to be there at all.
        """
        self._client = client
        self._queue = queue
        self._corpora = list(corpora)
        self._recipe = recipe
        self._attempts = attempts
        self._concurrency = concurrency
        self._patience = patience
        self._wait = wait
        self._feeding = asyncio.Lock()
        self._done, self._moved = -1, time.monotonic()
        self._failures = 0
        self.standing, self.chunks = Standing(), 0

    async def run(self) -> None:
        """Returns when the run is over.

        Raises:
            ServiceError: nothing can be done, for `patience` seconds or at all; what was in work is given back.
        """
        work = json.dumps({"corpora": self._corpora, "recipe": self._recipe})
        end = time.monotonic() + self._wait
        looks = [functools.partial(self._look_at, name, end) for name in self._corpora]
        self.chunks = sum([await awaited(functools.partial(patiently, look, self._patience), end) for look in looks])
        self._moved = time.monotonic()
        await self._insist(lambda: self._queue.join(work))
        slots = [asyncio.create_task(self._work_through(work)) for _ in range(self._concurrency)]
        try:
            await asyncio.gather(*slots)
        finally:
            for slot in slots:
                slot.cancel()
            await asyncio.gather(*slots, return_exceptions=True)
            # So that others need not wait until this process counts as silent.
            with contextlib.suppress(Unavailable):
                await self._queue.release()

    async def _work_through(self, work: str) -> None:
        while True:
            try:
                standing = await self._look()
                if standing.over:
                    return
                await self._feed(standing)
                item = await self._queue.take(_WAIT)
            except _ELSEWHERE as error:
                await self._pause(error)
                # It may have lost everything.
                await self._insist(lambda: self._queue.join(work))
                continue
            if item is not None:
                await self._handle(item)

    async def _look_at(self, corpus: str, end: float) -> int:
        """Its chunks. What is wrong with corpus or recipe, and not with a document, shows here."""
        async with contextlib.aclosing(self._client.precompute(corpus, self._recipe)) as events:
            chunks = (await anext(events)).total
        check_there(corpus, chunks, end)
        return chunks

    async def _look(self) -> Standing:
        self.standing = standing = await self._queue.standing()
        if standing.done + standing.aside != self._done:
            self._done, self._moved = standing.done + standing.aside, time.monotonic()
        return standing

    async def _feed(self, standing: Standing) -> None:
        """Adds the next documents while there is room for them."""
        if standing.cursor == END or standing.left > MOST_ITEMS - _PAGE or self._feeding.locked():
            return
        async with self._feeding:
            number, _, token = (standing.cursor or "0 ").partition(" ")
            try:
                corpus = self._corpora[int(number)]
                items, token = await self._client.page(corpus, token, _PAGE)
            except (ValueError, IndexError, InvalidArgument) as error:
                await self._queue.forget(f"its place is {standing.cursor!r}: {error}")
            cursor = f"{number} {token}"
            if not token:
                cursor = f"{int(number) + 1} " if int(number) + 1 < len(self._corpora) else END
            await self._queue.feed(standing.cursor, cursor, [(corpus, item.name) for item in items])

    async def _handle(self, item: Item) -> None:
        name = f"{item.corpus}/{item.document}"
        if item.deliveries > 1 and not item.reason:
            _taken_over.add(1)
            log.info("%s: taken over from an encoder that fell silent", name)
        if item.deliveries > self._attempts:
            reason = item.reason or f"{self._attempts} encoders ended over it"
            if await self._insist(lambda: self._queue.set_aside(item, reason)):
                _documents.add(1, {"fusionkv.outcome": "set_aside"})
                log.warning("%s is set aside: %s", name, reason)
            return
        try:
            async with self._kept(item):
                done = await self._encode(item)
        except NotFound:
            done = Progress(0, 0, 0)  # deleted meanwhile
        except ServiceError as error:
            await self._failed(item, error)
            return
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            return  # it is somebody else's now
        if await self._insist(lambda: self._queue.finish(item, done.done - done.skipped, done.skipped)):
            self._failures, self._moved = 0, time.monotonic()
            _documents.add(1, {"fusionkv.outcome": "done"})
            _chunks.add(done.done - done.skipped, {"fusionkv.outcome": "encoded"})
            _chunks.add(done.skipped, {"fusionkv.outcome": "skipped"})

    async def _encode(self, item: Item) -> Progress:
        """Raises DeadlineExceeded when nothing comes of it for `patience` seconds."""
        done = Progress(0, 0, 0)
        events = self._client.precompute(item.corpus, self._recipe, name=item.document)
        async with contextlib.aclosing(events):
            while True:
                try:
                    async with asyncio.timeout(self._patience):
                        done = await anext(events)
                except StopAsyncIteration:
                    return done
                except TimeoutError as error:
                    raise DeadlineExceeded(f"no progress for {self._patience:g} s") from error

    async def _failed(self, item: Item, error: ServiceError) -> None:
        """Gives the document back, and ends or pauses if it may be no fault of the document."""
        reason = f"{error.status.name}: {error}"
        elsewhere = isinstance(error, _ELSEWHERE)
        await self._insist(lambda: self._queue.give_back(item, reason, elsewhere=elsewhere))
        _documents.add(1, {"fusionkv.outcome": "failed"})
        log.warning("%s/%s failed: %s", item.corpus, item.document, reason)
        if isinstance(error, _HOPELESS):
            raise error
        if elsewhere:
            await self._pause(error)

    @contextlib.asynccontextmanager
    async def _kept(self, item: Item) -> AsyncIterator[None]:
        """The item is ours inside; once it is somebody else's, what runs inside is cancelled."""
        task = asyncio.current_task()
        assert task is not None
        lost, inside = False, True

        async def keep() -> None:
            nonlocal lost
            kept = True
            while kept and inside:
                await asyncio.sleep(self._queue.min_idle / 4)
                with contextlib.suppress(Unavailable):  # it is done again by somebody else then, which does no harm
                    kept = await self._queue.keep(item)
            if inside:
                lost = True
                task.cancel()

        keeping = asyncio.create_task(keep())
        try:
            yield
        finally:
            inside = False
            keeping.cancel()
            if lost:
                task.uncancel()

    async def _insist(self, call: Callable[[], Awaitable[T]]) -> T:
        """The result of a call of the queue, as soon as Redis answers."""
        while True:
            try:
                return await call()
            except Unavailable as error:
                await self._pause(error)
                # What stands in the way may be what is not the run's, which shows here.
                with contextlib.suppress(Unavailable):
                    await self._look()

    async def _pause(self, error: ServiceError) -> None:
        """Waits before the next try. Raises the error when nobody got anything done for too long."""
        if time.monotonic() - self._moved > self._patience:
            raise error
        pause = min(_LEAST_PAUSE * 2**self._failures, _MOST_PAUSE)
        self._failures += 1
        await asyncio.sleep(max(pause, error.retry_after or 0.0))
