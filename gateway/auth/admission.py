"""Admission of calls, whatever their protocol: limits, quotas, counts by tenant, and one log record for each."""

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry import metrics

from fusionkv.gateway.auth import access
from fusionkv.gateway.auth.tenants import Shares, Tenant, Tenants
from fusionkv.gateway.config import GatewayConfig
from fusionkv.protos.deadline import NO_DEADLINE, Deadline
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    ResourceExhausted,
    ServiceError,
    Unavailable,
)

log = logging.getLogger(__name__)
_meter = metrics.get_meter(__name__)
_requests = _meter.create_counter("fusionkv.gateway.requests", description="calls, by method")
_failures = _meter.create_counter("fusionkv.gateway.failures", description="failed calls, by method and status")
_in_flight = _meter.create_up_down_counter("fusionkv.gateway.in_flight", description="calls being answered")
# Errors that may name other services. Those of other classes quote what the caller sent, if no service raised them.
_FROM_BEHIND = (Unavailable, ResourceExhausted, DeadlineExceeded, FailedPrecondition)


@dataclass(slots=True)
class Counts:
    """What Stats says of a tenant's calls."""

    served: int = 0
    failed: int = 0
    degraded: int = 0


@dataclass(frozen=True, slots=True)
class AdmittedCall:
    """A call that was let in, of one tenant.

    Attributes:
        counts: of the tenant.
        log_fields: fields of the call's log record, to add to.
    """

    tenant: Tenant
    deadline: Deadline
    counts: Counts
    log_fields: dict[str, Any] = field(default_factory=dict)


class CallAdmission:
    """Limits the calls in flight, and counts calls by tenant."""

    def __init__(self, config: GatewayConfig, tenants: Tenants) -> None:
        self._tenants = tenants
        self._seconds = config.request_seconds
        self._in_flight = Shares(config.max_requests, spare=int(config.several_tenants))
        self._counts = defaultdict[str, Counts](Counts)  # by the tenant's name

    @property
    def counts(self) -> Collection[Counts]:
        """The counts of each tenant that has called."""
        return self._counts.values()

    @contextlib.asynccontextmanager
    async def admitted(self, method: str, deadline: Deadline = NO_DEADLINE) -> AsyncIterator[AdmittedCall]:
        """Lets a call of the current task's caller in, before its request is read.

        Args:
            deadline: of the caller; without one, `request_seconds` from now is the deadline.

        Raises:
            ResourceExhausted: too many calls are in flight, or the tenant is over its quota. Stats is neither limited
                nor counted.
            Unavailable: the tenant's corpora can't be opened.
        """
        if not deadline.exists:
            deadline = Deadline.after(self._seconds)
        name = self._tenants.name()
        counts = self._counts[name]
        if method == "Stats":
            yield AdmittedCall(await self._tenants.current(), deadline, counts)
            return
        log_fields: dict[str, Any] = {}
        with _recorded(method, counts, log_fields), self._place(name):
            tenant = await self._tenants.current()
            tenant.meter.admit()
            yield AdmittedCall(tenant, deadline, counts, log_fields)

    @contextlib.contextmanager
    def _place(self, tenant: str) -> Iterator[None]:
        """A place among the calls in flight. Raises ResourceExhausted if there is none."""
        with self._in_flight.holding(tenant) as held:
            if not held:
                raise ResourceExhausted(
                    f"{self._in_flight.held} requests are in flight; try again later", retry_after=0.5
                )
            _in_flight.add(1)
            try:
                yield
            finally:
                _in_flight.add(-1)


@contextlib.contextmanager
def _recorded(method: str, counts: Counts, log_fields: dict[str, Any]) -> Iterator[None]:
    """Counts and logs a call with the status that it ends with, and hides addresses in its error."""
    began, status = time.perf_counter(), "CANCELLED"
    counts.served += 1
    _requests.add(1, {"rpc.method": method})
    try:
        yield
        status = "OK"
    except ServiceError as error:
        status = error.status.name
        if isinstance(error, _FROM_BEHIND) or isinstance(error.__cause__, grpc.RpcError):
            error.args = (access.withheld(str(error)),)
        raise
    except ConnectionError:  # an HTTP client has left
        raise
    except Exception:
        status = "INTERNAL"
        raise
    finally:
        if status not in ("OK", "CANCELLED"):
            counts.failed += 1
            _failures.add(1, {"rpc.method": method, "rpc.grpc.status": status})
        seconds = time.perf_counter() - began
        log_fields |= {"method": method, "status": status, "seconds": round(seconds, 6)}
        answer = ""
        if "ttft" in log_fields:
            answer = "; {recipe}, first token after {ttft:.3f} s, {tokens} tokens".format(**log_fields)
        log.info("%s %s after %.3f s%s", method, status, seconds, answer, extra={logs.FIELDS: log_fields})
