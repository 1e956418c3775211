"""Tokens that an OIDC provider signs: what is accepted, what is not, and keys that rotate at the provider."""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionkv.gateway.auth.access import Caller, Role
from fusionkv.gateway.auth.jwt_tokens import JWTTokens, KeyFile, KeyURL
from fusionkv.gateway.client.client import Client
from fusionkv.protos.runtime.errors import PermissionDenied, Unauthenticated, Unavailable
from fusionkv.protos.runtime.watched import BadFile
from tests.services import start_gateway, token_entry, token_flags
from tests.waiting import until

ISSUER, AUDIENCE = "https://issuer.example", "fusionkv"
CLAIMS = {"iss": ISSUER, "aud": AUDIENCE, "sub": "shop", "role": "app", "tenant": "acme"}


class Signer:
    """A private key with an id."""

    def __init__(self, id: str, algorithm: str = "ES256") -> None:
        self.id, self.algorithm = id, algorithm
        self.key: Any = {
            "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
            "RS256": lambda: rsa.generate_private_key(65537, 2048),
            "EdDSA": ed25519.Ed25519PrivateKey.generate,
        }[algorithm]()

    @property
    def public(self) -> dict[str, Any]:
        made = jwt.get_algorithm_by_name(self.algorithm).to_jwk(self.key.public_key(), as_dict=True)
        return {**made, "kid": self.id, "alg": self.algorithm, "use": "sig"}

    def token(self, headers: dict[str, Any] | None = None, **claims: Any) -> str:
        given = {**CLAIMS, "exp": int(time.time()) + 60, **claims}
        kept = {name: value for name, value in given.items() if value is not None}
        named = {name: value for name, value in {"kid": self.id, **(headers or {})}.items() if value is not None}
        return jwt.encode(kept, self.key, self.algorithm, headers=named)


def jwks(*signers: Signer) -> bytes:
    return json.dumps({"keys": [signer.public for signer in signers]}).encode()


def tokens(keys: KeyFile | KeyURL, role_claim: str = "role") -> JWTTokens:
    return JWTTokens(keys, issuer=ISSUER, audience=AUDIENCE, role_claim=role_claim, tenant_claim="tenant")


@pytest.fixture
def signer() -> Signer:
    return Signer("one")


@pytest.fixture
def known(signer: Signer, tmp_path: Path) -> JWTTokens:
    file = tmp_path / "jwks.json"
    file.write_bytes(jwks(signer, Signer("other")))
    return tokens(KeyFile(file))


@pytest.mark.parametrize("algorithm", ["ES256", "RS256", "EdDSA"])
async def test_a_signed_token_names_its_caller(tmp_path: Path, algorithm: str) -> None:
    signer = Signer("k", algorithm)
    file = tmp_path / "jwks.json"
    file.write_bytes(jwks(signer))
    assert await tokens(KeyFile(file)).caller(signer.token()) == Caller("shop", Role.APP, "acme")
    # A key without an id is meant when there is but one; roles may be a list, and hold others' roles too.
    listed = signer.token({"kid": None}, roles=["admin", "worker"], role=None)
    assert await tokens(KeyFile(file), "roles").caller(listed) == Caller("shop", Role.WORKER, "acme")


@pytest.mark.parametrize(
    "claims",
    [
        {"iss": "https://another.example"},
        {"aud": "another"},
        {"iss": None},
        {"aud": None},
        {"exp": None},
        {"exp": "tomorrow"},
        {"nbf": 1 << 33},  # the year 2242
    ],
    ids=str,
)
async def test_a_token_for_somebody_else_is_none(known: JWTTokens, signer: Signer, claims: Any) -> None:
    assert await known.caller(signer.token(**claims)) is None


async def test_an_expired_token_is_told_so(known: JWTTokens, signer: Signer) -> None:
    with pytest.raises(Unauthenticated, match="has expired"):
        await known.caller(signer.token(exp=int(time.time()) - 60))
    assert await known.caller(signer.token(exp=int(time.time()) - 5)) is not None  # clocks differ
    # Without a right signature it is not told even that.
    assert await known.caller(Signer("one").token(exp=int(time.time()) - 60)) is None


