"""TLS and mTLS with real certificates: who may call whom, rotation under a running server, errors at start."""

import asyncio
import contextlib
import datetime
import shutil
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.runtime import rpc
from fusionkv.protos.runtime.tls import ClientTLS, ServerTLS, read_identity
from fusionkv.protos.runtime.watched import BadFile
from tests.conftest import Authority
from tests.ports import free_port
from tests.protos.test_rpc import SERVER, begun, stub_of
from tests.waiting import until

pytestmark = pytest.mark.system


def serve(launch: Any, cert: Path, key: Path, client_ca: Path | None = None, *addresses: str) -> Any:
    env = {"TLS_CERT": str(cert), "TLS_KEY": str(key), **({"TLS_CLIENT_CA": str(client_ca)} if client_ca else {})}
    return launch(SERVER, "5", *(addresses or ("127.0.0.1:0",)), env=env)


def stats(channel: Any, timeout: float = 30) -> Any:
    return stub_of(channel).Stats(pb.StatsRequest(), timeout=timeout)


async def answers_both_ways(address: str, tls: ClientTLS | None) -> None:
    async with rpc.dial(address, tls=tls) as channel:
        await stats(channel)
    with rpc.dial_sync(address, tls=tls) as channel_sync:
        stats(channel_sync)


async def refused(address: str, tls: ClientTLS | None) -> None:
    async with rpc.dial(address, tls=tls) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stats(channel, timeout=3)
    assert raised.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


@pytest.mark.parametrize("mutual", [False, True])
async def test_only_callers_that_are_trusted_and_trust_are_served(launch: Any, authority: Any, mutual: bool) -> None:
    ours, other = authority("ours"), authority("other")
    server = serve(launch, *ours.issue("server"), *([ours.ca] if mutual else []))
    own = ours.issue("caller") if mutual else ()
    await answers_both_ways(server.address, ClientTLS(ours.ca, *own))
    trusted, stranger = ClientTLS(ours.ca), ClientTLS(ours.ca, *other.issue("stranger"))
    for tls in (None, *([trusted, stranger] if mutual else [ClientTLS(other.ca)])):
        await refused(server.address, tls)


@pytest.mark.parametrize(
    ("stranger", "reason"),
    [("plain", "HTTP_REQUEST"), ("without a certificate", "PEER_DID_NOT_RETURN_A_CERTIFICATE")],
)
async def test_failed_handshakes_are_one_line_with_the_first_reason(
    launch: Any, authority: Any, stranger: str, reason: str
) -> None:
    ours = authority("ours")
    server = serve(launch, *ours.issue("server"), ours.ca)
    before = len(server.log)
    for _ in range(100):
        if stranger == "plain":
            await closed(server.address, b"GET / HTTP/1.1\r\n\r\n")
        else:
            await closed(server.address, tls=ssl.create_default_context(cafile=str(ours.ca)))
    await answers_both_ways(server.address, ClientTLS(ours.ca, *ours.issue("caller")))
    await until(lambda: "handshake failed" in server.log)
    failed = [line for line in server.log[before:].splitlines() if "andshake failed" in line]
    assert len(failed) == 1
    assert reason in failed[0]
    assert server.stop() == 0
    assert "drained" in server.log


async def closed(address: str, data: bytes = b"", tls: ssl.SSLContext | None = None) -> None:
    """Connects, and waits until the server closes the connection."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
        writer.write(data)
        await reader.read()
        writer.close()


def pair(ours: Any) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    """The two ends of a connection; the server's does not block."""
    server, client = ServerTLS(*ours.issue("server")).context(), ClientTLS(ours.ca).context()
    near, far = socket.socketpair()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.wrap_socket, near, server_side=True)
        caller = client.wrap_socket(far, server_hostname="localhost")
        served = waiting.result()
    served.setblocking(False)
    return served, caller


