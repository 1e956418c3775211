"""Bearer tokens that an OIDC provider signs (JWT): their signature, issuer, audience and time checked by PyJWT."""

from collections.abc import Mapping
from typing import Any

import jwt

from fusionkv.gateway.auth.access import TENANT_FORM, Caller, Role, is_tenant
from fusionkv.gateway.auth.jwks import KeyFile, KeyURL
from fusionkv.protos.runtime.errors import PermissionDenied, Unauthenticated

# Signatures by a private key only: with a shared secret whoever can check a token could make one.
_ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
# Clocks of two machines differ by so much.
_LEEWAY_SECONDS = 30


class JWTTokens:
    """Tokens of one issuer for one audience, whose claims name a role and a tenant."""

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
            # Said only of tokens whose signature is right.
            raise Unauthenticated("the token has expired: get a new one") from None
        except (jwt.PyJWTError, ValueError, TypeError):
            return None
        return self._caller(claims)

    def _caller(self, claims: Mapping[str, Any]) -> Caller:
        named = claims.get(self._role_claim)
        roles = [role for role in Role if role == named or (isinstance(named, list) and role in named)]
        if len(roles) != 1:
            raise PermissionDenied(
                f"the token's claim {self._role_claim!r} must name one of the roles {', '.join(Role)}"
            )
        tenant = claims.get(self._tenant_claim)
        if not isinstance(tenant, str) or not is_tenant(tenant):
            raise PermissionDenied(f"the token's claim {self._tenant_claim!r} must name a tenant: {TENANT_FORM}")
        return Caller(str(claims.get("sub", ""))[:64], roles[0], tenant)
