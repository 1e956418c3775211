"""gRPC servers and channels of all services: limits, health, reflection, status mapping and drain."""

import asyncio
import contextlib
import inspect
import json
import logging
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import grpc
from google.protobuf import descriptor, message_factory
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2

from fusionkv.protos.observe import logs, rejected, telemetry
from fusionkv.protos.runtime import errors, process
from fusionkv.protos.runtime.errors import InvalidArgument, ServiceError
from fusionkv.protos.runtime.tls import ClientTLS, ServerTLS

log = logging.getLogger(__name__)
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]

# The largest message is a document being ingested. KV is sent in frames of 1 MiB.
MAX_MESSAGE_BYTES = 64 << 20
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
# Seconds. A longer deadline counts as none.
_NO_DEADLINE = 1e6
_CLIENT_OPTIONS = [
    *_OPTIONS,
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Reconnect within a second; gRPC's default backoff is up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
# Retries of clients of the gateway: a call that fails as UNAVAILABLE before the first response is retried up to four
# times within about three seconds, enough to connect to another gateway or to one that has just started. If half of
# the last hundred calls failed, there are no retries. Delete is not retried: a repeated call would fail as NOT_FOUND.
_RETRIED = ("Ingest", "Precompute", "List", "Retrieve", "Generate", "Stats")
_RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": "gateway.v1.GatewayService", "method": method} for method in _RETRIED],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.2s",
                "backoffMultiplier": 2,
                "maxBackoff": "2s",
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
    "retryThrottling": {"maxTokens": 100, "tokenRatio": 1},
}
# Reconnecting to a local socket costs nothing, so a starting service is found at once.
_LOCAL_BACKOFF = ("grpc.max_reconnect_backoff_ms", 200)
_RETRYING_OPTIONS = [
    *_CLIENT_OPTIONS,
    ("grpc.service_config", json.dumps(_RETRIES)),
    # Requests over this size are not retried; documents are the largest.
    ("grpc.per_rpc_retry_buffer_size", MAX_MESSAGE_BYTES),
]
_SERVER_OPTIONS = [
    *_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # Frees what was reserved for a client whose machine vanished during a stream.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Calls that wait for the event loop. By default, gRPC cancels some above 1,000 and all above 3,000 without a
    # retry delay; services refuse calls by their own limits, with a retry delay.
    ("grpc.server.max_pending_requests", 32_768),
    ("grpc.server.max_pending_requests_hard_limit", 65_536),
    # By default, calls that wait for 30 s fail as INTERNAL. Callers' deadlines end them instead.
    ("grpc.server_max_unrequested_time_in_server", 86_400),
    # Otherwise two servers could share a port unnoticed.
    ("grpc.so_reuseport", 0),
]
# Limits how long a client stays connected whose certificate is no longer trusted; calls in flight complete.
_TLS_OPTIONS = [("grpc.max_connection_age_ms", 3_600_000)]

Deserialiser = Callable[[bytes], Any]


def dial(
    address: str, *, tls: ClientTLS | None = None, traced: bool = True, name: str = "", retries: bool = False
) -> grpc.aio.Channel:
    """An asynchronous channel to `host:port` or `unix:/path`; unix sockets are never encrypted.

    Traced calls can't wait for a server's initial metadata: the interceptors wait for the end of the call.

    name: name that the server's certificate must have, instead of the address. retries: whether undelivered calls of
    a gateway are retried.
    """
    from opentelemetry.instrumentation.grpc import aio_client_interceptors  # blocking clients need not load it

    interceptors = [*aio_client_interceptors(), _UnaryEnd(), _StreamEnd()] if traced else None
    options = _client_options(address, retries)
    if tls is None or address.startswith("unix:"):
        return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
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


def dial_sync(address: str, *, tls: ClientTLS | None = None, retries: bool = False) -> grpc.Channel:
    """A blocking channel with the options of `dial`."""
    options = _client_options(address, retries)
    if tls is None or address.startswith("unix:"):
        return grpc.insecure_channel(address, options=options)
    return tls.channel(lambda credentials: grpc.secure_channel(address, credentials, options=options))


