"""The pool of fusion workers: finds them, chooses one for each request, and retries with another."""

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import socket
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.kvcache_service import keys
from fusionkv.protos.deadline import Deadline
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime.cancellation import background
from fusionkv.protos.runtime.errors import (
    FailedPrecondition,
    ResourceExhausted,
    ServiceError,
    Unavailable,
)
from fusionkv.protos.runtime.tls import ClientTLS

log = logging.getLogger(__name__)
_faults = logs.RateLimitedLog(log)
T = TypeVar("T")
R = TypeVar("R", pb.GenerateResponse, pb.PrefillResponse, pb.EncodeResponse, pb.PromptTemplate)
# Raises an error if the worker of this model can't answer a request.
Check = Callable[[pb.GetModelResponse], object]
# Affinity, in requests in flight: a worker that holds all chunks of a prompt may have this many more than another;
# one that holds half of them, half as many.
_AFFINITY = 2.0
# Errors after which the request is retried with another worker.
_RETRYABLE = (Unavailable, ResourceExhausted, FailedPrecondition)
_DNS = "dns:"
# Seconds between lookups, within which added and removed workers are noticed.
_RESOLVE_SECONDS = 5.0
# A worker whose last reply is older than _FRESH_SECONDS must pass a health check within _CHECK_SECONDS before it
# receives a request.
_FRESH_SECONDS, _CHECK_SECONDS = 1.0, 2.0
# An unresponsive worker is deprioritised, with exponential backoff between these limits.
_MIN_BACKOFF, _MAX_BACKOFF = 2.0, 30.0
# Maximum wait for the description of a model, of calls without a deadline.
MODEL_SECONDS = 30.0
# Maximum wait of the deletion of a corpus for each worker.
_FORGET_SECONDS = 5.0
# Tokens of a pool whose size is not known yet, and the most chunks to remember.
_FIRST_TOKENS, _MAX_CHUNKS = 1 << 16, 1 << 16
# Templates that requests asked for, of a few KB each.
_MAX_RENDERED = 256
# What a reply says of a worker rather than of its model.
_OF_WORKER = ("device", "dtype", "kv_bytes_per_token", "verdicts")


class PrefixAffinity:
    """Chunks by name with their tokens, evicted least recently used first, as in the pool.

    An estimate, from the requests sent to the worker: other gateways may use it too, and requests' own tokens take
    room in its pool. An error costs a load from the cache service.
    """

    def __init__(self) -> None:
        self._tokens: OrderedDict[bytes, int] = OrderedDict()
        self._sum = 0
        self._capacity = _FIRST_TOKENS

    def share(self, chunks: Mapping[bytes, int]) -> float:
        """Share of the tokens of a prompt's chunks that the pool probably holds, 0..1."""
        held = sum(tokens for name, tokens in chunks.items() if name in self._tokens)
        return held / sum(chunks.values()) if held else 0.0

    def use(self, chunks: Mapping[bytes, int]) -> None:
        """Records that the worker receives a prompt with these chunks."""
        for name, tokens in chunks.items():
            self._sum += tokens - self._tokens.pop(name, 0)
            self._tokens[name] = tokens
        self._trim()

    def resize(self, tokens: int) -> None:
        """Sets the size of the pool, as reported by the worker."""
        self._capacity = tokens
        self._trim()

    def clear(self) -> None:
        """Forgets all chunks: the worker has, or may have, restarted."""
        self._tokens.clear()
        self._sum = 0

    def _trim(self) -> None:
        while self._sum > self._capacity or len(self._tokens) > _MAX_CHUNKS:
            _, tokens = self._tokens.popitem(last=False)
            self._sum -= tokens


