"""Bearer tokens at a real gateway: who may call what, refusals that tell nothing, tokens that rotate."""

import asyncio
import hashlib
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fusionkv.gateway.auth import access
from fusionkv.gateway.auth.access import Role
from fusionkv.gateway.auth.static_tokens import StaticTokens
from fusionkv.gateway.client.client import AsyncClient, Client
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime import rpc
from fusionkv.protos.runtime.errors import NotFound, PermissionDenied, Unauthenticated
from fusionkv.protos.runtime.watched import BadFile
from tests.services import Launch, start_gateway, token_entry
from tests.waiting import wait_until

pytestmark = pytest.mark.system
SERVICE = pb.DESCRIPTOR.services_by_name["GatewayService"]
TOKENS = {role: secrets.token_urlsafe(32) for role in Role}


def write(file: Path, *entries: str) -> Path:
    file.write_text("\n".join(entries))
    return file


@pytest.fixture(scope="module")
def gateway(launch_module: Launch, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Without a worker: a call that is let in fails for that, or for its corpus, and not for its token."""
    folder = tmp_path_factory.mktemp("access")
    tokens = write(folder / "tokens", *(token_entry(t, r) for r, t in TOKENS.items()))
    return start_gateway(launch_module, folder, None, "--auth-tokens", str(tokens))


@pytest.fixture(scope="module")
def channel(gateway: Any) -> Iterator[grpc.Channel]:
    with rpc.dial_sync(gateway.address) as channel:
        yield channel


def call(channel: grpc.Channel, method: str, *metadata: tuple[str, str]) -> tuple[grpc.StatusCode, str]:
    """Status of a call with an empty request, whatever kind of method it is."""
    described = SERVICE.methods_by_name[method]
    request = message_factory.GetMessageClass(described.input_type)()
    multi = channel.unary_stream(f"/{SERVICE.full_name}/{method}", request_serializer=type(request).SerializeToString)
    try:
        list(multi(request, metadata=metadata, timeout=20))
    except grpc.RpcError as error:
        return error.code(), error.details()  # type: ignore[attr-defined]  # a call is an error too
    return grpc.StatusCode.OK, ""


def bearer(token: str) -> tuple[str, str]:
    return "authorization", f"Bearer {token}"


def test_every_method_of_the_gateway_has_its_roles() -> None:
    """A new RPC belongs to nobody until somebody says whose it is."""
    served = {f"/{SERVICE.full_name}/{method.name}" for method in SERVICE.methods}
    for name in ("grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"):
        service = descriptor_pool.Default().FindServiceByName(name)
        served |= {f"/{name}/{method.name}" for method in service.methods}
    assert {*served, access.ADMIN_PAGES} == {*access.ROLES, *access.OPEN}
    assert all(Role.OPERATOR in roles for roles in access.ROLES.values())


@pytest.mark.parametrize("method", [m.name for m in SERVICE.methods])
def test_a_method_wants_a_token_of_its_roles(channel: grpc.Channel, method: str) -> None:
    missing = "a bearer token is required: send the metadata `authorization: Bearer <token>`"
    assert call(channel, method) == (grpc.StatusCode.UNAUTHENTICATED, missing)
    wrong = call(channel, method, bearer(secrets.token_urlsafe(32)))
    assert wrong == (grpc.StatusCode.UNAUTHENTICATED, "the token is not valid")
    for role, token in TOKENS.items():
        status, said = call(channel, method, bearer(token))
        if role in access.ROLES[f"/{SERVICE.full_name}/{method}"]:
            assert status not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
        else:
            assert status is grpc.StatusCode.PERMISSION_DENIED
            assert re.fullmatch(rf"the role {role} may not call {method}; allowed: (app and )?operator", said)


@pytest.mark.parametrize(
    "given",
    [
        [("authorization", TOKENS[Role.APP])],
        [("authorization", f"Basic {TOKENS[Role.APP]}")],
        [("authorization", "Bearer ")],
        [("authorization", "Bearer " + "x" * 8193)],
        [bearer(TOKENS[Role.APP]), bearer(TOKENS[Role.APP])],
        [bearer(hashlib.sha256(TOKENS[Role.APP].encode()).hexdigest())],
        [bearer(TOKENS[Role.APP] + "x")],
        [bearer(TOKENS[Role.APP][:-1])],
        [bearer("a.b.c")],
        [("authorization-bin", b"Bearer")],
    ],
    ids=["no scheme", "basic", "empty", "long", "twice", "its hash", "longer", "shorter", "no jwt", "binary"],
)
def test_a_bad_header_is_no_token(channel: grpc.Channel, given: Any) -> None:
    status, said = call(channel, "List", *given)
    assert status in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED)  # gRPC's own limit
    assert TOKENS[Role.APP][:8] not in said


def test_health_is_open_and_reflection_is_not(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
    serving = health_pb2.HealthCheckResponse.SERVING
    assert health.Check(health_pb2.HealthCheckRequest(), timeout=20).status == serving
    reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
    ask = [reflection_pb2.ServerReflectionRequest(list_services="")]
    with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
        list(reflect(iter(ask), timeout=20))
    assert list(reflect(iter(ask), timeout=20, metadata=[bearer(TOKENS[Role.OPERATOR])]))


def test_nothing_of_a_refused_call_is_read(channel: grpc.Channel) -> None:
    """60 MiB that are no message: refused for the missing token, at once and not after they were parsed."""
    multi = channel.unary_unary(f"/{SERVICE.full_name}/Ingest")
    with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
        multi(b"\xff" * (60 << 20), timeout=20)


async def test_both_clients_carry_a_token(gateway: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "token", TOKENS[Role.OPERATOR] + "\n")
    for token in (TOKENS[Role.OPERATOR], file):
        with Client(gateway.address, token=token) as client:
            assert client.list() == []
            assert client.stats().documents == 0
            with pytest.raises(NotFound):
                client.delete("none")
            with pytest.raises(NotFound):
                list(client.precompute("none"))
        async with AsyncClient(gateway.address, token=token) as asynchronous:
            assert await asynchronous.list() == []
            with pytest.raises(NotFound):
                await asynchronous.delete("none")
    with Client(gateway.address) as client, pytest.raises(Unauthenticated, match="a bearer token is required"):
        client.list()
    with Client(gateway.address, token=TOKENS[Role.APP]) as client, pytest.raises(PermissionDenied):
        client.stats()
    for bad in ("", "two words", "ümlaut", "line\nline"):
        with pytest.raises(ValueError, match="one word"):
            Client(gateway.address, token=bad)


def test_a_token_that_is_added_works_and_one_that_is_removed_does_not(launch: Launch, tmp_path: Path) -> None:
    old, new = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    tokens = write(tmp_path / "tokens", token_entry(old, "app"))
    gateway = start_gateway(launch, tmp_path, None, "--auth-tokens", str(tokens))
    held = write(tmp_path / "token", old)
    with Client(gateway.address, token=held) as client:
        assert client.list() == []
        write(tokens, token_entry(new, "app"))
        # Both sides look at their files once a second.
        wait_until(lambda: not admitted(client))
        held.write_text(new)
        wait_until(lambda: admitted(client))
        tokens.write_text("broken [")
        gateway_said = "keeping the last valid state"
        while gateway_said not in gateway.log:
            client.list()
        assert new not in gateway.log


def admitted(client: Client) -> bool:
    try:
        client.list()
    except Unauthenticated:
        return False
    return True


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("broken [", "not valid TOML"),
        ("", "empty"),
        ("a = 1", r"only \[\[token\]\] tables are allowed"),
        (
            token_entry("t", "app").replace('role = "app"', ""),
            "exactly these string fields: name, role, sha256, tenant",
        ),
        (token_entry("t", "root"), "one of the roles app, operator, worker"),
        (token_entry("t", "app", "../x"), "invalid tenant"),
        (token_entry("t", "app", ""), "invalid tenant"),
        (
            re.sub(r'sha256 = ".*"', 'sha256 = "plain-token-by-mistake"', token_entry("t", "app")),
            "a sha256 of 64 hexadecimal digits",
        ),
        (token_entry("t", "app") + token_entry("t", "operator"), "two tokens have the same sha256"),
    ],
)
def test_a_bad_file_of_tokens_is_refused_and_not_quoted(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadFile, match=said) as raised:
        StaticTokens(write(tmp_path / "tokens", text))
    assert "by-mistake" not in str(raised.value)


def test_the_caller_of_one_call_is_not_that_of_another() -> None:
    """The caller is the task's: two calls at once, each its own."""

    async def one(name: str) -> str:
        access.enter(access.Caller(name, Role.APP, name))
        await asyncio.sleep(0)
        found = access.caller()
        assert found is not None
        return found.tenant

    async def both() -> list[str]:
        return list(await asyncio.gather(one("a"), one("b")))

    assert asyncio.run(both()) == ["a", "b"]
    assert access.caller() is None
