"""The pool of fusion workers: chooses one for each request, and retries with another."""

import asyncio
import contextlib
import hashlib
import json
import logging
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TypeVar

from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.gateway.workers.members import Member, Members, used
from fusionkv.kvcache_service import keys
from fusionkv.protos.deadline import Deadline
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

log = logging.getLogger(__name__)
_faults = logs.RateLimitedLog(log)
R = TypeVar("R", pb.GenerateResponse, pb.PrefillResponse, pb.EncodeResponse, pb.PromptTemplate)
# Raises an error if the worker of this model can't answer a request.
Check = Callable[[pb.GetModelResponse], object]
# Affinity, in requests in flight: a worker that holds all chunks of a prompt may have this many more than another;
# one that holds half of them, half as many.
_AFFINITY = 2.0
# Errors after which the request is retried with another worker.
_RETRYABLE = (Unavailable, ResourceExhausted, FailedPrecondition)
# Maximum wait for the description of a model, of calls without a deadline.
MODEL_SECONDS = 30.0
# Maximum wait for a worker to encode a chunk: a long one takes minutes on a CPU.
_ENCODE_SECONDS = 1800.0
# Maximum wait of the deletion of a corpus for each worker.
_FORGET_SECONDS = 5.0
# Templates that requests asked for, of a few KB each.
_MAX_RENDERED = 256


