"""The fusion workers behind a gateway: which one answers what."""

import asyncio
import contextlib
import functools
import hashlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.kvcache_service import keys
from fusionkv.protos.errors import FailedPrecondition, ResourceExhausted, ServiceError, Unavailable
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.tls import ClientTLS

log = logging.getLogger(__name__)
T = TypeVar("T")
# Texts of one Embed: enough for full batches, few enough that a request never waits long behind a document.
EMBED_BATCH = 32
# Of a text; a vector is of its first 512 tokens, which no usual text needs more for.
EMBED_CHARACTERS = 1 << 14
# Another worker may do what this one can't now.
_ELSEWHERE = (Unavailable, ResourceExhausted, FailedPrecondition)


class WorkerPool:
    """Calls the least loaded worker; of equally loaded ones, the one whose turn it is for the same chunks, since
    those are likely in its device pool. All workers run one model; one that runs another is passed over.
    """

    def __init__(self, addresses: Sequence[str], tls: ClientTLS | None = None) -> None:
        self._workers = [WorkerClient(address, tls) for address in addresses]
        self._in_flight = dict.fromkeys(addresses, 0)
        self._vocabulary: Vocabulary | None = None
        self._loading = asyncio.Lock()

    async def model(self, timeout: float | None = None) -> Vocabulary:
        """Tokenizer and template of what the workers run, from the first that answers.

        Raises:
            Unavailable: none can be reached.
        """
        failures: list[ServiceError] = []
        for worker in self._order(b""):
            try:
                model = await (worker.model(timeout) if timeout is not None else worker.model())
            except _ELSEWHERE as error:
                failures.append(error)
                continue
            async with self._loading:
                known = self._vocabulary
                # By identity first: a tokenizer has up to 10 MB to compare.
                if known is None or (known.model is not model and known.model != model):
                    self._vocabulary = known = await asyncio.to_thread(Vocabulary, model)
                return known
        raise _worst(failures)

    async def embed(self, texts: Sequence[str], timeout: float | None = None) -> np.ndarray:
        """Unit vectors, float32 `[text, dim]`, in batches one after the other."""
        parts = []
        for start in range(0, len(texts), EMBED_BATCH):
            batch = [text[:EMBED_CHARACTERS] for text in texts[start : start + EMBED_BATCH]]
            parts.append(await self._anywhere(functools.partial(WorkerClient.embed, texts=batch, timeout=timeout)))
        return np.concatenate(parts)

    async def encode(self, request: pb.EncodeRequest, timeout: float | None = None) -> pb.EncodeResponse:
        """Encodes one chunk on any worker."""
        return await self._anywhere(lambda worker: worker.encode(request, timeout))

    async def generate(
        self, request: pb.GenerateRequest, timeout: float | None
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """Streams one answer. A worker that fails before its first token is replaced by the next."""
        affinity = hashlib.sha256(b"".join(sorted(keys.chunk_digest(c.ids) for c in request.chunks))).digest()
        failures: list[ServiceError] = []
        for worker in self._order(affinity):
            begun = False
            try:
                with self._counted(worker):
                    async with contextlib.aclosing(worker.generate(request, timeout)) as responses:
                        async for response in responses:
                            begun = True
                            yield response
                return
            except _ELSEWHERE as error:
                if begun:
                    raise
                log.warning("trying the next worker: %s", error)
                failures.append(error)
        raise _worst(failures)

    def address(self) -> str:
        """Of a worker that answers; empty when none does."""
        return next((w.address for w in self._workers if w.connected), "")

    async def close(self) -> None:
        await asyncio.gather(*[worker.close() for worker in self._workers])

    async def _anywhere(self, call: Callable[[WorkerClient], Awaitable[T]]) -> T:
        failures: list[ServiceError] = []
        for worker in self._order(b""):
            try:
                with self._counted(worker):
                    return await call(worker)
            except _ELSEWHERE as error:
                failures.append(error)
        raise _worst(failures)

    def _order(self, affinity: bytes) -> list[WorkerClient]:
        """Least calls in flight first; ties by rendezvous hashing, so that one chunk set keeps its worker.

        Workers that can't be reached come last: a machine that is off answers nothing for up to 20 s.
        """

        def load(worker: WorkerClient) -> tuple[bool, int, bytes]:
            turn = hashlib.sha256(affinity + worker.address.encode()).digest()
            return not worker.connected, self._in_flight[worker.address], turn

        return sorted(self._workers, key=load)

    @contextlib.contextmanager
    def _counted(self, worker: WorkerClient) -> Iterator[None]:
        self._in_flight[worker.address] += 1
        try:
            yield
        finally:
            self._in_flight[worker.address] -= 1


def _worst(failures: Sequence[ServiceError]) -> ServiceError:
    """What to tell the caller: that all are busy, if one is, since waiting helps then."""
    return next((f for f in failures if isinstance(f, ResourceExhausted)), failures[0])
