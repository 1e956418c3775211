"""Bearer tokens at a real gateway: who may call what, refusals that tell nothing, tokens that rotate."""

import contextvars
import hashlib
import re
import resource
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fusionkv.gateway.auth import access
from fusionkv.gateway.auth.access import Role
from fusionkv.gateway.auth.admission import CallAdmission
from fusionkv.gateway.auth.tenants import Quotas, Tenants
from fusionkv.gateway.auth.verifiers import StaticTokens
from fusionkv.gateway.cli import main as cli
from fusionkv.gateway.client.client import AsyncClient, Client
from fusionkv.gateway.config import GatewayConfig
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime import rpc
from fusionkv.protos.runtime.errors import (
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ServiceError,
    Unauthenticated,
    from_rpc,
)
from fusionkv.protos.runtime.watched import BadFile
from tests.conftest import Service
from tests.gateway.conftest import Serve, Start, succeeds
from tests.gateway.strangers import call
from tests.services import Launch, start_gateway, token_entry, token_flags
from tests.system.cache_process import check_refused
from tests.waiting import wait_until

pytestmark = pytest.mark.system
SERVICE = pb.DESCRIPTOR.services_by_name["GatewayService"]
TOKENS = {role: secrets.token_urlsafe(32) for role in Role}


@pytest.fixture(scope="module")
def gateway(launch_module: Launch, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Without a worker: a call that is let in fails for that, or for its corpus, and not for its token."""
    folder = tmp_path_factory.mktemp("access")
    return start_gateway(
        launch_module, folder, None, *token_flags(folder, *(token_entry(t, r) for r, t in TOKENS.items()))
    )


@pytest.fixture(scope="module")
def channel(gateway: Any) -> Iterator[grpc.Channel]:
    with rpc.dial_sync(gateway.address) as channel:
        yield channel


def bearer(token: str) -> tuple[str, str]:
    return "authorization", f"Bearer {token}"


def test_every_method_of_the_gateway_has_its_roles() -> None:
    served = {f"/{SERVICE.full_name}/{method.name}" for method in SERVICE.methods}
    for name in ("grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"):
        service = descriptor_pool.Default().FindServiceByName(name)
        served |= {f"/{name}/{method.name}" for method in service.methods}
    assert served == {*access.ROLES, *access.OPEN}
    assert all(Role.OPERATOR in roles for roles in access.ROLES.values())


@pytest.mark.parametrize("method", [m.name for m in SERVICE.methods])
def test_a_method_wants_a_token_of_its_roles(channel: grpc.Channel, method: str) -> None:
    missing = "a bearer token is required: send the metadata `authorization: Bearer <token>`"
    assert call(channel, f"/{SERVICE.full_name}/{method}", [b""]) == (grpc.StatusCode.UNAUTHENTICATED, missing)
    wrong = call(channel, f"/{SERVICE.full_name}/{method}", [b""], bearer("x" * 43))
    assert wrong == (grpc.StatusCode.UNAUTHENTICATED, "the token is not valid")
    for role, token in TOKENS.items():
        status, said = call(channel, f"/{SERVICE.full_name}/{method}", [b""], bearer(token))
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
        [bearer(TOKENS[Role.APP][:-1])],
    ],
    ids=["no scheme", "basic", "empty", "long", "twice", "its hash", "shorter"],
)
def test_a_bad_header_is_no_token(channel: grpc.Channel, given: Any) -> None:
    status, said = call(channel, f"/{SERVICE.full_name}/List", [b""], *given)
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


def test_stats_count_the_callers_tenant_and_all_for_the_gateways_own(launch: Launch, tmp_path: Path) -> None:
    tokens = token_flags(tmp_path, *(token_entry(name, tenant=name) for name in ("acme", "other", "own")))
    address = start_gateway(launch, tmp_path, None, *tokens, "--tenant", "own").address
    for name, calls in (("acme", 1), ("other", 3)):
        with Client(address, token=name) as client:
            for _ in range(calls):
                client.list()
            with pytest.raises(NotFound):
                client.delete("none")
    counted = {}
    for name in ("acme", "other", "own"):
        with Client(address, token=name) as client:
            stats = client.stats()
            counted[name] = stats.tenants, stats.requests, stats.requests_failed
    assert counted == {"acme": (1, 2, 1), "other": (1, 4, 1), "own": (3, 6, 2)}


def test_a_tenants_corpora_stay_its_own_when_the_gateways_tenant_changes(
    start: Start, serve: Serve, tmp_path: Path
) -> None:
    """The next gateway's default tenant neither gets the corpora of the last one, nor loses its own."""
    worker, tokens = start(), token_flags(tmp_path, *(token_entry(name, tenant=name) for name in ("acme", "bolt")))
    for tenant in ("acme", "bolt", ""):
        _, gateway = serve(worker, *tokens, "--tenant", tenant, token="acme")
        for name in ("acme", "bolt"):
            with Client(gateway.address, token=name, timeout=60) as client:
                if tenant == "acme":
                    client.ingest("notes", f"{name}.txt", "Its own.")
                assert [item.name for item in client.list("notes")] == [f"{name}.txt"], tenant
        gateway.stop()
    with pytest.raises(ValueError, match=r"tenant '\.\./x' is invalid"):
        GatewayConfig(tenant="../x")


@pytest.mark.parametrize(("first", "second"), [("", "acme"), ("acme", "")])
def test_a_data_folder_serves_one_gateway_whatever_their_tenants(
    launch: Launch, tmp_path: Path, first: str, second: str
) -> None:
    gateway = start_gateway(launch, tmp_path, None, "--tenant", first)
    other = Service(*gateway.argv[3:-1], second)
    check_refused(other, f"{tmp_path / 'gateway'} is in use by another gateway")


async def test_both_clients_carry_a_token(gateway: Any, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKENS[Role.OPERATOR] + "\n")
    for token in (TOKENS[Role.OPERATOR], file):
        with Client(gateway.address, token=token) as client:
            assert (client.list(), client.stats().documents) == ([], 0)
            for missing in (lambda: client.delete("none"), lambda: list(client.precompute("none"))):
                with pytest.raises(NotFound):
                    missing()
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


def test_the_command_says_where_a_token_goes(gateway: Any, capsys: pytest.CaptureFixture[str]) -> None:
    where = "; --token-file, FUSIONKV_TOKEN_FILE or FUSIONKV_TOKEN sets it\n"
    for flags, said in (([], "Bearer <token>`"), (["--token", "x" * 43], "the token is not valid")):
        assert cli.main(["list", "--gateway", gateway.address, *flags]) == 1
        assert capsys.readouterr().err.endswith(said + where)


def test_a_token_that_is_added_works_and_one_that_is_removed_does_not(serve: Serve, tmp_path: Path) -> None:
    old, new = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    held = tmp_path / "token"
    held.write_text(old)
    client, gateway = serve(None, *token_flags(tmp_path, token_entry(old, "app")), token=held)
    assert client.list() == []
    token_flags(tmp_path, token_entry(new, "app"))
    # Both sides look at their files once a second.
    wait_until(lambda: not succeeds(client.list, Unauthenticated))
    held.write_text(new)
    wait_until(lambda: succeeds(client.list, Unauthenticated))
    token_flags(tmp_path, "broken [")
    while "keeping the last valid state" not in gateway.log:
        client.list()
    assert new not in gateway.log
    token_flags(tmp_path, "# the last one was removed\n")
    wait_until(lambda: not succeeds(client.list, Unauthenticated))


def test_tokens_that_change_while_no_file_can_be_opened_count_once_one_can(serve: Serve, tmp_path: Path) -> None:
    old, new = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    client, gateway = serve(None, *token_flags(tmp_path, token_entry(old, "app")), token=old)
    client.list()
    pid = gateway.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, hard))
    token_flags(tmp_path, token_entry(new, "app"))
    while "keeping the last valid state" not in gateway.log:
        client.list()
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    wait_until(lambda: not succeeds(client.list, Unauthenticated))
    assert gateway.log.count("keeping the last valid state") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("broken [", "not valid TOML"),
        ("", "empty"),
        ("a = 1", r"only \[\[token\]\] tables are allowed"),
        (token_entry("t", "app").replace('role = "app"', ""), "these string fields: name, role, sha256, tenant"),
        (token_entry("t", "root"), "one of the roles app, operator, worker"),
        (token_entry("t", "app", "../x"), "invalid tenant"),
        (token_entry("t", "app", ""), "invalid tenant"),
        (re.sub('256 = ".*"', '256 = "plain-by-mistake"', token_entry("t")), "a sha256 of 64 hexadecimal digits"),
        (token_entry("t", "app") + token_entry("t", "operator"), "two tokens have the same sha256"),
    ],
)
def test_a_bad_file_of_tokens_is_refused_and_not_quoted(tmp_path: Path, text: str, said: str) -> None:
    _, file = token_flags(tmp_path, text)
    with pytest.raises(BadFile, match=said) as raised:
        StaticTokens(Path(file))
    assert "by-mistake" not in str(raised.value)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("fusion worker 10.0.0.7:7071: busy", "fusion worker [address]: busy"),
        ("fusion worker [::1]:7071: busy", "fusion worker [address]: busy"),
        ("fusion worker w-0.svc.local:7071: last error: ipv4:10.0.0.7:1: refused",
         "fusion worker [address]: last error: [address]: refused"),
        ("UNKNOWN: ipv6:%5B::1%5D:7071: refused", "UNKNOWN: [address]: refused"),
        ("the cache service at unix:/run/kv.sock: gone", "the cache service at [address]: gone"),
        ("documents of 12 bytes are being ingested; try again in 5.5 s", None),
    ],
)  # fmt: skip
def test_only_operators_see_addresses_of_other_services(said: str, shown: str | None) -> None:
    seen = {}
    for role in (None, *access.Role):
        caller = role and access.Caller(role, "acme")
        seen[role] = contextvars.copy_context().run(lambda c=caller: (access.CALLER.set(c), access.withheld(said))[1])
    assert seen == {None: said, access.Role.OPERATOR: said, **dict.fromkeys(("app", "worker"), shown or said)}


async def test_an_app_is_not_told_by_any_error_of_a_worker() -> None:
    """As of a chat template that can't be rendered with a request's values, or of a fault of the worker."""
    admission = CallAdmission(GatewayConfig(), Tenants("", b"", Quotas(None), AsyncMock()))

    async def told(error: ServiceError, cause: Exception | None = None) -> str:
        with pytest.raises(ServiceError) as raised:
            async with admission.admitted("Generate"):
                raise error from cause
        return str(raised.value)

    access.CALLER.set(access.Caller(Role.APP, "acme"))
    for status in grpc.StatusCode:
        if status not in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED):
            metadata = grpc.aio.Metadata()
            cause = grpc.aio.AioRpcError(status, metadata, metadata, "x is 1")
            said = await told(from_rpc(cause, "fusion worker 10.0.0.7:7071"), cause)
            assert said == "fusion worker [address]: x is 1"
    # What the caller sent stays as it is.
    assert await told(InvalidArgument("unknown recipe 'epic:10'")) == "unknown recipe 'epic:10'"
