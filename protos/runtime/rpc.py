"""gRPC servers and channels of all services: limits, health, reflection, status mapping and drain."""

import asyncio
import contextlib
import functools
import json
import logging
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

import grpc
from google.protobuf import descriptor, message_factory
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2

from fusionkv.protos.deadline import NO_DEADLINE, Deadline
from fusionkv.protos.observe import logs, rejected, telemetry
from fusionkv.protos.runtime import errors, fields, process
from fusionkv.protos.runtime.admission import PROBE_PLACES, Admit, Arrivals, following, write
from fusionkv.protos.runtime.errors import InvalidArgument, NotFound, ResourceExhausted, ServiceError
from fusionkv.protos.runtime.tls import MAX_AGE_SECONDS, ClientTLS
from fusionkv.protos.serving import ServingConfig

log = logging.getLogger(__name__)
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
_STATUS = health_pb2.HealthCheckResponse.ServingStatus
_UNKNOWN = health_pb2.HealthCheckResponse(status=_STATUS.SERVICE_UNKNOWN)
# Between two readiness checks of a service.
_READY_SECONDS = 2.0
# Calls that stay open without any work.
_MAX_WATCHES, _MAX_REFLECTIONS = 256, 8

# The largest request holds 128 passages with their metadata and a conversation; larger documents come in pieces, and
# KV in frames of 1 MiB. gRPC refuses a larger message before it arrives.
MAX_REQUEST_BYTES = 8 << 20
# The largest response holds a model's tokenizer.
_MAX_RESPONSE_BYTES = 64 << 20
# Fields of a message, those of messages in it included; other limits allow far fewer. A field has at least two bytes.
_MAX_FIELDS = 1 << 16
_OPTIONS = [("grpc.max_send_message_length", _MAX_RESPONSE_BYTES)]
# Seconds. A longer deadline counts as none.
_LONGEST = 1e6
_CLIENT_OPTIONS = [
    *_OPTIONS,
    # Services call each other directly; gRPC would send even loopback calls to $http_proxy.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", _MAX_RESPONSE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # A service that comes back at another address is found once DNS tells it: by default, gRPC asks every 30 s only,
    # on top of the up to 30 s for which a cluster's DNS keeps an answer.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
]
# Retries of clients of the gateway: a call that fails as UNAVAILABLE before the first response is retried up to four
# times within about three seconds, enough to connect to another gateway or to one that has just started. If half of
# the last hundred calls failed, there are no retries. Delete is not retried: a repeated call would fail as NOT_FOUND.
_RETRIED = ("Ingest", "Upload", "Precompute", "List", "Retrieve", "Generate", "GetModel", "Stats")
MAX_RETRIES = 4
_SERVER_OPTIONS = [
    *_OPTIONS,
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    # No compression: 61 KB may hold 64 MiB.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # What a client may send on a stream that nothing is read from stays at 64 KiB, as for connections that are slow.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.max_allowed_incoming_connections", 2048),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # Frees what was reserved for a client whose machine vanished during a stream.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Calls that wait for the event loop, each with up to 64 KiB; gRPC cancels more without a retry delay. If 32,768
    # may wait, 20,000 calls that come at once delay others by 11 s.
    ("grpc.server.max_pending_requests", 4096),
    ("grpc.server.max_pending_requests_hard_limit", 4096),
    # By default, calls that wait for 30 s fail as INTERNAL. Callers' deadlines end them instead.
    ("grpc.server_max_unrequested_time_in_server", 86_400),
    # Otherwise two servers could share a port unnoticed.
    ("grpc.so_reuseport", 0),
]
_TLS_OPTIONS = [("grpc.max_connection_age_ms", int(MAX_AGE_SECONDS * 1000))]

Deserialiser = Callable[[bytes], Any]


