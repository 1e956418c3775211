"""The caller of the current call, and the roles that may call each method."""

import re
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum

from fusionkv.protos.runtime.errors import PermissionDenied

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
    """The owner of a token. `name` is for logs; the caller can reach only the data of `tenant`."""

    name: str
    role: Role
    tenant: str


_GATEWAY = "/gateway.v1.GatewayService/"
_ALL_ROLES = frozenset(Role)
_APPS = frozenset({Role.APP, Role.OPERATOR})
_OPERATORS = frozenset({Role.OPERATOR})
ADMIN_PAGES = "/fusionkv.admin/Pages"
# A method that is neither here nor in OPEN is refused to every role.
ROLES = {
    _GATEWAY + "Ingest": _APPS,
    _GATEWAY + "Precompute": _ALL_ROLES,
    # Returns the tokens of all chunks.
    _GATEWAY + "PlanPrecompute": _OPERATORS,
    _GATEWAY + "Move": _OPERATORS,
    _GATEWAY + "Delete": _OPERATORS,
    _GATEWAY + "List": _ALL_ROLES,
    _GATEWAY + "Retrieve": _APPS,
    _GATEWAY + "Generate": _APPS,
    _GATEWAY + "Stats": _OPERATORS,
    ADMIN_PAGES: _OPERATORS,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _OPERATORS,
}
# Health probes of load balancers and Kubernetes carry no token, and learn only whether the gateway is serving.
OPEN = frozenset(f"/grpc.health.v1.Health/{method}" for method in ("Check", "Watch", "List"))

CALLER: ContextVar[Caller | None] = ContextVar("fusionkv.caller", default=None)
"""The caller of the call that the current task serves; None if the gateway requires no token."""


def check(caller: Caller, method: str) -> None:
    """Raises PermissionDenied if the caller's role may not call the method, "/package.Service/Name"."""
    allowed = ROLES.get(method, frozenset())
    if caller.role not in allowed:
        name = method.rpartition("/")[2]
        roles = " and ".join(sorted(allowed)) or "no role"
        raise PermissionDenied(f"the role {caller.role} may not call {name}; allowed: {roles}")


TENANT_FORM = "1 to 64 characters of A-Z a-z 0-9 . _ -, beginning with a letter or digit"


def is_tenant(name: str) -> bool:
    return _TENANT.fullmatch(name) is not None
