"""Asks every call for a bearer token, before anything of the call is read."""

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
    "fusionkv.gateway.refused", description="calls without the right token, by status"
)
# gRPC's own limit on all metadata of a call is 8 KiB.
_MOST_TOKEN = 8192
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


class Verifier(Protocol):
    """Knows one kind of token."""

    async def caller(self, token: str) -> Caller | None:
        """Whose token it is; None when it is none of this kind.

        Raises:
            Unauthenticated: it is of this kind and no longer valid.
            PermissionDenied: it is valid and says nothing that gives a right here.
            Unavailable: it can't be told now.
        """


class Bearer:
    """Knows callers by the tokens that they send, and what they may call. Refusals say nothing of other tokens."""

    def __init__(self, verifiers: Sequence[Verifier]) -> None:
        self._verifiers = verifiers

    async def admit(self, given: Sequence[str], method: str) -> Caller:
        """Who sent these `authorization` values with a call of the method, "/package.Service/Name".

        Raises:
            Unauthenticated: there is not one valid token.
            PermissionDenied: its role may not make the call.
            Unavailable: the token can't be checked now.
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
            raise Unauthenticated("a bearer token is needed: send metadata `authorization: Bearer <token>`")
        scheme, _, token = given[0].partition(" ")
        whole = token.isascii() and 0 < len(token) <= _MOST_TOKEN
        if len(given) > 1 or scheme.lower() != "bearer" or not whole:
            raise Unauthenticated("bad authorization metadata: send `authorization: Bearer <token>` once")
        for verifier in self._verifiers:
            if (caller := await verifier.caller(token)) is not None:
                return caller
        raise Unauthenticated("the token is not valid")


class BearerInterceptor(grpc.aio.ServerInterceptor):
    """Lets a call through that carries a token of a caller who may make it."""

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
        # The method runs in this same task, so it sees who calls.
        access.enter(caller)
        return await continuation(handler_call_details)


def _refusal(error: ServiceError) -> Handler:
    async def refuse(requests: object, context: grpc.aio.ServicerContext) -> AsyncGenerator[bytes]:
        await context.abort(error.status, errors.details(error), errors.trailing_metadata(error))
        yield b""  # never reached, as abort raises; it makes the method the generator that a stream has to be

    # As a stream, of which nothing is read, also where the method takes one message: that may have 64 MiB.
    return grpc.stream_stream_rpc_method_handler(refuse)
