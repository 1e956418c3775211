"""Verifies bearer tokens: listed in a file, or signed by an OIDC provider (JWT), whose keys are in a JWKS."""

import asyncio
import hashlib
import hmac
import json
import logging
import time
import tomllib
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jwt

from fusionkv.gateway.auth.access import TENANT_FORM, Caller, Role, is_tenant
from fusionkv.protos.runtime import process
from fusionkv.protos.runtime.errors import PermissionDenied, Unauthenticated, Unavailable
from fusionkv.protos.runtime.watched import BadFile, Watched, read_bytes

log = logging.getLogger(__name__)
# Asymmetric algorithms only: with a shared secret, whoever can verify a token can also issue one.
_RSA = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512"]
_ALGORITHMS = [*_RSA, "ES256", "ES384", "ES512", "EdDSA"]
# Tolerated difference between the clocks of issuer and gateway.
_LEEWAY_SECONDS = 30
_MAX_BYTES = 1 << 20
_FETCH_SECONDS = 5.0
# Keys are fetched again at this age, or at once for an unknown key id, but at least _RETRY_SECONDS apart.
_FRESH_SECONDS = 300.0
_RETRY_SECONDS = 10.0
# Older keys are not trusted: an issuer that can't be reached may have withdrawn one of them.
_STALE_SECONDS = 3600.0
# Fields of a token in the file.
_FIELDS = {"name", "role", "sha256", "tenant"}
_LOCAL = {("http", "localhost"), ("http", "127.0.0.1"), ("http", "::1")}


class StaticTokens:
    """Verifies tokens listed in a TOML file (docs/security.md), by their SHA-256.

    A plain hash is enough for tokens of 32 random bytes, which can't be guessed. Tokens themselves are not stored.
    """

    def __init__(self, file: Path) -> None:
        """Raises BadFile if the file can't be read or does not have this form."""
        self._file = file
        self._known = Watched([file], self._read)

    async def caller(self, token: str) -> Caller | None:
        digest = hashlib.sha256(token.encode()).digest()
        owner = None
        # Compare with every entry, so that the time taken reveals neither which one matches nor how much of it.
        for known, caller in self._known.value:
            if hmac.compare_digest(known, digest):
                owner = caller
        return owner

    def _read(self) -> list[tuple[bytes, Caller]]:
        try:
            table = tomllib.loads(read_bytes(self._file, "the tokens").decode())
        except ValueError as error:
            # The TOML parser's message quotes only one character and its position, so no secret.
            raise BadFile(f"the tokens {self._file}: not valid TOML: {error}") from None
        entries = table.get("token", [])  # all may be revoked
        if set(table) - {"token"} or not isinstance(entries, list):
            raise BadFile(f"the tokens {self._file}: only [[token]] tables are allowed")
        known = [self._entry(number, entry) for number, entry in enumerate(entries, 1)]
        if len({digest for digest, _ in known}) < len(known):
            raise BadFile(f"the tokens {self._file}: two tokens have the same sha256")
        return known

    def _entry(self, number: int, entry: Any) -> tuple[bytes, Caller]:
        where = f"the tokens {self._file}: token {number}"
        complete = isinstance(entry, dict) and set(entry) == _FIELDS
        if not complete or not all(isinstance(value, str) for value in entry.values()):
            raise BadFile(f"{where} must have exactly these string fields: {', '.join(sorted(_FIELDS))}")
        if entry["role"] not in set(Role):
            raise BadFile(f"{where} must have one of the roles {', '.join(Role)}")
        if not is_tenant(entry["tenant"]):
            raise BadFile(f"{where} has an invalid tenant: {TENANT_FORM}")
        try:
            digest = bytes.fromhex(entry["sha256"])
        except ValueError:
            digest = b""
        if len(digest) != hashlib.sha256().digest_size:
            raise BadFile(f"{where} must have a sha256 of 64 hexadecimal digits: `printf %s TOKEN | sha256sum`")
        return digest, Caller(Role(entry["role"]), entry["tenant"])


class KeyFile:
    """Keys from a file, which is read again when it changes."""

    def __init__(self, file: Path) -> None:
        """Raises BadFile if the file can't be read or holds no usable key."""
        self._keys = Watched([file], lambda: _parsed(read_bytes(file, "the JWKS", _MAX_BYTES), str(file)))

    async def key(self, id: str | None, algorithm: str) -> jwt.PyJWK | None:
        """The key with an id, for an algorithm; without an id, the only one, or None if there are several."""
        return _find(self._keys.value, id, algorithm)


