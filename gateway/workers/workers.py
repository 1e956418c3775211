"""The fusion workers behind a gateway: which one answers what."""

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
R = TypeVar("R", pb.GenerateResponse, pb.PrefillResponse)
# So many more requests in flight a worker may have than another, and be given one all of whose chunks it holds; for
# half of them half as many.
_WORTH = 2.0
# Another worker may do what this one can't now.
_ELSEWHERE = (Unavailable, ResourceExhausted, FailedPrecondition)


class WorkerPool:
    """Calls the least loaded worker, but for a prompt whose chunks another one likely has in its pool: two requests
    more in flight there weigh as much as all of them. All workers run one model; one that runs another is passed
    over.
    """

    def __init__(self, addresses: Sequence[str], tls: ClientTLS | None = None) -> None:
        self._fleet = Fleet(addresses, tls)
        self._vocabulary: Vocabulary | None = None
        self._loading = asyncio.Lock()

    async def model(self, timeout: float | None = None) -> Vocabulary:
        """Tokenizer and template of what the workers run, from the first that answers.

        Raises:
            Unavailable: none can be reached.
        """
        failures: list[ServiceError] = []
        for member in await self._order({}):
            try:
                model = await (member.client.model(timeout) if timeout is not None else member.client.model())
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

    async def encode(self, request: pb.EncodeRequest, timeout: float | None = None) -> pb.EncodeResponse:
        """Encodes one chunk on any worker; one that stands still, or was cut off, is found out as by `generate`."""
        failures: list[ServiceError] = []
        order = await self._answering({})
        for member in order:
            try:
                with member.counted():
                    coming = member.client.encode(request, timeout)
                    encoded = await (coming if member is order[-1] else _attended(member, coming))
                member.answered()
                return encoded
            except DeadlineExceeded:
                member.silent()
                raise
            except _ELSEWHERE as error:
                failures.append(error)
        raise _worst(failures)

    async def generate(
        self, request: pb.GenerateRequest, timeout: float | None
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """Streams one answer. A worker that fails before its first token is replaced by the next.

        One that stands still, or was cut off, is found out if there is another: before it is given the request, or
        by a health check while nothing comes. A prefill may take its time.
        """
        streaming = self._stream(request, lambda client: client.generate(request, timeout))
        async with contextlib.aclosing(streaming) as responses:
            async for _, response in responses:
                yield response

    async def prefill(
        self, request: pb.GenerateRequest, timeout: float | None
    ) -> AsyncGenerator[tuple[str, pb.PrefillResponse]]:
        """Has a prompt prefilled, by a worker that is chosen as for `generate`; its address with each response."""
        prompt = pb.PrefillRequest(prompt=request)
        streaming = self._stream(request, lambda client: client.prefill(prompt, timeout))
        async with contextlib.aclosing(streaming) as responses:
            async for response in responses:
                yield response

    async def _stream(
        self, request: pb.GenerateRequest, call: Callable[[WorkerClient], AsyncGenerator[R]]
    ) -> AsyncGenerator[tuple[str, R]]:
        """The responses of the first worker that answers, with its address."""
        # The pool knows chunks by tenant too.
        salt = request.tenant.encode()
        chunks = {salt + keys.chunk_digest(chunk.ids): len(chunk.ids) for chunk in request.chunks}
        failures: list[ServiceError] = []
        order = await self._answering(chunks)
        for member in order:
            begun = False
            try:
                with member.counted():
                    member.holdings.use(chunks)
                    async with contextlib.aclosing(call(member.client)) as responses:
                        coming = anext(responses, None)
                        response = await (coming if member is order[-1] else _attended(member, coming))
                        while response is not None:
                            if not begun:
                                member.answered()
                            begun = True
                            if response.pool_tokens:
                                member.holdings.resize(response.pool_tokens)
                            yield member.client.address, response
                            response = await anext(responses, None)
                return
            except DeadlineExceeded:
                if not begun:
                    member.silent()
                raise
            except _ELSEWHERE as error:
                if begun:
                    raise
                # One that is busy has no fault.
                if not isinstance(error, ResourceExhausted):
                    _faults.warning("a worker failed, the next one is asked if there is one", error)
                failures.append(error)
        raise _worst(failures)

    def address(self) -> str:
        """Of a worker that answers; empty when none does."""
        return next((m.client.address for m in self._fleet.members if m.client.connected), "")

    async def close(self) -> None:
        await self._fleet.close()

    async def _order(self, chunks: Mapping[bytes, int]) -> list[Member]:
        """Least calls in flight first, less what it is worth that a worker likely holds the prompt's chunks, by name
        with their tokens; ties by rendezvous hashing, so that all gateways send one set of chunks to one worker.

        Workers that can't be reached come last: a machine that is off answers nothing for up to 20 s. Before them
        come those that kept others waiting of late.
        """

        affinity = hashlib.sha256(b"".join(sorted(chunks))).digest()

        def load(member: Member) -> tuple[bool, bool, float, bytes]:
            turn = hashlib.sha256(affinity + member.client.address.encode()).digest()
            if not member.client.connected:
                member.holdings.clear()
            busy = member.in_flight - _WORTH * member.holdings.share(chunks)
            return not member.client.connected, member.suspect, busy, turn

        await self._fleet.ready()
        return sorted(self._fleet.members, key=load)

    async def _answering(self, chunks: Mapping[bytes, int]) -> list[Member]:
        """As `_order`, from the first one on that answers, where there are several."""
        order = await self._order(chunks)
        for i, member in enumerate(order if len(order) > 1 else ()):
            if await member.answers():
                return [*order[i:], *order[:i]]
        return order


async def _attended(member: Member, coming: Awaitable[T]) -> T:
    """What comes, however late, from a worker that answers meanwhile; Unavailable if it does not."""
    silent = False

    async def attend(limit: asyncio.Timeout) -> None:
        nonlocal silent
        while not silent:
            await asyncio.sleep(CHECK_SECONDS)
            silent = not await member.client.answers(CHECK_SECONDS)
        member.silent()
        limit.reschedule(asyncio.get_running_loop().time())

    try:
        async with asyncio.timeout(None) as limit:
            attending = asyncio.create_task(attend(limit))
            try:
                return await coming
            finally:
                attending.cancel()
    except TimeoutError:
        raise Unavailable(f"fusion worker {member.client.address} answers no health check") from None


def _worst(failures: Sequence[ServiceError]) -> ServiceError:
    """What to tell the caller: that all are busy, if one is, since waiting helps then."""
    if not failures:
        return Unavailable("no fusion worker is known: the name in `workers` has no address")
    return next((f for f in failures if isinstance(f, ResourceExhausted)), failures[0])
