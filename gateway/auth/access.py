"""Who calls, and who may call what: the caller of the call in progress, roles, and the roles of every method."""

import re
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum

from fusionkv.protos.runtime.errors import PermissionDenied

# Names a tenant's folder, and goes into messages and the names of quotas.
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Role(StrEnum):
    APP = "app"
    """Ingests documents and asks questions."""
    OPERATOR = "operator"
    """Does everything: deletes, reads the gateway's figures, lists its methods."""
    WORKER = "worker"
    """Encodes corpora ahead of time, and reads no document."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose token it was; `name` is for logs. Everything the caller does happens within its tenant."""

    name: str
    role: Role
    tenant: str


_GATEWAY = "/gateway.v1.GatewayService/"
_EVERYBODY = frozenset(Role)
_APPS = frozenset({Role.APP, Role.OPERATOR})
_OPERATORS = frozenset({Role.OPERATOR})
ADMIN_PAGES = "/fusionkv.admin/Pages"
# A method that is in neither of the two is refused, whoever calls.
ROLES = {
    _GATEWAY + "Ingest": _APPS,
    _GATEWAY + "Precompute": _EVERYBODY,
    # It gives the tokens of all chunks.
    _GATEWAY + "PlanPrecompute": _OPERATORS,
    _GATEWAY + "Move": _OPERATORS,
    _GATEWAY + "Delete": _OPERATORS,
    _GATEWAY + "List": _EVERYBODY,
    _GATEWAY + "Retrieve": _APPS,
    _GATEWAY + "Generate": _APPS,
    _GATEWAY + "Stats": _OPERATORS,
    ADMIN_PAGES: _OPERATORS,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _OPERATORS,
}
# Probes of load balancers and of Kubernetes carry no token, and learn only whether the gateway serves.
OPEN = frozenset(f"/grpc.health.v1.Health/{method}" for method in ("Check", "Watch", "List"))

_caller: ContextVar[Caller | None] = ContextVar("fusionkv.caller", default=None)


def enter(caller: Caller) -> None:
    """Notes who makes the call that the current task serves."""
    _caller.set(caller)


def caller() -> Caller | None:
    """Who makes the call in progress; None where the gateway asks for no token."""
    return _caller.get()


def check(caller: Caller, method: str) -> None:
    """Raises PermissionDenied unless the caller's role may call the method, "/package.Service/Name"."""
    allowed = ROLES.get(method, frozenset())
    if caller.role not in allowed:
        name = method.rpartition("/")[2]
        may = " and ".join(sorted(allowed)) or "nobody"
        raise PermissionDenied(f"the role {caller.role} may not call {name}; {may} may")


TENANT_FORM = "1 to 64 of A-Z a-z 0-9 . _ -, a letter or digit first"


def is_tenant(name: str) -> bool:
    """Whether it has the form of a tenant's name."""
    return _TENANT.fullmatch(name) is not None
