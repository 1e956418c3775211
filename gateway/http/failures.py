"""Errors in OpenAI's format: JSON with a message, a type and a code, and the matching HTTP status."""

import logging
import math
from typing import Any

import grpc

from fusionkv.gateway.http.chat import BadRequest
from fusionkv.protos.observe import telemetry
from fusionkv.protos.runtime import errors
from fusionkv.protos.runtime.errors import ServiceError

log = logging.getLogger(__name__)
_S = grpc.StatusCode
# HTTP status, type and code. FAILED_PRECONDITION is 400: clients retry after 409.
_STATUSES: dict[grpc.StatusCode, tuple[int, str, str | None]] = {
    _S.INVALID_ARGUMENT: (400, "invalid_request_error", None),
    _S.FAILED_PRECONDITION: (400, "invalid_request_error", "failed_precondition"),
    _S.UNAUTHENTICATED: (401, "invalid_request_error", "invalid_api_key"),
    _S.PERMISSION_DENIED: (403, "invalid_request_error", "permission_denied"),
    _S.NOT_FOUND: (404, "invalid_request_error", "model_not_found"),
    _S.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "rate_limit_exceeded"),
    _S.UNAVAILABLE: (503, "server_error", "unavailable"),
    _S.DEADLINE_EXCEEDED: (504, "server_error", "deadline_exceeded"),
}
_UNEXPECTED = (500, "server_error", None)


def status(error: Exception) -> int:
    return _known(error)[0]


def record(error: Exception) -> None:
    """Records an error in the current span if it is the gateway's fault, and in the log if it is unexpected."""
    if status(error) >= 500:
        telemetry.record_error(error)
    if not isinstance(error, ServiceError):
        log.error("unexpected error in an HTTP request", exc_info=error)


def message(error: Exception) -> str:
    """The error's message for the caller; of an unexpected error only its type."""
    return errors.details(error) if isinstance(error, ServiceError) else f"internal error: {type(error).__name__}"


def body(error: Exception) -> dict[str, Any]:
    _, kind, code = _known(error)
    param = error.param if isinstance(error, BadRequest) else None
    return of(message(error), kind, code, param)


def of(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def headers(error: Exception) -> dict[str, str]:
    """Headers for the retry delay, if it is known, and for the authentication scheme."""
    headers: dict[str, str] = {}
    if isinstance(error, ServiceError) and error.retry_after is not None:
        # Retry-After is HTTP's, in whole seconds; OpenAI's clients prefer Retry-After-Ms.
        headers["Retry-After"] = str(math.ceil(error.retry_after))
        headers["Retry-After-Ms"] = str(math.ceil(1000 * error.retry_after))
    if _known(error)[0] == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def _known(error: Exception) -> tuple[int, str, str | None]:
    return _STATUSES.get(error.status, _UNEXPECTED) if isinstance(error, ServiceError) else _UNEXPECTED