def dial(
    address: str, *, tls: ClientTLS | None = None, traced: bool = True, name: str = "", retries: int = 0
) -> grpc.aio.Channel:
    """An asynchronous channel to `host:port` or `unix:/path`; unix sockets are never encrypted.

    Traced calls can't wait for a server's initial metadata: the interceptors wait for the end of the call.

    name: name that the server's certificate must have, instead of the address. retries: of undelivered calls of a
    gateway.
    """
    # Blocking clients need not load it.
    from opentelemetry.instrumentation.grpc import aio_client_interceptors, filters

    told = aio_client_interceptors(filter_=filters.negate(filters.health_check()))
    interceptors = [*told, _UnaryEnd(), _StreamEnd()] if traced else None
    options = _client_options(address, retries)
    if tls is None or address.startswith("unix:"):
        return grpc.aio.insecure_channel(_target(address), options=options, interceptors=interceptors)
    options = [*options, *([("grpc.ssl_target_name_override", name)] if name else [])]
    return tls.channel(
        lambda credentials: grpc.aio.secure_channel(address, credentials, options=options, interceptors=interceptors)
    )


async def _ended(call: Any) -> Any:
    """Waits for a call's end; cancels it with the caller.

    The interceptors of telemetry wait for the status alone: the server would go on after its caller was cancelled.
    """
    try:
        await call.code()
    except asyncio.CancelledError:
        call.cancel()
        raise
    return call