@dataclass(eq=False)
class Member:
    """One worker, with its calls in flight and its recent responsiveness."""

    client: WorkerClient
    in_flight: int = 0
    users: int = 0
    """Requests that call it, or may still choose it."""
    holdings: PrefixAffinity = field(default_factory=PrefixAffinity)
    described: pb.GetModelResponse | None = None
    """The reply that `vocabulary` was made from."""
    vocabulary: Vocabulary | None = None
    _backoff: float = 0.0
    _deprioritised_until: float = 0.0
    _last_reply: float = -math.inf

    @property
    def deprioritised(self) -> bool:
        return time.monotonic() < self._deprioritised_until

    def record_timeout(self) -> None:
        """Records that the worker did not reply in time, or while another one did."""
        if not self.deprioritised:  # otherwise another request has found the same failure
            self._backoff = min(max(_MIN_BACKOFF, 2 * self._backoff), _MAX_BACKOFF)
        self._deprioritised_until = time.monotonic() + self._backoff

    def record_reply(self) -> None:
        self._backoff, self._deprioritised_until, self._last_reply = 0.0, 0.0, time.monotonic()

    async def is_responsive(self) -> bool:
        """Whether the worker replied within the last second, or passes a health check now."""
        if time.monotonic() - self._last_reply < _FRESH_SECONDS:
            return True
        healthy = await self.client.answers(_CHECK_SECONDS)
        self.record_reply() if healthy else self.record_timeout()
        return healthy

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class WorkerPool:
    """Calls the least loaded worker, or one that probably holds the prompt's chunks in its pool.

    Holding all chunks outweighs two requests in flight. All workers must run the same model; a worker with another
    one is skipped. Create the pool in a running event loop.

    An address `dns:HOST:PORT` means all addresses of the name, which is resolved every 5 s. If that fails, the known
    workers stay. Calls in flight to a removed worker continue.
    """

    def __init__(self, addresses: Sequence[str], tls: ClientTLS | None = None) -> None:
        self._tls = tls
        self._listed = {at: Member(WorkerClient(at, tls)) for at in addresses if not at.startswith(_DNS)}
        self._resolved: dict[str, dict[str, Member]] = {at: {} for at in addresses if at.startswith(_DNS)}
        self._unknown = set(self._resolved)
        self._looked_up = asyncio.Event()  # a name has given a worker, or all have been looked up
        self._retiring: set[asyncio.Task[None]] = set()
        self._resolving = [asyncio.create_task(self._follow(name)) for name in self._resolved]
        if not self._resolved:
            self._looked_up.set()
        self._loading = asyncio.Lock()

    @property
    def members(self) -> list[Member]:
        resolved = {address: member for members in self._resolved.values() for address, member in members.items()}
        return [*{**resolved, **self._listed}.values()]

    async def model(self, deadline: Deadline, check: Check = lambda _: None) -> Vocabulary:
        """The tokenizer and template of the first worker that replies and passes. Raises Unavailable without one.

        check: raises FailedPrecondition if another worker may pass, such as one with an auxiliary model.
        """
        failures: list[ServiceError] = []
        with _used(await self._order({})) as order:
            for member in order:
                try:
                    asked = member.client.model(deadline)
                    model = await (asked if member is order[-1] else _monitored(member, asked))
                    check(model)
                except _RETRYABLE as error:
                    failures.append(error)
                    continue
                return await self._vocabulary(member, model)
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
                with _used(await self._order({})) as order:
                    if order and await order[0].client.serves(timeout / 2):
                        return True
                    # A single worker may only have been slow: it is asked again.
                    others = order[1:] or order
                    return any(await asyncio.gather(*(m.client.serves(timeout / 2) for m in others)))
        except TimeoutError:
            return False

    async def encode(self, request: pb.EncodeRequest) -> pb.EncodeResponse:
        """Encodes one chunk on any worker. Watches workers as `generate` does."""

        async def call(client: WorkerClient) -> AsyncGenerator[pb.EncodeResponse]:
            yield await client.encode(request)

        async with contextlib.aclosing(self._stream({}, call)) as responses:
            _, encoded = await anext(responses)
        return encoded

    async def forget_corpus(self, tenant: str, corpus: str) -> None:
        """Has every worker delete what it and its cache service keep of a corpus; failures are logged.

        tenant, corpus: as in a request to a worker.
        """
        await self._looked_up.wait()
        request = pb.ForgetCorpusRequest(tenant=tenant, corpus=corpus)
        with _used(self.members) as members:
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
        with _used(await self._order(chunks)) as members:
            order = await _answering(members)
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
        return next((m.client.address for m in self.members if m.client.connected), "")

    async def close(self) -> None:
        for task in self._resolving:
            task.cancel()
        await asyncio.gather(*(member.client.close() for member in self.members))
        await asyncio.gather(*self._retiring)

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

        await self._looked_up.wait()
        return sorted(self.members, key=load)

    async def _vocabulary(self, member: Member, model: pb.GetModelResponse) -> Vocabulary:
        """The vocabulary of a member that has described its model so; workers of one model share it.

        It takes about 50 MB and up to a second to make.
        """
        async with self._loading:
            if member.vocabulary is not None and member.described is model:
                return member.vocabulary
            # The first reply of a connection.
            shared = pb.GetModelResponse()
            shared.CopyFrom(model)
            for name in _OF_WORKER:
                shared.ClearField(name)
            known = {other.vocabulary for other in self.members if other.vocabulary is not None}
            same = [vocabulary for vocabulary in known if vocabulary.model == shared]
            member.vocabulary = same[0] if same else await asyncio.to_thread(Vocabulary, shared)
            member.described = model
            return member.vocabulary

    async def _follow(self, name: str) -> None:
        while True:
            await self._resolve(name)
            self._unknown.discard(name)
            if self.members or not self._unknown:
                self._looked_up.set()
            await asyncio.sleep(_RESOLVE_SECONDS)

    async def _resolve(self, name: str) -> None:
        host, _, port = name.removeprefix(_DNS).rpartition(":")
        try:
            infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError for invalid names such as "a..b"
            log.warning("can't resolve %s: %s; keeping its known workers", name, error)
            return
        known = self._resolved[name]
        now = {_address(str(at[0]), int(at[1])) for *_, at in infos}
        for address in sorted(now - known.keys()):
            log.info("added worker of %s: %s", name, address)
            known[address] = Member(WorkerClient(address, self._tls, name=host))
        for address in sorted(known.keys() - now):
            log.info("removed worker of %s: %s", name, address)
            background(self._retiring, _retire(known.pop(address)))


@contextlib.contextmanager
def _used(members: Sequence[Member]) -> Iterator[Sequence[Member]]:
    """Keeps the connections of members open, even if they are removed meanwhile."""
    for member in members:
        member.users += 1
    try:
        yield members
    finally:
        for member in members:
            member.users -= 1


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


async def _monitored(member: Member, reply: Awaitable[T]) -> T:
    """Awaits a reply while health checks succeed; raises Unavailable when one fails."""
    replying = asyncio.ensure_future(reply)
    try:
        while not (await asyncio.wait([replying], timeout=_CHECK_SECONDS))[0]:
            if not await member.client.answers(_CHECK_SECONDS):
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


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _retire(member: Member) -> None:
    while member.users:  # noqa: ASYNC110 - rare, and calls take up to minutes
        await asyncio.sleep(0.5)
    await member.client.close()
