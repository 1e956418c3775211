"""Who may call what: bearer tokens identify the caller before a request is read; roles allow methods."""

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

import grpc
from opentelemetry import metrics

from fusionkv.protos.runtime import errors
from fusionkv.protos.runtime.errors import PermissionDenied, ServiceError, Unauthenticated

_refused = metrics.get_meter(__name__).create_counter(
    "fusionkv.gateway.refused", description="calls refused for their bearer token or role, by status"
)
# gRPC limits the metadata of a call to 8 KiB.
_MAX_TOKEN = 8192
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
# Also the name of a tenant's folder; appears in messages and in the quotas file.
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Role(StrEnum):
    APP = "app"
    """May ingest documents and ask questions."""
    OPERATOR = "operator"
    """May call every method: also delete, read statistics and list methods."""
    WORKER = "worker"
    """May encode corpora ahead of time, but not read documents."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a token, who can reach only the data of `tenant`."""

    role: Role
    tenant: str


GATEWAY = "/gateway.v1.GatewayService/"
_ALL_ROLES = frozenset(Role)
_APPS = frozenset({Role.APP, Role.OPERATOR})
_OPERATORS = frozenset({Role.OPERATOR})
# A method that is neither here nor in OPEN is refused to every role.
ROLES = {
    GATEWAY + "Ingest": _APPS,
    GATEWAY + "Upload": _APPS,
    GATEWAY + "Precompute": _ALL_ROLES,
    # Returns the tokens of all chunks.
    GATEWAY + "PlanPrecompute": _OPERATORS,
    GATEWAY + "Move": _OPERATORS,
    GATEWAY + "Delete": _OPERATORS,
    GATEWAY + "List": _ALL_ROLES,
    GATEWAY + "Retrieve": _APPS,
    GATEWAY + "Generate": _APPS,
    GATEWAY + "GetModel": _ALL_ROLES,
    GATEWAY + "Stats": _OPERATORS,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _OPERATORS,
}
# Health probes of load balancers and Kubernetes carry no token, and learn only whether the gateway is serving.
OPEN = frozenset(f"/grpc.health.v1.Health/{method}" for method in ("Check", "Watch", "List"))

CALLER: ContextVar[Caller | None] = ContextVar("fusionkv.caller", default=None)
"""The caller of the call that the current task serves; None if the gateway requires no token."""


# host:port and unix sockets, as the services and gRPC write them.
_HOST = r"(?:%5B[\w%:.]+%5D|\[[\w%:.]+\]|\b[A-Za-z0-9][\w.-]*)"
_ADDRESS = re.compile(rf"(?:\bipv[46]:|\bdns:/*)?{_HOST}:\d{{1,5}}\b|\bunix:\S*[^\s:]")


def withheld(text: str) -> str:
    """A message of a service behind the gateway, as the current caller may read it: only operators see addresses."""
    caller = CALLER.get()
    return text if caller is None or caller.role is Role.OPERATOR else _ADDRESS.sub("[address]", text)


TENANT_FORM = "1 to 64 characters of A-Z a-z 0-9 . _ -, beginning with a letter or digit"


def is_tenant(name: str) -> bool:
    return _TENANT.fullmatch(name) is not None


class Verifier(Protocol):
    """Verifies tokens of one kind."""

    async def caller(self, token: str) -> Caller | None:
        """The owner of a token; None if the token is not of this kind.

        Raises:
            Unauthenticated: the token is of this kind but no longer valid.
            PermissionDenied: the token is valid but names no role or tenant.
            Unavailable: the token can't be verified at the moment.
        """


class Bearer:
    """Identifies callers by their tokens and checks their roles. Refusals reveal nothing about other tokens."""

    def __init__(self, verifiers: Sequence[Verifier]) -> None:
        self._verifiers = verifiers

    async def admit(self, authorization: Sequence[str], method: str) -> Caller:
        """The caller that sent these `authorization` values with a call of the method, "/package.Service/Name".

        Raises:
            Unauthenticated: there is not exactly one valid token.
            PermissionDenied: the caller's role may not call the method.
            Unavailable: the token can't be verified at the moment.
        """
        try:
            caller = await self._caller(authorization)
            allowed = ROLES.get(method, frozenset())
            if caller.role not in allowed:
                name = method.rpartition("/")[2]
                roles = " and ".join(sorted(allowed)) or "no role"
                raise PermissionDenied(f"the role {caller.role} may not call {name}; allowed: {roles}")
        except ServiceError as error:
            _refused.add(1, {"rpc.grpc.status": error.status.name})
            raise
        return caller

    async def _caller(self, authorization: Sequence[str]) -> Caller:
        if not authorization:
            raise Unauthenticated("a bearer token is required: send the metadata `authorization: Bearer <token>`")
        scheme, _, token = authorization[0].partition(" ")
        well_formed = token.isascii() and 0 < len(token) <= _MAX_TOKEN
        if len(authorization) > 1 or scheme.lower() != "bearer" or not well_formed:
            raise Unauthenticated("invalid authorization metadata: send `authorization: Bearer <token>` exactly once")
        for verifier in self._verifiers:
            if (caller := await verifier.caller(token)) is not None:
                return caller
        raise Unauthenticated("the token is not valid")


class BearerInterceptor(grpc.aio.ServerInterceptor):
    """Passes on a call only if it carries the token of a caller that may call the method."""

    def __init__(self, bearer: Bearer) -> None:
        self._bearer = bearer

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        method = handler_call_details.method
        if method in OPEN:
            return await continuation(handler_call_details)
        metadata: Any = handler_call_details.invocation_metadata
        authorization = [value for key, value in metadata or () if key == "authorization"]
        try:
            caller = await self._bearer.admit(authorization, method)
        except ServiceError as error:
            return _refusal(error)
        # The method runs in this same task, so the context variable reaches it.
        CALLER.set(caller)
        return await continuation(handler_call_details)


def _refusal(error: ServiceError) -> Handler:
    async def refuse(requests: object, context: grpc.aio.ServicerContext) -> AsyncGenerator[bytes]:
        await context.abort(error.status, errors.details(error), errors.trailing_metadata(error))
        yield b""  # unreachable, as abort raises; makes the function a generator, as a streaming method must be

    # A streaming handler even for unary methods: it never reads the request, which may have 64 MiB.
    return grpc.stream_stream_rpc_method_handler(refuse)
