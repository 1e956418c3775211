"""Tokens that an OIDC provider signs: what is accepted, what is not, and keys that rotate at the provider."""

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import jwt
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from fusionkv.gateway.auth.access import Caller, Role
from fusionkv.gateway.auth.verifiers import JWTTokens, KeyFile, KeyURL
from fusionkv.gateway.client.client import AsyncClient
from fusionkv.protos.runtime.errors import PermissionDenied, Unauthenticated, Unavailable
from fusionkv.protos.runtime.watched import BadFile
from tests.http_server import serving
from tests.services import start_gateway, token_entry, token_flags

ISSUER, AUDIENCE = "https://issuer.example", "fusionkv"
CLAIMS = {"iss": ISSUER, "aud": AUDIENCE, "sub": "shop", "role": "app", "tenant": "acme"}


class Signer:
    def __init__(self, id: str, algorithm: str = "ES256") -> None:
        self.id, self.algorithm = id, algorithm
        self.key: Any = {
            "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
            "RS256": lambda: rsa.generate_private_key(65537, 2048),
            "PS512": lambda: rsa.generate_private_key(65537, 2048),
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


def coded(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def part(value: Any) -> str:
    return coded(json.dumps(value).encode())


def tokens(keys: KeyFile | KeyURL, role_claim: str = "role") -> JWTTokens:
    return JWTTokens(keys, issuer=ISSUER, audience=AUDIENCE, role_claim=role_claim, tenant_claim="tenant")


@pytest.fixture
def signer() -> Signer:
    return Signer("one")


def key_file(folder: Path, *signers: Signer) -> KeyFile:
    (folder / "jwks.json").write_bytes(jwks(*signers))
    return KeyFile(folder / "jwks.json")


@pytest.fixture
def known(signer: Signer, tmp_path: Path) -> JWTTokens:
    return tokens(key_file(tmp_path, signer, Signer("other")))


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("algorithm", ["ES256", "RS256", "PS512", "EdDSA"])
async def test_a_signed_token_names_its_caller(tmp_path: Path, algorithm: str, named: bool) -> None:
    signer = Signer("k", algorithm)
    key = signer.public if named else {name: value for name, value in signer.public.items() if name != "alg"}
    (tmp_path / "jwks.json").write_text(json.dumps({"keys": [key]}))
    keys = KeyFile(tmp_path / "jwks.json")
    assert await tokens(keys).caller(signer.token()) == Caller(Role.APP, "acme")
    # A key without an id is meant when there is but one; roles may be a list, and hold others' roles too.
    listed = signer.token({"kid": None}, roles=["admin", "worker"], role=None)
    assert await tokens(keys, "roles").caller(listed) == Caller(Role.WORKER, "acme")


@pytest.mark.parametrize(
    "claims",
    [
        {"iss": "https://another.example"}, {"aud": "another"}, {"iss": None}, {"aud": None}, {"exp": None},
        {"exp": "tomorrow"}, {"nbf": 1 << 33},  # the year 2242
    ],
    ids=str,
)  # fmt: skip
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
    # With the public key as the secret of an HMAC, as a careless verifier would check it.
    claims = part({**CLAIMS, "exp": int(time.time()) + 60})
    confused = f"{part({'alg': 'HS256', 'kid': 'one'})}.{claims}"
    mac = coded(hmac.new(public, confused.encode(), hashlib.sha256).digest())
    forged = [
        Signer("one").token(),
        Signer("unknown").token(),
        signer.token({"kid": "other"}),
        signer.token({"kid": None}),
        f"{part({'alg': 'none', 'kid': 'one'})}.{body}.",
        f"{confused}.{mac}",
        f"{head}.{part({**CLAIMS, 'role': 'operator', 'exp': int(time.time()) + 60})}.{signature}",
        f"{head}.{body}.",
        "no token",
        f"{part({'alg': 'ES256', 'kid': ['one']})}.{body}.{signature}",
        f"{part({'alg': 'ES256', 'kid': 'one', 'jwk': signer.public})}.{body}.{Signer('one').token().split('.')[2]}",
    ]
    for token in forged:
        assert await known.caller(token) is None, token


class Issuer:
    """A JWKS endpoint that counts how often it is asked."""

    def __init__(self) -> None:
        self.body, self.status, self.asked, self.url = b"", 200, 0, ""
        self.stop = AsyncExitStack()

    async def answer(self, request: web.Request) -> web.Response:
        self.asked += 1
        headers = {"Location": "/elsewhere"} if self.status == 302 else {}
        return web.Response(body=self.body, status=self.status, headers=headers)


@pytest.fixture
async def issuer() -> AsyncIterator[Issuer]:
    made = Issuer()
    async with made.stop:
        made.url = f"{await made.stop.enter_async_context(serving(web.get('/jwks', made.answer)))}/jwks"
        yield made


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
    await keys._fetching
    assert await verifier.caller(signer.token()) is None
    assert issuer.asked == 3


async def test_keys_on_this_machine_are_fetched_without_a_proxy(
    issuer: Issuer, signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    issuer.body = jwks(signer)
    assert await tokens(KeyURL(issuer.url)).caller(signer.token()) is not None


@pytest.mark.parametrize("failure", ["down", "error", "redirect", "garbage", "huge"])
async def test_known_keys_outlive_a_failing_issuer_for_an_hour(issuer: Issuer, signer: Signer, failure: str) -> None:
    now, issuer.body = 1000.0, jwks(signer)
    keys = KeyURL(issuer.url, clock=lambda: now)
    verifier = tokens(keys)
    assert await verifier.caller(signer.token()) is not None
    if failure == "down":
        await issuer.stop.aclose()
    issuer.status = {"error": 500, "redirect": 302}.get(failure, 200)
    issuer.body = {"garbage": b"<html>", "huge": b" " * (2 << 20)}.get(failure, jwks(signer))
    for _ in range(11):
        now += 320
        assert await verifier.caller(signer.token()) is not None
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
async def test_a_gateway_takes_static_and_signed_tokens_at_once(launch: Any, issuer: Issuer, tmp_path: Path) -> None:
    signer = Signer("k", "RS256")
    issuer.body = jwks(signer)
    static = token_flags(tmp_path, token_entry("static-token", "app"))
    signed = ("--auth-jwks", issuer.url, "--auth-issuer", ISSUER, "--auth-audience", AUDIENCE)
    gateway = await asyncio.to_thread(start_gateway, launch, tmp_path, None, *signed, *static)
    for token in ("static-token", signer.token()):
        async with AsyncClient(gateway.address, token=token) as client:
            assert await client.list() == []
    async with AsyncClient(gateway.address, token=Signer("k", "RS256").token()) as client:
        with pytest.raises(Unauthenticated):
            await client.list()
    assert signer.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode() not in gateway.log