class KeyURL:
    """Keys from a URL, fetched at the first use."""

    def __init__(self, url: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ValueError unless the URL is https or on this machine."""
        parts = urlsplit(url)
        if parts.scheme != "https" and (parts.scheme, parts.hostname) not in _LOCAL:
            raise ValueError(f"the JWKS {url} must be a file or an https:// URL")
        self._url = url
        self._clock = clock
        self._keys: list[jwt.PyJWK] = []
        self._fetched = self._tried = float("-inf")
        self._fetching: asyncio.Task[None] | None = None

    async def key(self, id: str | None, algorithm: str) -> jwt.PyJWK | None:
        """As `KeyFile.key`. Raises Unavailable if the last keys fetched are too old to be trusted."""
        age = self._clock() - self._fetched
        unknown = _find(self._keys, id, algorithm) is None
        idle = self._fetching is None or self._fetching.done()
        if idle and (unknown or age > _FRESH_SECONDS) and self._clock() - self._tried > _RETRY_SECONDS:
            self._tried = self._clock()
            self._fetching = asyncio.create_task(self._fetch())
        if self._fetching is not None and (unknown or age > _STALE_SECONDS):
            await asyncio.shield(self._fetching)
        if self._clock() - self._fetched > _STALE_SECONDS:
            raise Unavailable(
                "the keys that verify tokens can't be fetched at the moment; try again", retry_after=_RETRY_SECONDS
            )
        return _find(self._keys, id, algorithm)

    async def _fetch(self) -> None:
        try:
            async with asyncio.timeout(2 * _FETCH_SECONDS):  # urllib's timeout applies to each read only
                data = await asyncio.to_thread(_download, self._url)
            self._keys, self._fetched = _parsed(data, self._url), self._clock()
        except (OSError, HTTPException) as error:  # a timeout and BadFile are OSErrors too
            log.warning(
                "can't fetch the JWKS %s; keys fetched before remain valid for up to an hour: %s", self._url, error
            )


class JWTTokens:
    """Verifies tokens of one issuer for one audience; their claims name a role and a tenant.

    PyJWT checks their signature, issuer, audience and times.
    """

    def __init__(
        self, keys: KeyFile | KeyURL, *, issuer: str, audience: str, role_claim: str, tenant_claim: str
    ) -> None:
        self._keys = keys
        self._issuer, self._audience = issuer, audience
        self._role_claim, self._tenant_claim = role_claim, tenant_claim

    async def caller(self, token: str) -> Caller | None:
        try:
            header = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, RecursionError):
            return None
        key = await self._keys.key(header.get("kid"), header.get("alg", ""))
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
        return Caller(roles[0], tenant)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: only the configured URL is trusted."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _download(url: str) -> bytes:
    direct = [urllib.request.ProxyHandler({})] if process.is_near(urlsplit(url).hostname or "") else []
    with urllib.request.build_opener(_NoRedirect, *direct).open(url, timeout=_FETCH_SECONDS) as reply:
        data: bytes = reply.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise BadFile(f"more than {_MAX_BYTES} bytes")
    return data


def _parsed(data: bytes, where: str) -> list[jwt.PyJWK]:
    """The keys, each for one algorithm. Keys of unknown types are ignored, as RFC 7517 recommends."""
    try:
        keys = [named for key in json.loads(data)["keys"] for named in _with_algorithm(key)]
        return jwt.PyJWKSet(keys).keys
    except (jwt.PyJWTError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise BadFile(f'the JWKS {where} is not of the form {{"keys": [...]}}, or holds no usable key') from None


def _with_algorithm(key: Any) -> list[Any]:
    """A key of RSA without `alg`, which is optional, is for all its algorithms; PyJWT takes RS256 only."""
    if isinstance(key, dict) and key.get("kty") == "RSA" and not key.get("alg"):
        return [{**key, "alg": algorithm} for algorithm in _RSA]
    return [key]


def _find(keys: Sequence[jwt.PyJWK], id: str | None, algorithm: str) -> jwt.PyJWK | None:
    matching = [key for key in keys if key.algorithm_name == algorithm and id in (None, key.key_id)]
    return matching[-1] if matching and (id is not None or len(matching) == 1) else None
