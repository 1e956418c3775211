"""The pool of fusion workers: chooses a worker for each request, and retries with another."""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.gateway.workers.fleet import CHECK_SECONDS, Fleet, Member
from fusionkv.kvcache_service import keys
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    ResourceExhausted,
    ServiceError,
    Unavailable,
)
from fusionkv.protos.runtime.tls import ClientTLS

_faults = logs.RateLimitedLog(logging.getLogger(__name__))
T = TypeVar("T")
R = TypeVar("R", pb.GenerateResponse, pb.PrefillResponse, pb.EncodeResponse)
# Affinity, in requests in flight: a worker that holds all chunks of a prompt may have this many more than another;
# one that holds half of them, half as many.
_AFFINITY = 2.0
# Errors after which the request is retried with another worker.
_RETRYABLE = (Unavailable, ResourceExhausted, FailedPrecondition)


class WorkerPool:
    """Calls the least loaded worker, or one that probably holds the prompt's chunks in its pool.

    Holding all chunks outweighs two requests in flight. All workers must run the same model; a worker with another
    one is skipped.
    """

    def __init__(self, addresses: Sequence[str], tls: ClientTLS | None = None) -> None:
        self._fleet = Fleet(addresses, tls)
        self._vocabulary: Vocabulary | None = None
        self._loading = asyncio.Lock()

    async def model(self, timeout: float = 30.0) -> Vocabulary:
        """Tokenizer and template of the workers' model, from the first worker that replies.

        Raises:
            Unavailable: no worker can be reached.
        """
        failures: list[ServiceError] = []
        for member in await self._order({}):
            try:
                model = await member.client.model(timeout)
            except _RETRYABLE as error:
                failures.append(error)
                continue
            async with self._loading:
                known = self._vocabulary
                # `is` first: comparing the messages compares tokenizers of up to 10 MB.
                if known is None or (known.model is not model and known.model != model):
                    self._vocabulary = known = await asyncio.to_thread(Vocabulary, model)
                return known
        raise _reported(failures)

    async def encode(self, request: pb.EncodeRequest) -> pb.EncodeResponse:
        """Encodes one chunk on any worker. Unresponsive workers are detected as by `generate`."""

        async def call(client: WorkerClient) -> AsyncGenerator[pb.EncodeResponse]:
            yield await client.encode(request)

        async with contextlib.aclosing(self._stream({}, call)) as responses:
            _, encoded = await anext(responses)
        return encoded

    async def generate(self, request: pb.GenerateRequest, timeout: float) -> AsyncGenerator[pb.GenerateResponse]:
        """Streams one answer. If a worker fails before its first token, the next one is tried.

        If there are several workers, an unresponsive one is detected by a health check before it receives the
        request, or while no response arrives. A healthy worker's prefill may take any time.
        """
        streaming = self._stream(_chunks(request), lambda client: client.generate(request, timeout))
        async with contextlib.aclosing(streaming) as responses:
            async for _, response in responses:
                yield response

    def prefill(self, request: pb.GenerateRequest, timeout: float) -> AsyncGenerator[tuple[str, pb.PrefillResponse]]:
        """Has a worker, chosen as for `generate`, prefill a prompt; yields its address with each response."""
        prompt = pb.PrefillRequest(prompt=request)
        return self._stream(_chunks(request), lambda client: client.prefill(prompt, timeout))

    async def _stream(
        self, chunks: Mapping[bytes, int], call: Callable[[WorkerClient], AsyncGenerator[R]]
    ) -> AsyncGenerator[tuple[str, R]]:
        """The responses of the first worker that replies, with its address; `chunks` as for `_order`."""
        failures: list[ServiceError] = []
        order = await self._answering(chunks)
        for member in order:
            started = False
            try:
                with member.counted():
                    member.holdings.use(chunks)
                    async with contextlib.aclosing(call(member.client)) as responses:
                        first = anext(responses, None)
                        response = await (first if member is order[-1] else _monitored(member, first))
                        started = True
                        member.record_reply()
                        while response is not None:
                            if tokens := getattr(response, "pool_tokens", 0):
                                member.holdings.resize(tokens)
                            yield member.client.address, response
                            response = await anext(responses, None)
                return
            except DeadlineExceeded:
                if not started:
                    member.record_timeout()
                raise
            except _RETRYABLE as error:
                if started:
                    raise
                # Being busy is not a fault.
                if not isinstance(error, ResourceExhausted):
                    _faults.warning("a worker failed; trying the next one, if any", error)
                failures.append(error)
        raise _reported(failures)

    def address(self) -> str:
        """Address of a reachable worker; empty if there is none."""
        return next((m.client.address for m in self._fleet.members if m.client.connected), "")

    async def close(self) -> None:
        await self._fleet.close()

    async def _order(self, chunks: Mapping[bytes, int]) -> list[Member]:
        """Workers in order of preference for a prompt, given its chunks by name, with their tokens.

        Reachable workers come first: others may not reply for up to 20 s. Among them, responsive workers come first,
        then those with the fewest calls in flight minus their affinity for the prompt's chunks. Ties are broken by
        rendezvous hashing, so that all gateways send the same chunks to the same worker.
        """

        affinity = hashlib.sha256(b"".join(sorted(chunks))).digest()

        def load(member: Member) -> tuple[bool, bool, float, bytes]:
            turn = hashlib.sha256(affinity + member.client.address.encode()).digest()
            if not member.client.connected:
                member.holdings.clear()
            busy = member.in_flight - _AFFINITY * member.holdings.share(chunks)
            return not member.client.connected, member.deprioritised, busy, turn

        await self._fleet.ready()
        return sorted(self._fleet.members, key=load)

    async def _answering(self, chunks: Mapping[bytes, int]) -> list[Member]:
        """As `_order`, beginning with the first worker that passes a health check, if there are several workers."""
        order = await self._order(chunks)
        for i, member in enumerate(order if len(order) > 1 else ()):
            if await member.is_responsive():
                return [*order[i:], *order[:i]]
        return order


def _chunks(request: pb.GenerateRequest) -> dict[bytes, int]:
    """A prompt's chunks by name, with their tokens. A worker's pool separates chunks by tenant too."""
    salt = request.tenant.encode()
    return {salt + keys.chunk_digest(chunk.ids): len(chunk.ids) for chunk in request.chunks}


async def _monitored(member: Member, reply: Awaitable[T]) -> T:
    """Awaits a reply while health checks succeed; raises Unavailable when one fails."""
    replying = asyncio.ensure_future(reply)
    try:
        while not (await asyncio.wait([replying], timeout=CHECK_SECONDS))[0]:
            if not await member.client.answers(CHECK_SECONDS):
                member.record_timeout()
                raise Unavailable(f"fusion worker {member.client.address} does not reply to health checks")
        return replying.result()
    finally:
        replying.cancel()
        await asyncio.wait([replying])


def _reported(failures: Sequence[ServiceError]) -> ServiceError:
    """The error for the caller: ResourceExhausted if any worker is busy, since a retry may help."""
    if not failures:
        return Unavailable("there is no fusion worker: the name in `workers` has no address")
    return next((f for f in failures if isinstance(f, ResourceExhausted)), failures[0])