@pytest.mark.parametrize(
    "claims",
    [{"role": "root"}, {"role": None}, {"role": ["app", "operator"]}, {"tenant": None}, {"tenant": "../acme"}],
    ids=str,
)
async def test_claims_must_name_one_role_and_a_tenant(known: JWTTokens, signer: Signer, claims: Any) -> None:
    with pytest.raises(PermissionDenied, match=r"claim '(role|tenant)' must name"):
        await known.caller(signer.token(**claims))


async def test_forged_tokens_are_none(known: JWTTokens, signer: Signer) -> None:
    head, body, signature = signer.token().split(".")
    public = signer.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    def part(value: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    # With the public key as the secret of an HMAC, as a careless verifier would check it.
    claims = part({**CLAIMS, "exp": int(time.time()) + 60})
    confused = f"{part({'alg': 'HS256', 'kid': 'one'})}.{claims}"
    mac = base64.urlsafe_b64encode(hmac.new(public, confused.encode(), hashlib.sha256).digest()).rstrip(b"=").decode()
    forged = [
        Signer("one").token(),
        Signer("unknown").token(),
        signer.token({"kid": "other"}),
        signer.token({"kid": None}),
        f"{part({'alg': 'none'})}.{body}.",
        f"{part({'alg': 'none', 'kid': 'one'})}.{body}.",
        f"{confused}.{mac}",
        f"{head}.{part({**CLAIMS, 'role': 'operator', 'exp': int(time.time()) + 60})}.{signature}",
        f"{head}.{body}.",
        f"{head}.{body}",
        "..",
        "no token",
        f"{part({'alg': 'ES256', 'kid': ['one']})}.{body}.{signature}",
        f"{part({'alg': 'ES256', 'kid': 'one', 'jwk': signer.public})}.{body}.{Signer('one').token().split('.')[2]}",
    ]
    for token in forged:
        assert await known.caller(token) is None, token


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_CLAIMS = st.fixed_dictionaries({}, optional=dict.fromkeys([*CLAIMS, "exp", "nbf", "iat", "jti"], _JSON))
_HEADERS = st.fixed_dictionaries({}, optional=dict.fromkeys(["alg", "kid", "typ", "crit", "b64", "cty"], _JSON))


@settings(deadline=None)
@given(st.text(max_size=200))
async def test_any_text_is_a_token_or_none(text: str) -> None:
    assert await ANY.caller(text) is None


@settings(deadline=None)
@given(_CLAIMS, _HEADERS)
async def test_whatever_a_signed_token_says_is_a_caller_a_refusal_or_none(claims: Any, headers: Any) -> None:
    """The issuer itself may sign nonsense."""

    def part(value: Any) -> bytes:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=")

    said = part({"alg": "ES256", "kid": "any", **headers}) + b"." + part({**CLAIMS, "exp": 1 << 40, **claims})
    signature = jwt.get_algorithm_by_name("ES256").sign(said, ANY_SIGNER.key)
    token = (said + b"." + base64.urlsafe_b64encode(signature).rstrip(b"=")).decode()
    with contextlib.suppress(PermissionDenied, Unauthenticated):
        caller = await ANY.caller(token)
        assert caller is None or (caller.role in set(Role) and caller.tenant == {**CLAIMS, **claims}["tenant"])


class Known(KeyFile):
    """One key that no file holds."""

    def __init__(self, signer: Signer) -> None:
        self._key = jwt.PyJWK(signer.public)

    async def key(self, id: str | None) -> jwt.PyJWK | None:
        return self._key


ANY_SIGNER = Signer("any")
ANY = tokens(Known(ANY_SIGNER))


class Issuer:
    """A JWKS endpoint that counts how often it is asked."""

    def __init__(self) -> None:
        self.body, self.status, self.asked = b"", 200, 0
        issuer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.asked += 1
                self.send_response(issuer.status)
                if issuer.status == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()
                self.wfile.write(issuer.body)

            def log_message(self, *given: object) -> None:
                """Quiet."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/jwks"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    made = Issuer()
    yield made
    made.stop()


async def test_keys_are_fetched_once_and_again_when_one_is_new(issuer: Issuer, signer: Signer) -> None:
    now = 1000.0
    keys = KeyURL(issuer.url, clock=lambda: now)
    verifier, new = tokens(keys), Signer("two")
    issuer.body = jwks(signer)
    found = await asyncio.gather(*(verifier.caller(signer.token()) for _ in range(20)))
    assert (None not in found, issuer.asked) == (True, 1)
    # Keys made up by callers don't make the gateway ask its issuer without end.
    issuer.body = jwks(signer, new)
    for _ in range(20):
        assert await verifier.caller(Signer("made up").token()) is None
    assert issuer.asked == 1
    now += 11
    assert await verifier.caller(new.token()) is not None
    assert issuer.asked == 2
    # A withdrawn key ends with the next look, which nobody waits for.
    issuer.body = jwks(new)
    now += 301
    assert await verifier.caller(signer.token()) is not None

    async def withdrawn() -> bool:
        return await verifier.caller(signer.token()) is None

    await until(withdrawn)
    assert issuer.asked == 3


@pytest.mark.parametrize("failure", ["down", "error", "redirect", "garbage", "huge"])
async def test_known_keys_outlive_a_failing_issuer_for_an_hour(issuer: Issuer, signer: Signer, failure: str) -> None:
    now = 1000.0
    keys = KeyURL(issuer.url, clock=lambda: now)
    verifier = tokens(keys)
    issuer.body = jwks(signer)
    assert await verifier.caller(signer.token()) is not None
    if failure == "down":
        issuer.stop()
    issuer.status = {"error": 500, "redirect": 302}.get(failure, 200)
    issuer.body = {"garbage": b"<html>", "huge": b" " * (2 << 20)}.get(failure, jwks(signer))
    for _ in range(11):
        now += 320
        assert await verifier.caller(signer.token()) is not None
        assert keys._fetching is not None
        await keys._fetching  # which the caller does not wait for
    now += 320
    with pytest.raises(Unavailable, match="can't be fetched at the moment") as raised:
        await verifier.caller(signer.token())
    assert raised.value.retry_after


async def test_an_issuer_that_is_down_from_the_start_is_unavailable_and_not_a_bad_token(signer: Signer) -> None:
    with pytest.raises(Unavailable):
        await tokens(KeyURL("http://127.0.0.1:9/jwks")).caller(signer.token())


def test_bad_places_of_keys_are_refused_at_start(tmp_path: Path) -> None:
    for url in ("http://issuer.example/jwks", "ftp://127.0.0.1/jwks", "file:///etc/passwd"):
        with pytest.raises(ValueError, match="https://"):
            KeyURL(url)
    file = tmp_path / "jwks.json"
    for text in ("", "{}", '{"keys": []}', "[" * 100_000, '{"keys": [{"kty": "oct", "k": 1}]}', "[]", "null"):
        file.write_text(text)
        with pytest.raises(BadFile, match="JWKS"):
            KeyFile(file)


@pytest.mark.system
def test_a_gateway_takes_static_and_signed_tokens_at_once(launch: Any, issuer: Issuer, tmp_path: Path) -> None:
    signer = Signer("k", "RS256")
    issuer.body = jwks(signer)
    static = token_flags(tmp_path, token_entry("static-token", "app"))
    signed = ("--auth-jwks", issuer.url, "--auth-issuer", ISSUER, "--auth-audience", AUDIENCE)
    gateway = start_gateway(launch, tmp_path, None, *signed, *static)
    for token in ("static-token", signer.token()):
        with Client(gateway.address, token=token) as client:
            assert client.list() == []
    with Client(gateway.address, token=Signer("k", "RS256").token()) as client, pytest.raises(Unauthenticated):
        client.list()
    assert signer.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode() not in gateway.log