def test_a_broken_connection_breaks_no_other_of_its_thread(authority: Any) -> None:
    """It did with OpenSSL 3.5 and 3.6; 3.0 leaves no error behind."""
    ours = authority("ours")
    (broken, hung_up), (whole, silent) = pair(ours), pair(ours)
    with broken, hung_up, whole, silent:
        socket.socket.shutdown(broken, socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            broken.recv_into(bytearray(1))
        with pytest.raises(ssl.SSLWantWriteError):
            whole.send(bytes(64 << 20))


async def test_a_unix_socket_stays_plain_beside_a_port_with_tls(launch: Any, authority: Any, tmp_path: Path) -> None:
    ours = authority("ours")
    server = serve(launch, *ours.issue("server"), ours.ca, f"unix:{tmp_path}/s", "127.0.0.1:0")
    plain, encrypted = server.addresses["test"]
    for tls in (None, ClientTLS(ours.ca)):
        await answers_both_ways(plain, tls)
    await refused(encrypted, None)


async def test_a_server_shows_a_new_certificate_and_trusts_a_new_authority(launch: Any, authority: Any) -> None:
    old, new = authority("old"), authority("new")
    cert, key = old.issue("server")
    trusted = cert.with_name("trusted.pem")
    shutil.copy(old.ca, trusted)
    server = serve(launch, cert, key, trusted)
    before, after = ClientTLS(old.ca, *old.issue("a")), ClientTLS(new.ca, *new.issue("b"))
    async with rpc.dial(server.address, tls=before) as channel:
        await stats(channel)
        await refused(server.address, after)
        shutil.copy(new.ca, trusted)
        new.issue("server")
        await until(lambda: answers(server.address, after))
        await refused(server.address, before)
        await stats(channel)  # a connection that was made before goes on


async def test_a_certificate_that_is_half_written_is_not_shown(launch: Any, authority: Any) -> None:
    ours = authority("ours")
    cert, key = ours.issue("server")
    server = serve(launch, cert, key)
    first = await shown(server.address)
    next_cert, next_key = ours.issue("next")
    shutil.copy(next_cert, cert)
    while "keeping the last valid state" not in server.log:
        assert await shown(server.address) == first
    assert "does not belong to the certificate" in server.log
    assert await answers(server.address, ClientTLS(ours.ca))
    shutil.copy(next_key, key)

    async def changed() -> bool:
        return await shown(server.address) != first

    await until(changed)
    assert await answers(server.address, ClientTLS(ours.ca))


async def test_a_certificate_that_has_expired_does_not_replace_a_valid_one(
    launch: Any, authority: Any, tmp_path: Path
) -> None:
    ours = authority("ours")
    cert, key = ours.issue("server")
    (tmp_path / "brief").mkdir()
    expired = Authority(tmp_path / "brief", "brief", datetime.timedelta()).issue("server")
    server = serve(launch, cert, key)
    first = await shown(server.address)
    for old, new in zip(expired, (cert, key), strict=True):
        shutil.copy(old, new)
    while f"the certificate {cert} expired at " not in server.log:
        assert await shown(server.address) == first
    ours.issue("server")
    await until(lambda: answers(server.address, ClientTLS(ours.ca)))
    with pytest.raises(BadFile, match="expired at"):
        ClientTLS(ours.ca, *expired)


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_channel_shows_a_new_certificate(launch: Any, authority: Any, blocking: bool) -> None:
    """Caller and server both move to a new authority; the caller's channel object stays."""
    old, new = authority("old"), authority("new")
    own = old.issue("caller")
    trusted = own[0].with_name("trusted.pem")
    shutil.copy(old.ca, trusted)
    tls = ClientTLS(trusted, *own)
    address = f"127.0.0.1:{free_port()}"
    first = serve(launch, *old.issue("server"), old.ca, address)
    channel: Any = (rpc.dial_sync if blocking else rpc.dial)(address, tls=tls)

    async def ask() -> bool:
        return await answered(asyncio.to_thread(stats, channel, 10) if blocking else stats(channel, 10))

    assert await ask()
    assert await asyncio.to_thread(first.stop) == 0
    serve(launch, *new.issue("server"), new.ca, address)
    assert not await ask()
    shutil.copy(new.ca, trusted)
    new.issue("caller")
    await until(ask)
    if (closing := channel.close()) is not None:
        await closing


async def test_a_call_in_flight_outlives_a_change_of_its_channel(launch: Any, authority: Any) -> None:
    ours = authority("ours")
    own = ours.issue("caller")
    server = serve(launch, *ours.issue("server"), ours.ca)
    async with rpc.dial(server.address, tls=ClientTLS(ours.ca, *own)) as channel:
        finish = await begun(server, channel)
        ours.issue("caller")
        await asyncio.sleep(1.1)  # the files are looked at once a second
        await until(lambda: channel.get_state() is grpc.ChannelConnectivity.READY)  # without a call that connects it
        await stats(channel)
        await finish()


def test_what_is_wrong_is_said_at_start(launch: Any, authority: Any, tmp_path: Path) -> None:
    ours = authority("ours")
    cert, key = ours.issue("server")
    _, foreign = ours.issue("another")
    text = tmp_path / "text"
    text.write_text("not PEM, but secret")
    none = tmp_path / "none"
    for given, message in [
        ((none, key), f"can't read the certificate {none}: No such file or directory"),
        ((cert, none), f"can't read the key {none}: No such file or directory"),
        ((cert, foreign), f"the key {foreign} does not belong to the certificate {cert}"),
        ((text, key), f"the certificate {text}: contains no valid PEM certificate"),
        ((cert, text), f"the key {text} is not a PEM private key without a password"),
        ((cert, key, text), f"the CA certificates {text}: contains no valid PEM certificate"),
    ]:
        with pytest.raises(BadFile) as raised:
            ServerTLS(*given).credentials()
        assert str(raised.value) == message
    with pytest.raises(AssertionError, match="does not belong to the certificate"):
        serve(launch, cert, foreign)
    for half in ((cert, None, None), (None, key, None), (None, None, ours.ca)):
        with pytest.raises(ValueError, match="tls_key"):
            ServerTLS.of(*half)
    with pytest.raises(ValueError, match="must be given together"):
        ClientTLS(ours.ca, cert)
    assert read_identity(cert, key) == (key.read_bytes(), cert.read_bytes())


async def answered(call: Any) -> bool:
    try:
        await call
    except grpc.RpcError:
        return False
    return True


async def answers(address: str, tls: ClientTLS) -> bool:
    async with rpc.dial(address, tls=tls) as channel:
        return await answered(stats(channel, timeout=20))


async def shown(address: str) -> str:
    """The certificate that a new connection is shown."""
    host, _, port = address.rpartition(":")
    return await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)), timeout=30)