class WorkerPool:
    """Calls the least loaded worker, or one that probably holds the prompt's chunks in its pool.

    Holding all chunks outweighs two requests in flight. All workers must run the same model; a worker with another
    one is skipped. Create the pool in a running event loop.
    """

    def __init__(self, addresses: Sequence[str], tls: ClientTLS | None = None) -> None:
        self.members = Members(addresses, tls)

    async def model(self, deadline: Deadline, check: Check = lambda _: None) -> Vocabulary:
        """The tokenizer and template of the first worker that replies and passes. Raises Unavailable without one.

        check: raises FailedPrecondition if another worker may pass, such as one with an auxiliary model.
        """
        failures: list[ServiceError] = []
        with used(await self._order({})) as order:
            for member in order:
                try:
                    asked = member.client.model(deadline)
                    model = await (asked if member is order[-1] else member.monitored(asked))
                    check(model)
                except _RETRYABLE as error:
                    failures.append(error)
                    continue
                return await self.members.vocabulary(member, model)
        raise _reported(failures)

    async def rendered(self, vocabulary: Vocabulary, values: Mapping[str, str], deadline: Deadline) -> Vocabulary:
        """A vocabulary with values for variables of the chat template, each as JSON. A worker renders the template.

        Raises:
            InvalidArgument: the chat template can't be rendered with the values.
            Unavailable: no worker replies.
        """
        key, known = json.dumps(values, sort_keys=True), vocabulary.rendered
        if key not in known:
            request = pb.RenderTemplateRequest(
                model_fingerprint=vocabulary.model.fingerprint, chat_template_kwargs=values
            )

            async def call(client: WorkerClient) -> AsyncGenerator[pb.PromptTemplate]:
                yield await client.render(request, deadline)

            async with contextlib.aclosing(self._stream({}, call)) as responses:
                _, template = await anext(responses)
            known[key] = vocabulary.with_template(template)
            if len(known) > _MAX_RENDERED:
                known.popitem(last=False)
        known.move_to_end(key)
        return known[key]

    async def ready(self, timeout: float) -> bool:
        """Whether a worker takes requests, by health checks in `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                with used(await self._order({})) as order:
                    if order and await order[0].client.serves(timeout / 2):
                        return True
                    # A single worker may only have been slow: it is asked again.
                    others = order[1:] or order
                    return any(await asyncio.gather(*(m.client.serves(timeout / 2) for m in others)))
        except TimeoutError:
            return False

    async def encode(self, request: pb.EncodeRequest) -> pb.EncodeResponse:
        """Encodes one chunk on any worker, and watches workers as `generate` does. Raises DeadlineExceeded."""

        async def call(client: WorkerClient) -> AsyncGenerator[pb.EncodeResponse]:
            yield await client.encode(request)

        try:
            async with asyncio.timeout(_ENCODE_SECONDS), contextlib.aclosing(self._stream({}, call)) as responses:
                _, encoded = await anext(responses)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no worker encoded a chunk within {_ENCODE_SECONDS:g} s") from error
        return encoded

    async def forget_corpus(self, tenant: str, corpus: str) -> None:
        """Has every worker delete what it and its cache service keep of a corpus; failures are logged.

        tenant, corpus: as in a request to a worker.
        """
        request = pb.ForgetCorpusRequest(tenant=tenant, corpus=corpus)
        with used(await self.members.found()) as members:
            calls = [member.client.forget_corpus(request, _FORGET_SECONDS) for member in members]
            for result in await asyncio.gather(*calls, return_exceptions=True):
                if isinstance(result, ServiceError):
                    log.warning(
                        "the primer of a deleted corpus may be kept until the corpus is deleted again: %s", result
                    )
                elif isinstance(result, BaseException):
                    raise result

    async def generate(self, request: pb.GenerateRequest, deadline: Deadline) -> AsyncGenerator[pb.GenerateResponse]:
        """Streams one answer. If a worker fails before its first token, the next one is tried.

        If there are several workers, an unresponsive one is detected by a health check before it receives the
        request, or while no response arrives. A healthy worker's prefill may take any time.
        """
        streaming = self._stream(_chunks(request), lambda client: client.generate(request, deadline))
        async with contextlib.aclosing(streaming) as responses:
            async for _, response in responses:
                yield response

    def prefill(
        self, request: pb.GenerateRequest, deadline: Deadline
    ) -> AsyncGenerator[tuple[str, pb.PrefillResponse]]:
        """Has a worker, chosen as for `generate`, prefill a prompt; yields its address with each response."""
        prompt = pb.PrefillRequest(prompt=request)
        return self._stream(_chunks(request), lambda client: client.prefill(prompt, deadline))

    async def _stream(
        self, chunks: Mapping[bytes, int], call: Callable[[WorkerClient], AsyncGenerator[R]]
    ) -> AsyncGenerator[tuple[str, R]]:
        """The responses of the first worker that replies, with its address; `chunks` as for `_order`."""
        failures: list[ServiceError] = []
        with used(await self._order(chunks)) as members:
            order = await _answering(members)
            for member in order:
                started = False
                try:
                    with member.counted():
                        member.holdings.use(chunks)
                        async with contextlib.aclosing(call(member.client)) as responses:
                            first = anext(responses, None)
                            response = await (first if member is order[-1] else member.monitored(first))
                            started = True
                            member.record_reply()
                            while response is not None:
                                if tokens := getattr(response, "pool_tokens", 0):
                                    member.holdings.resize(tokens)
                                yield member.client.address, response
                                response = await anext(responses, None)
                    return
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
        return next((m.client.address for m in self.members.known if m.client.connected), "")

    async def close(self) -> None:
        await self.members.close()

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

        return sorted(await self.members.found(), key=load)


async def _answering(order: Sequence[Member]) -> Sequence[Member]:
    """The members, beginning with the first that passes a health check, if there are several."""
    for i, member in enumerate(order if len(order) > 1 else ()):
        if await member.is_responsive():
            return [*order[i:], *order[:i]]
    return order


def _chunks(request: pb.GenerateRequest) -> dict[bytes, int]:
    """A prompt's chunks by name, with their tokens. A worker's pool separates chunks by tenant too."""
    salt = request.tenant.encode()
    return {salt + keys.chunk_digest(chunk.ids): len(chunk.ids) for chunk in request.chunks}


def _reported(failures: Sequence[ServiceError]) -> ServiceError:
    """The error for the caller: ResourceExhausted if any worker is busy, since a retry may help."""
    if not failures:
        return Unavailable("there is no fusion worker: the name in `workers` has no address")
    # Not of a cache service that a worker could not reach.
    if all(re.match(r"fusion worker \S+: failed to connect", str(failure)) for failure in failures):
        return Unavailable(f"{failures[0]} (is the worker running? is the gateway's setting `workers` right?)")
    return next((f for f in failures if isinstance(f, ResourceExhausted)), failures[0])
