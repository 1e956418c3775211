"""Authenticates every gRPC call by its bearer token, before the request is read."""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeAlias

import grpc
from opentelemetry import metrics

from fusionkv.gateway.auth import access
from fusionkv.gateway.auth.access import Caller
from fusionkv.protos.runtime import errors
from fusionkv.protos.runtime.errors import ServiceError, Unauthenticated

log = logging.getLogger(__name__)
_refused = metrics.get_meter(__name__).create_counter(
    "fusionkv.gateway.refused", description="calls refused for their bearer token or role, by status"
)
# gRPC limits the metadata of a call to 8 KiB.
_MAX_TOKEN = 8192
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


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

    async def admit(self, given: Sequence[str], method: str) -> Caller:
        """The caller that sent these `authorization` values with a call of the method, "/package.Service/Name".

        Raises:
            Unauthenticated: there is not exactly one valid token.
            PermissionDenied: the caller's role may not call the method.
            Unavailable: the token can't be verified at the moment.
        """
        try:
            caller = await self._caller(given)
            access.check(caller, method)
        except ServiceError as error:
            _refused.add(1, {"rpc.grpc.status": error.status.name})
            raise
        return caller

    async def _caller(self, given: Sequence[str]) -> Caller:
        if not given:
            raise Unauthenticated("a bearer token is required: send the metadata `authorization: Bearer <token>`")
        scheme, _, token = given[0].partition(" ")
        well_formed = token.isascii() and 0 < len(token) <= _MAX_TOKEN
        if len(given) > 1 or scheme.lower() != "bearer" or not well_formed:
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
        if method in access.OPEN:
            return await continuation(handler_call_details)
        metadata: Any = handler_call_details.invocation_metadata
        given = [value for key, value in metadata or () if key == "authorization"]
        try:
            caller = await self._bearer.admit(given, method)
        except ServiceError as error:
            return _refusal(error)
        # The method runs in this same task, so the context variable reaches it.
        access.CALLER.set(caller)
        return await continuation(handler_call_details)


def _refusal(error: ServiceError) -> Handler:
    async def refuse(requests: object, context: grpc.aio.ServicerContext) -> AsyncGenerator[bytes]:
        await context.abort(error.status, errors.details(error), errors.trailing_metadata(error))
        yield b""  # unreachable, as abort raises; makes the function a generator, as a streaming method must be

    # A streaming handler even for unary methods: it never reads the request, which may have 64 MiB.
    return grpc.stream_stream_rpc_method_handler(refuse)