class _UnaryEnd(grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await _ended(await continuation(client_call_details, request))


class _StreamEnd(grpc.aio.StreamUnaryClientInterceptor):
    async def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await _ended(await continuation(client_call_details, request_iterator))


def dial_sync(address: str, *, tls: ClientTLS | None = None, retries: int = 0) -> grpc.Channel:
    """A blocking channel with the options of `dial`."""
    options = _client_options(address, retries)
    if tls is None or address.startswith("unix:"):
        return grpc.insecure_channel(_target(address), options=options)
    return tls.channel(lambda credentials: grpc.secure_channel(address, credentials, options=options))


def _target(address: str) -> str:
    """The address as gRPC reads it: it decodes %XX in the path of a unix socket.

    Raises InvalidArgument if the path can't be a socket's.
    """
    path = address.removeprefix("unix:")
    try:
        process.check_sockets([address])
    except ValueError as error:
        raise InvalidArgument(str(error)) from None
    return address if path == address else f"unix:{quote(path)}"


def _client_options(address: str, retries: int) -> list[tuple[str, Any]]:
    # gRPC's default backoff is up to two minutes; reconnecting to a local socket costs nothing.
    backoff = ("grpc.max_reconnect_backoff_ms", 200 if address.startswith("unix:") else 1_000)
    return [*_CLIENT_OPTIONS, backoff, *(_retrying(retries) if retries else ())]


def _retrying(retries: int) -> list[tuple[str, Any]]:
    policy = {
        "maxAttempts": 1 + retries,
        "initialBackoff": "0.2s",
        "backoffMultiplier": 2,
        "maxBackoff": "2s",
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    names = [{"service": "gateway.v1.GatewayService", "method": method} for method in _RETRIED]
    config = {
        "methodConfig": [{"name": names, "retryPolicy": policy}],
        "retryThrottling": {"maxTokens": 100, "tokenRatio": 1},
    }
    return [
        ("grpc.service_config", json.dumps(config)),
        # Requests over this size are not retried; documents are the largest.
        ("grpc.per_rpc_retry_buffer_size", 64 << 20),
    ]


def deadline(call: grpc.aio.ServicerContext | None) -> Deadline:
    """The caller's deadline; a caller in this process (`call` is None) has none."""
    seconds = call.time_remaining() if call else None
    return NO_DEADLINE if seconds is None or seconds >= _LONGEST else Deadline.after(seconds)


def handlers(
    service: descriptor.ServiceDescriptor,
    servicer: object,
    deserialisers: Mapping[str, Deserialiser] | None = None,
    serialisers: Mapping[str, Callable[[Any], bytes]] | None = None,
    *,
    admit: Admit = lambda method, context: contextlib.nullcontext(context),
    arrivals: Arrivals | None = None,
) -> grpc.GenericRpcHandler:
    """Binds a servicer's methods to a service by name.

    Args:
        deserialisers: used instead of protobuf's for some methods, as are `serialisers`.
        admit: entered before a call's message is read. What it yields, by default the context, is the second argument
            of the servicer's method.
        arrivals: where messages are read; all services share the places by default.
    """
    table = {}
    for method in service.methods:
        request = message_factory.GetMessageClass(method.input_type)
        response = message_factory.GetMessageClass(method.output_type)
        # Requests are read as a stream, also a single one: otherwise gRPC would read it before the method is called.
        kind = f"stream_{'stream' if method.server_streaming else 'unary'}_rpc_method_handler"
        called = functools.partial(_called, method, arrivals or _ARRIVALS, admit)
        table[method.name] = getattr(grpc, kind)(
            (_stream if method.server_streaming else _unary)(getattr(servicer, method.name), called),
            request_deserializer=_reader((deserialisers or {}).get(method.name, bounded(request))),
            response_serializer=(serialisers or {}).get(method.name, response.SerializeToString),
        )
    return grpc.method_handlers_generic_handler(service.full_name, table)


_ARRIVALS = Arrivals()


def bounded(kind: type[Message]) -> Deserialiser:
    """protobuf's parser, behind a limit on fields: it blocks, and turns 8 MiB of empty messages into 500 MB."""

    def parse(data: bytes) -> Message:
        if len(data) > 2 * _MAX_FIELDS and fields.count(data, kind.DESCRIPTOR, _MAX_FIELDS) > _MAX_FIELDS:
            raise ValueError(f"it has more than {_MAX_FIELDS} fields")
        return kind.FromString(data)

    return parse


def _reader(parse: Deserialiser) -> Deserialiser:
    def read(data: bytes) -> Any:
        """The message, or an error for `readable` to raise: raised here, it would cause UNKNOWN and a traceback."""
        try:
            return parse(data)
        except (DecodeError, ValueError) as error:
            rejected.note("grpc_message")
            return InvalidArgument(f"the request is malformed: {error}")

    return read


@contextlib.asynccontextmanager
async def _called(
    method: descriptor.MethodDescriptor, arrivals: Arrivals, admit: Admit, context: grpc.aio.ServicerContext
) -> AsyncIterator[Any]:
    """Admits a call, and then reads its message; yields it, or the stream that it begins, and the admitted call.

    Turns a ServiceError into its status, and any other error into INTERNAL with a log record.
    """
    try:
        async with admit(method.name, context) as call:
            first = await arrivals.message(context)
            if method.client_streaming:
                async with contextlib.aclosing(following(first, context)) as requests:
                    yield requests, call
            elif first is grpc.aio.EOF:
                raise InvalidArgument("the call ended without a message")
            else:
                yield first, call
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        telemetry.record_error(error)
        if isinstance(error, ServiceError):
            await context.abort(error.status, errors.details(error), errors.trailing_metadata(error))
        log.exception("unexpected error in %s", method.full_name)
        await context.abort(grpc.StatusCode.INTERNAL, f"internal error: {type(error).__name__}")


def _unary(method: Callable[..., Any], called: Callable[..., Any]) -> Callable[..., Any]:
    async def unary(_: object, context: grpc.aio.ServicerContext) -> Any:
        async with called(context) as arguments:
            return await method(*arguments)

    return unary


def _stream(method: Callable[..., Any], called: Callable[..., Any]) -> Callable[..., Any]:
    async def stream(_: object, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """Writes to the context, in order to limit the wait for the client, and yields nothing."""
        async with called(context) as arguments, contextlib.aclosing(method(*arguments)) as responses:
            async for response in responses:
                await write(context, response)
        if False:
            yield  # makes this a generator, which the interceptors of telemetry require

    return stream


class _Health:
    """Answers probes without a token.

    Not the library's: that has no List, and its Watch writes with a lock held, so that a caller that reads nothing
    would hold up all others, and the drain.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, health_pb2.HealthCheckResponse] = {}
        self._changed = asyncio.Event()
        self._watches = asyncio.Semaphore(_MAX_WATCHES)

    def set(self, services: Iterable[str], serving: bool) -> None:
        status = _STATUS.SERVING if serving else _STATUS.NOT_SERVING
        self._statuses |= dict.fromkeys(services, health_pb2.HealthCheckResponse(status=status))
        self._changed.set()
        self._changed = asyncio.Event()

    def drain(self) -> None:
        self.set([*self._statuses], False)

    async def follow(self, services: Iterable[str], ready: Callable[[], Awaitable[bool]]) -> None:
        """Sets the status of services by whether they are ready, until it is cancelled."""
        while True:
            self.set(services, await ready())
            await asyncio.sleep(_READY_SECONDS)

    async def Check(self, request: health_pb2.HealthCheckRequest, _: object) -> health_pb2.HealthCheckResponse:
        if request.service not in self._statuses:
            raise NotFound("no such service: call List")
        return self._statuses[request.service]

    async def List(self, request: object, _: object) -> "health_pb2.HealthListResponse":
        """The status of every service that Check knows. Stubs before 1.82 lack its messages."""
        return health_pb2.HealthListResponse(statuses=self._statuses)

    async def Watch(self, request: health_pb2.HealthCheckRequest, _: object) -> AsyncIterator[Any]:
        """The status of a service whenever it changes, for a limited number of callers."""
        if self._watches.locked():
            raise ResourceExhausted("too many calls are watching: call Check")
        async with self._watches:
            last = None
            while True:
                changed, status = self._changed, self._statuses.get(request.service, _UNKNOWN)
                if status == last:
                    await changed.wait()
                else:
                    last = status
                    yield status


class _Probes(Arrivals):
    """Places for messages of the health service: a probe that finds none asks for the server, as most do."""

    async def message(self, context: grpc.aio.ServicerContext) -> Any:
        return await super().message(context) if self.free else health_pb2.HealthCheckRequest()


class _PlainHealth:
    """Health checks for callers that can't speak TLS, such as Kubernetes' probes; a `Beside`."""

    def __init__(self, name: str, checks: _Health, address: str) -> None:
        self.name = f"{name}-health"
        self._address = address
        self._server = grpc.aio.server(options=_SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((handlers(_HEALTH, checks, arrivals=_Probes(PROBE_PLACES)),))

    async def start(self) -> list[str]:
        bound = _bind(self._server, self._address, None)
        await self._server.start()
        return [bound]

    async def stop(self, seconds: float) -> None:
        """At once: a service that drains is not to be probed."""
        await self._server.stop(0)


class _Reflection:
    """The library's servicer, for a limited number of callers."""

    def __init__(self, servicer: Any) -> None:
        self._servicer, self._calls = servicer, asyncio.Semaphore(_MAX_REFLECTIONS)

    async def ServerReflectionInfo(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        if self._calls.locked():
            raise ResourceExhausted("too many calls are listing methods: try again later", retry_after=0.5)
        async with self._calls:
            async for response in self._servicer.ServerReflectionInfo(requests, context):
                yield response


class Beside(Protocol):
    """Another listener of the process that serves and drains together with the gRPC server."""

    name: str

    async def start(self) -> list[str]:
        """Starts to listen; returns the addresses, with port 0 resolved. Raises OSError."""

    async def stop(self, seconds: float) -> None:
        """Refuses new calls; calls in flight may take `seconds` to complete."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a process serves.

    Attributes:
        services: handlers of gRPC services, by name.
        interceptors: run after those of telemetry.
        beside: other listeners of the process.
        ready: whether `services` can be used now, asked every 2 s: while they can't, their health is NOT_SERVING.
            The health of the server, which has no name, says only that it takes calls.
        failure: when it fails, health becomes NOT_SERVING, calls in flight end with UNAVAILABLE, neither callback
            runs, and its error is raised.
        on_stop: called with half of the drain's seconds, while new calls are still accepted.
        on_drain: called after all calls have ended.
    """

    services: Mapping[str, grpc.GenericRpcHandler]
    interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
    beside: Sequence[Beside] = ()
    ready: Callable[[], Awaitable[bool]] | None = None
    failure: "asyncio.Future[None] | None" = None
    on_stop: Callable[[float], Awaitable[None]] | None = None
    on_drain: Callable[[], Awaitable[None]] | None = None


async def serve(name: str, config: ServingConfig, served: Served, stop: asyncio.Event | None = None) -> None:
    """Serves until SIGTERM or SIGINT, then drains: health becomes NOT_SERVING, calls in flight get `drain_seconds`.

    Prints one line `<name> serving on <address> [<address>]` once it accepts calls, with port 0 resolved, and one
    line for each listener beside. `health_listen` answers health checks alone, and never speaks TLS.

    stop: serves until it is set, and leaves signals and the loop's errors to the process.

    Raises OSError if an address can't be bound, or a certificate can't be used.
    """
    # Clients need not load these.
    from grpc_reflection.v1alpha import reflection, reflection_pb2
    from opentelemetry.instrumentation.grpc import aio_server_interceptor, filters

    tls, services = config.server_tls, served.services
    credentials = tls.credentials() if tls else None
    traced = aio_server_interceptor(filter_=filters.negate(filters.health_check()))
    server = grpc.aio.server(
        options=[*_SERVER_OPTIONS, *(_TLS_OPTIONS if tls else [])], interceptors=[traced, *served.interceptors]
    )
    described = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
    checks = _Health()
    names = [*services, _HEALTH.full_name]
    reflected = _Reflection(reflection.aio.ReflectionServicer([*names, reflection.SERVICE_NAME]))
    probes = handlers(_HEALTH, checks, arrivals=_Probes(PROBE_PLACES))
    server.add_generic_rpc_handlers((*services.values(), probes, handlers(described, reflected)))
    bound = [_bind(server, address, credentials) for address in config.listen]
    beside: list[Beside] = [*served.beside]
    if config.health_listen:
        beside.append(_PlainHealth(name, checks, config.health_listen))
    others = [(other.name, await other.start()) for other in beside]
    loop = asyncio.get_running_loop()
    if stop is None:
        stop = asyncio.Event()
        loop.set_exception_handler(logs.unhandled)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
    await server.start()
    checks.set(("", *names), True)
    if served.ready:
        checks.set(services, False)
    following = asyncio.create_task(checks.follow(services, served.ready)) if served.ready else None
    for listener, where in ((name, bound), *others):
        # A shell's words: the path of a unix socket may have a space.
        process.say(f"{listener} serving on {shlex.join(where)}", sys.stdout)
    stopping = asyncio.create_task(stop.wait())
    awaited: list[asyncio.Future[Any]] = [stopping, *([served.failure] if served.failure is not None else [])]
    await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
    if following is not None:
        following.cancel()
    checks.drain()
    if served.failure is not None and served.failure.done():
        stopping.cancel()
        await asyncio.gather(server.stop(0), *(other.stop(0) for other in beside))
        served.failure.result()
    drain_seconds = config.drain_seconds
    log.info("%s is draining for up to %g s", name, drain_seconds)
    if served.on_stop is not None:
        started = loop.time()
        await served.on_stop(drain_seconds / 2)
        drain_seconds -= loop.time() - started
    drain_seconds = max(drain_seconds, 0.0)
    await asyncio.gather(server.stop(drain_seconds), *(other.stop(drain_seconds) for other in beside))
    if served.on_drain is not None:
        await served.on_drain()
    process.say(f"{name} stopped", sys.stderr)


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> str:
    try:
        if credentials is None or address.startswith("unix:"):
            with process.private_sockets():
                port = server.add_insecure_port(_target(address))
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(f"can't listen on {address}: is the address in use by another process?") from error
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