def _client_options(address: str, retries: bool) -> list[tuple[str, Any]]:
    options = _RETRYING_OPTIONS if retries else _CLIENT_OPTIONS
    if not address.startswith("unix:"):
        return options
    return [*(option for option in options if option[0] != _LOCAL_BACKOFF[0]), _LOCAL_BACKOFF]


class Call(Protocol):
    """What is read of a `grpc.aio.ServicerContext`."""

    def time_remaining(self) -> float | None:
        """Seconds until the caller's deadline; None without one."""
        ...


def time_remaining(call: Call | None) -> float | None:
    """Seconds until the caller's deadline; None without one, as for a caller in this process (`call` is None).

    gRPC subtracts two readings of the wall clock, and a clock that jumps between them leaves nothing or a day (28 of
    13,759 readings while the clock jumped every 0.5 ms). gRPC itself ends a call at its deadline by a clock that does
    not jump, so the longer of two answers is safe.
    """
    readings = [call.time_remaining() for _ in range(2)] if call else []
    longest = max((seconds for seconds in readings if seconds is not None), default=_NO_DEADLINE)
    return longest if longest < _NO_DEADLINE else None


def handlers(
    service: descriptor.ServiceDescriptor,
    servicer: object,
    deserialisers: Mapping[str, Deserialiser] | None = None,
    serialisers: Mapping[str, Callable[[Any], bytes]] | None = None,
) -> grpc.GenericRpcHandler:
    """Binds a servicer's methods to a service by name, with other deserialisers and serialisers for some methods."""
    table = {}
    for method in service.methods:
        request = message_factory.GetMessageClass(method.input_type)
        response = message_factory.GetMessageClass(method.output_type)
        kind = "_".join("stream" if many else "unary" for many in (method.client_streaming, method.server_streaming))
        table[method.name] = getattr(grpc, f"{kind}_rpc_method_handler")(
            _with_status(getattr(servicer, method.name), method.client_streaming, method.server_streaming),
            request_deserializer=_reader((deserialisers or {}).get(method.name, request.FromString)),
            response_serializer=(serialisers or {}).get(method.name, response.SerializeToString),
        )
    return grpc.method_handlers_generic_handler(service.full_name, table)


def _reader(parse: Deserialiser) -> Deserialiser:
    def read(data: bytes) -> Any:
        """The message, or an error for `_readable` to raise: raised here, it would cause UNKNOWN and a traceback."""
        try:
            return parse(data)
        except (DecodeError, ValueError) as error:
            rejected.note("grpc_message")
            return InvalidArgument(f"the request is malformed: {error}")

    return read


def _readable(request: Any) -> Any:
    if isinstance(request, InvalidArgument):
        raise request
    return request


