"""Errors that know their gRPC status; everything else that escapes a servicer is INTERNAL."""

import grpc


class ServiceError(Exception):
    """An error with a status. The message is for the caller: what is wrong, and what to do."""

    status = grpc.StatusCode.INTERNAL


class InvalidArgument(ServiceError):
    status = grpc.StatusCode.INVALID_ARGUMENT


class NotFound(ServiceError):
    status = grpc.StatusCode.NOT_FOUND


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


def from_rpc(error: grpc.RpcError, doing: str) -> ServiceError:
    """The same error on this side of a call; `doing` says what was tried ("reach the worker at ...")."""
    status = error.code()
    kind = _BY_STATUS.get(status, ServiceError)
    return kind(f"{doing}: {error.details() or status.name}")
