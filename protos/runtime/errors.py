"""Errors that know their gRPC status; everything else that escapes a servicer is INTERNAL."""

import asyncio
import math
from typing import Any

import grpc

from fusionkv.protos.runtime import cancellation


class ServiceError(Exception):
    """An error with a status. The message is for the caller: what is wrong, and what to do."""

    status = grpc.StatusCode.INTERNAL

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        """`retry_after`: seconds after which the same call may succeed, where that is known."""
        super().__init__(message)
        self.retry_after = retry_after


class InvalidArgument(ServiceError):
    status = grpc.StatusCode.INVALID_ARGUMENT


class Unauthenticated(ServiceError):
    status = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(ServiceError):
    status = grpc.StatusCode.PERMISSION_DENIED


class NotFound(ServiceError):
    status = grpc.StatusCode.NOT_FOUND


class AlreadyExists(ServiceError):
    status = grpc.StatusCode.ALREADY_EXISTS


class FailedPrecondition(ServiceError):
    status = grpc.StatusCode.FAILED_PRECONDITION


class ResourceExhausted(ServiceError):
    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class DataLoss(ServiceError):
    status = grpc.StatusCode.DATA_LOSS


class Unavailable(ServiceError):
    status = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(ServiceError):
    status = grpc.StatusCode.DEADLINE_EXCEEDED


_BY_STATUS = {c.status: c for c in ServiceError.__subclasses__()}
# Trailing metadata of a refusal: milliseconds, as a decimal number. Plain metadata and not google.rpc.RetryInfo, so
# that a caller in any language reads it without another protobuf package.
_RETRY_AFTER = "retry-after-ms"
# A status travels in HTTP/2 headers, of which gRPC takes 8 KiB, with three bytes for each that is not ASCII.
_MOST_DETAILS = 2000


def details(error: Exception) -> str:
    """The message as it may travel: cut, where it quotes a long text that the caller sent."""
    text = str(error)
    data = text.encode(errors="replace")
    return text if len(data) <= _MOST_DETAILS else data[:_MOST_DETAILS].decode(errors="ignore") + "..."


def trailing_metadata(error: ServiceError) -> tuple[tuple[str, str], ...]:
    """What travels beside the status: when to try again."""
    if error.retry_after is None:
        return ()
    return ((_RETRY_AFTER, str(math.ceil(1000 * error.retry_after))),)


def from_rpc(error: grpc.RpcError, doing: str) -> ServiceError:
    """The same error on this side of a call; `doing` says what was tried ("reach the worker at ...").

    Raises:
        CancelledError: the caller's task was cancelled. Of a call with interceptors grpc.aio may say so by a status.
    """
    status = error.code()
    if status is grpc.StatusCode.CANCELLED:
        if cancellation.requests():
            raise asyncio.CancelledError from error
        # A server that is past its drain time ends what is left so.
        return Unavailable(f"{doing}: the call was dropped; try again")
    kind = _BY_STATUS.get(status, ServiceError)
    trailing: Any = error.trailing_metadata() or ()
    said = dict(trailing).get(_RETRY_AFTER)
    # A peer of another kind may say anything there.
    after = int(said) / 1000 if isinstance(said, str) and said.isascii() and said.isdigit() else None
    return kind(f"{doing}: {error.details() or status.name}", retry_after=after)