async def _all_readable(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _readable(request)


def _with_status(method: Callable[..., Any], takes_stream: bool, streams: bool) -> Callable[..., Any]:
    """Turns a ServiceError into its status, and any other error into INTERNAL with a log record."""

    @contextlib.asynccontextmanager
    async def reported(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        try:
            yield
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            telemetry.record_error(error)
            if isinstance(error, ServiceError):
                await context.abort(error.status, errors.details(error), errors.trailing_metadata(error))
            log.exception("unexpected error in %s", method.__qualname__)
            await context.abort(grpc.StatusCode.INTERNAL, f"internal error: {type(error).__name__}")

    readable = _all_readable if takes_stream else _readable

    async def unary(request: Any, context: grpc.aio.ServicerContext) -> Any:
        async with reported(context):
            return await method(readable(request), context)

    async def stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        async with reported(context):
            async for response in method(readable(request), context):
                yield response

    # A coroutine that streams writes its responses to the context itself.
    return stream if streams and not inspect.iscoroutinefunction(method) else unary


class _Health(health.aio.HealthServicer):
    """The library's servicer lacks List, and before 1.82 its stubs lack the messages."""

    async def List(self, request: "health_pb2.HealthListRequest", context: object) -> "health_pb2.HealthListResponse":
        """The status of every service that Check knows."""
        statuses = {
            name: health_pb2.HealthCheckResponse(status=status) for name, status in self._server_status.items()
        }
        return health_pb2.HealthListResponse(statuses=statuses)


class Beside(Protocol):
    """Another listener of the process that serves and drains together with the gRPC server."""

    name: str

    async def start(self) -> list[str]:
        """Starts to listen; returns the addresses, with port 0 resolved. Raises OSError."""

    async def stop(self, seconds: float) -> None:
        """Refuses new calls; calls in flight may take `seconds` to complete."""


async def serve(
    name: str,
    addresses: Sequence[str],
    services: Mapping[str, grpc.GenericRpcHandler],
    *,
    drain_seconds: float,
    on_stop: Callable[[float], Awaitable[None]] | None = None,
    on_drain: Callable[[], Awaitable[None]] | None = None,
    tls: ServerTLS | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    beside: Sequence[Beside] = (),
    failure: "asyncio.Future[None] | None" = None,
) -> None:
    """Serves until SIGTERM or SIGINT, then drains: health becomes NOT_SERVING, calls in flight get `drain_seconds`.

    Prints one line `<name> serving on <address> [<address>]` once it accepts calls, with port 0 resolved, and one
    line for each other listener of the process, in `beside`. Raises OSError if an address can't be bound, or a
    certificate can't be used.

    Args:
        on_stop: called with half of the drain's seconds, while new calls are still accepted.
        on_drain: called after all calls have ended.
        tls: applies to all ports, but not to unix sockets.
        interceptors: run after those of telemetry.
        failure: when it fails, health becomes NOT_SERVING, calls in flight end with UNAVAILABLE, neither callback
            runs, and its error is raised.
    """
    # Clients need not load these.
    from grpc_reflection.v1alpha import reflection, reflection_pb2
    from opentelemetry.instrumentation.grpc import aio_server_interceptor, filters

    credentials = tls.credentials() if tls else None
    traced = aio_server_interceptor(filter_=filters.negate(filters.health_check()))
    server = grpc.aio.server(
        options=[*_SERVER_OPTIONS, *(_TLS_OPTIONS if tls else [])],
        interceptors=[traced, *interceptors],
    )
    described = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
    checks = _Health()
    names = [*services, health.SERVICE_NAME]
    reflected = reflection.aio.ReflectionServicer([*names, reflection.SERVICE_NAME])
    server.add_generic_rpc_handlers((*services.values(), handlers(_HEALTH, checks), handlers(described, reflected)))
    bound = [_bind(server, address, credentials) for address in addresses]
    others = [(other.name, await other.start()) for other in beside]
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(logs.unhandled)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await server.start()
    for service in ("", *names):
        await checks.set(service, health_pb2.HealthCheckResponse.SERVING)
    for listener, where in ((name, bound), *others):
        process.say(f"{listener} serving on {' '.join(where)}", sys.stdout)
    stopping = asyncio.create_task(stop.wait())
    awaited: list[asyncio.Future[Any]] = [stopping, *([failure] if failure is not None else [])]
    await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
    if failure is not None and failure.done():
        stopping.cancel()
        await checks.enter_graceful_shutdown()
        await asyncio.gather(server.stop(0), *(other.stop(0) for other in beside))
        failure.result()
    log.info("%s is draining for up to %g s", name, drain_seconds)
    await checks.enter_graceful_shutdown()
    if on_stop is not None:
        started = loop.time()
        await on_stop(drain_seconds / 2)
        drain_seconds -= loop.time() - started
    drain_seconds = max(drain_seconds, 0.0)
    await asyncio.gather(server.stop(drain_seconds), *(other.stop(drain_seconds) for other in beside))
    if on_drain is not None:
        await on_drain()
    process.say(f"{name} stopped", sys.stderr)


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> str:
    try:
        if credentials is None or address.startswith("unix:"):
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(f"can't listen on {address}: is the address in use by another process?") from error
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
