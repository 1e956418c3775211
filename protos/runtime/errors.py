"""Errors with a gRPC status; any other error that a servicer raises becomes INTERNAL."""

import asyncio
import errno
import math
import re
from typing import Any

import grpc

from fusionkv.protos.runtime import cancellation


class ServiceError(Exception):
    """An error with a gRPC status. The message tells the caller what is wrong and what to do."""

    status = grpc.StatusCode.INTERNAL

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        """`retry_after` is the number of seconds after which the call may succeed, if known."""
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
_BY_NUMBER = {status.value[0]: kind for status, kind in _BY_STATUS.items()}
_EXHAUSTED = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_UNAVAILABLE = {errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
# Trailing metadata of a refusal: milliseconds as a decimal number. Plain metadata instead of google.rpc.RetryInfo,
# which would require another protobuf package in every client.
_RETRY_AFTER = "retry-after-ms"
# A status message travels in HTTP/2 headers, which gRPC limits to 8 KiB; a non-ASCII byte takes three bytes.
_MAX_DETAILS = 2000


def first_line(error: Exception) -> str:
    """The first line of an error's message, or the error's class without one."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def printable(text: str) -> str:
    """The text with escapes for line ends, colour codes and other characters that don't print: one line of a log."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def error_type(error: Exception) -> str:
    """The name of a service error's status, or of any other error's class."""
    return error.status.name if isinstance(error, ServiceError) else type(error).__name__


def details(error: Exception) -> str:
    """The message for the status, truncated if it quotes a long input."""
    text = str(error)
    data = text.encode(errors="replace")
    return text if len(data) <= _MAX_DETAILS else data[:_MAX_DETAILS].decode(errors="ignore") + "..."


def trailing_metadata(error: ServiceError) -> tuple[tuple[str, str], ...]:
    """Trailing metadata of the status: the retry delay."""
    return () if error.retry_after is None else ((_RETRY_AFTER, str(math.ceil(1000 * error.retry_after))),)


def of_number(status: int, message: str) -> ServiceError:
    """The error for a status code of gRPC as a number; INTERNAL for one that has no class here."""
    return _BY_NUMBER.get(status, ServiceError)(message)


def from_rpc(error: grpc.RpcError, doing: str) -> ServiceError:
    """Converts a gRPC error to a service error; `doing` names the attempt ("reach the worker at ...").

    Raises CancelledError if the caller's task was cancelled, which grpc.aio with interceptors may report as a status.
    """
    status = error.code()
    if status is grpc.StatusCode.CANCELLED:
        if cancellation.requests():
            raise asyncio.CancelledError from error
        # A server ends remaining calls this way after its drain time.
        return Unavailable(f"{doing}: the call was dropped; try again")
    kind = _BY_STATUS.get(status, ServiceError)
    trailing: Any = error.trailing_metadata() or ()
    value = dict(trailing).get(_RETRY_AFTER)
    # Other servers may send anything under this key.
    sensible = isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value)
    after = int(sensible[0]) / 1000 if sensible else None
    return kind(f"{doing}: {error.details() or status.name}", retry_after=after)


def from_http(status: int, message: str) -> ServiceError:
    """The error for an HTTP status with which a server refused a request."""
    if status in (429, 503):
        return ResourceExhausted(message, retry_after=1.0)
    return Unavailable(message) if status >= 500 else FailedPrecondition(message)


def from_os(number: int, message: str) -> ServiceError | None:
    """The error for an error number of the operating system; None unless a resource is exhausted or unavailable."""
    if number in _EXHAUSTED:
        return ResourceExhausted(message)
    return Unavailable(message) if number in _UNAVAILABLE else None
