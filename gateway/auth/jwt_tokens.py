"""Bearer tokens signed by an OIDC provider (JWT). PyJWT checks their signature, issuer, audience and times."""

from collections.abc import Mapping
from typing import Any

import jwt

from fusionkv.gateway.auth.access import TENANT_FORM, Caller, Role, is_tenant
from fusionkv.gateway.auth.jwks import KeyFile, KeyURL
from fusionkv.protos.runtime.errors import PermissionDenied, Unauthenticated

# Asymmetric algorithms only: with a shared secret, whoever can verify a token can also issue one.
_ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
# Tolerated difference between the clocks of issuer and gateway.
_LEEWAY_SECONDS = 30


class JWTTokens:
    """Verifies tokens of one issuer for one audience; their claims name a role and a tenant."""

    def __init__(
        self, keys: KeyFile | KeyURL, *, issuer: str, audience: str, role_claim: str, tenant_claim: str
    ) -> None:
        self._keys = keys
        self._issuer, self._audience = issuer, audience
        self._role_claim, self._tenant_claim = role_claim, tenant_claim

    async def caller(self, token: str) -> Caller | None:
        try:
            id = jwt.get_unverified_header(token).get("kid")
        except jwt.PyJWTError:
            return None
        key = await self._keys.key(id)
        if key is None:
            return None
        try:
            claims = jwt.decode(
                token,
                key,
                algorithms=_ALGORITHMS,
                issuer=self._issuer,
                audience=self._audience,
                leeway=_LEEWAY_SECONDS,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.ExpiredSignatureError:
            # Reached only if the signature is valid.
            raise Unauthenticated("the token has expired: get a new one") from None
        except (jwt.PyJWTError, ValueError, TypeError):
            return None
        return self._caller(claims)

    def _caller(self, claims: Mapping[str, Any]) -> Caller:
        claim = claims.get(self._role_claim)
        roles = [role for role in Role if role == claim or (isinstance(claim, list) and role in claim)]
        if len(roles) != 1:
            raise PermissionDenied(
                f"the token's claim {self._role_claim!r} must name exactly one of the roles {', '.join(Role)}"
            )
        tenant = claims.get(self._tenant_claim)
        if not isinstance(tenant, str) or not is_tenant(tenant):
            raise PermissionDenied(f"the token's claim {self._tenant_claim!r} must name a tenant: {TENANT_FORM}")
        return Caller(str(claims.get("sub", ""))[:64], roles[0], tenant)
