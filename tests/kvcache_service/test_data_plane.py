"""The data plane answers as gRPC does, for those who have a ticket, and holds nothing of those who are gone."""

import asyncio
import contextlib
import random
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

from fusionkv.kvcache_service import transport
from fusionkv.kvcache_service.client import Entry
from fusionkv.kvcache_service.data_plane import connection as connections
from fusionkv.kvcache_service.data_plane import listener, tickets
from fusionkv.kvcache_service.data_plane.connection import Broken, Connection, connect
from fusionkv.kvcache_service.data_plane.messages import MAX_MESSAGE_BYTES, SIZE, encode
from fusionkv.kvcache_service.data_plane.tickets import Tickets
from fusionkv.kvcache_service.transport import GRPCCalls
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.runtime import errors
from tests.kvcache_service.tools import (
    MIB,
    NAMESPACE,
    Clock,
    Service,
    digest,
    hanging,
    payload,
    reserved,
    serving,
)
from tests.waiting import until

# Of tests that see how bytes are carried.
with_tls_too = pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"], indirect=True)


@pytest.fixture
def secured(request: Any) -> bool:
    """Whether the service has TLS."""
    return getattr(request, "param", False)


@pytest.fixture
def start(start: Any, authority: Any, secured: bool) -> Any:
    return partial(start, authority=authority("ours")) if secured else start


@pytest.fixture
async def counted(service: Service, monkeypatch: Any) -> tuple[Service, list[str]]:
    """A service, and the names of its client's calls by gRPC."""
    calls, begin = [], GRPCCalls.begin

    def count(self: GRPCCalls, method: str, *args: Any, **more: Any) -> Any:
        calls.append(method)
        return begin(self, method, *args, **more)

    monkeypatch.setattr(GRPCCalls, "begin", count)
    # However busy the machine is.
    monkeypatch.setattr(connections, "_WAIT_SECONDS", 30)
    return service, calls


@asynccontextmanager
async def opened(service: Service) -> AsyncIterator[socket.socket]:
    """A connection that was admitted, as a socket that blocks: to be used in threads."""
    tls = service.tls.context() if service.tls else None
    connected = await asyncio.to_thread(connect, service.client.address, await granted(service), 5, tls)
    with connected:
        yield connected


async def unknown(service: Service) -> socket.socket:
    """A connection that has shown no ticket."""
    connected = socket.create_connection(("127.0.0.1", service.plane.port))
    if service.tls is None:
        return connected
    return await asyncio.to_thread(service.tls.context().wrap_socket, connected, server_hostname="127.0.0.1")


async def granted(service: Service) -> pb.ConnectResponse:
    return await service.stub.Connect(pb.ConnectRequest(), timeout=20)


async def ended(connected: socket.socket) -> bool:
    """Whether the service closes a connection without another word."""
    connected.settimeout(20)
    try:
        return await asyncio.to_thread(connected.recv, 1) == b""
    except ConnectionResetError:
        return True


@with_tls_too
async def test_calls_and_bytes_need_no_grpc(counted: Any) -> None:
    service, calls = counted
    for name, size in (("S", 1), ("A", 3 * MIB + 5), ("B", MIB)):
        data = payload(name, size)
        key, stored = await service.put(["S", name], data)
        assert stored
        assert (await service.put(["S", name], data)) == (key, False)
        found = await service.find("S", name)
        assert await service.fetch(found.hits[1].entry) == data
        await service.client.release(found.lease)
    assert calls == ["Connect"]
    assert len(service.store.leases) == 0
    assert service.store.counters.get("fetched") == 4 * MIB + 6


@with_tls_too
async def test_calls_at_once_share_a_few_connections(counted: Any) -> None:
    service, calls = counted
    assert all(stored for _, stored in await asyncio.gather(*(service.put(["S", f"{n}"], b"x") for n in range(40))))
    found = await asyncio.gather(*(service.get("S", f"{n}") for n in range(40)))
    assert found == [b"x"] * 40
    assert calls == ["Connect"] * len(service.plane._connections)
    assert len(calls) <= 8


async def test_both_planes_answer_alike(start: Any) -> None:
    service, short = await start(max_path=4, max_fetches=2), b"s" * 31
    system = pb.PathElement(digest=digest("S"))
    header = {"namespace": NAMESPACE, "path": [digest("S")], "size_bytes": 3, "tokens": 1, "checksum": b"c" * 16}
    cases: list[dict[str, Any]] = [
        {"lookup": pb.LookupRequest(namespace=short, path=[system])},
        {"lookup": pb.LookupRequest(namespace=NAMESPACE, path=[system] * 5)},
        {"find": pb.FindRequest(namespace=NAMESPACE, digests=[digest("S")] * 2, sizes=[3])},
        {"find": pb.FindRequest(namespace=NAMESPACE, digests=[digest("S")] * 257, sizes=[3] * 257)},
        {"fetch": pb.FetchRequest(key=short)},
        {"fetch": pb.FetchRequest(key=NAMESPACE)},
        {"fetch": pb.FetchRequest(key=NAMESPACE, checksum=b"c")},
        {"put": pb.PutHeader(**{**header, "tokens": 0})},
        {"put": pb.PutHeader(**{**header, "checksum": b"c"})},
        {"put": pb.PutHeader(**{**header, "size_bytes": 1 << 40})},
        {"put": pb.PutHeader(**header)},
    ]
    async with opened(service) as connected:
        client = Connection(connected, service.store.work.threads)
        for case in cases:
            ((name, request),) = case.items()
            with pytest.raises(connections.Refused) as refused:
                await _call(client, pb.DataRequest(**case), b"abc")
            if name == "put":
                call = service.stub.Put(iter([pb.PutRequest(header=request), pb.PutRequest(data=b"abc")]), timeout=20)
            else:
                call = getattr(service.stub, name.capitalize())(request, timeout=20)
            with pytest.raises(Exception) as raised:  # noqa: PT011 - gRPC's own
                await (call.read() if name == "fetch" else call)
            assert refused.value.status == raised.value.code().value[0], case
            assert str(refused.value) == raised.value.details()


async def _call(client: Connection, request: pb.DataRequest, data: bytes) -> pb.DataResponse:
    response = await client.call(request)
    if response.reserved:
        await client.send(memoryview(data))
        return await client.response()
    return response


async def test_what_is_on_disk_is_verified_before_it_is_sent(start: Any) -> None:
    service, data = await start(memory=1 * MIB, disk=32 * MIB), payload("x", 5 * MIB)
    key, _ = await service.put("S", data)
    entry = await service.entry("S", lease_ms=1)
    assert await service.fetch(entry) == data
    disk = service.store.residents.tiers[1]
    disk.write(service.store.entries.get(key).places["disk"], 4 * MIB, [memoryview(b"?")])
    with pytest.raises(errors.DataLoss, match=r"fetch at the cache service .* was damaged on disk; it is deleted"):
        await service.fetch(entry)
    assert await service.entry("S") is None


@with_tls_too
@pytest.mark.parametrize("shown", ["forged", "used", "late", "short"])
async def test_without_a_ticket_of_its_own_nobody_is_served(service: Service, monkeypatch: Any, shown: str) -> None:
    ticket = bytes((await granted(service)).ticket)
    if shown == "late":
        monkeypatch.setattr(service.plane._tickets, "_clock", lambda: time.monotonic() + tickets.TICKET_SECONDS)
    monkeypatch.setattr(listener, "TICKET_SECONDS", 0.5)
    with await unknown(service) as first, await unknown(service) as connected:
        if shown == "used":
            first.sendall(ticket)
            assert await asyncio.to_thread(first.recv, 32) == ticket
        connected.sendall({"forged": b"?" * 32, "short": ticket[:-1]}.get(shown, ticket))
        assert await ended(connected)


def test_tickets_that_nobody_shows_are_bounded() -> None:
    clock = Clock()
    known = Tickets(clock)
    first = known.grant()
    for _ in range(2000):
        last = known.grant()
    assert len(known._ends) == 1024
    assert not known.redeem(first)
    assert known.redeem(last)
    assert not known.redeem(last)
    late = known.grant()
    clock.now += tickets.TICKET_SECONDS
    assert not known.redeem(late)


@pytest.mark.parametrize(
    "sent",
    [
        SIZE.pack(MAX_MESSAGE_BYTES + 1),
        SIZE.pack(3) + b"???",
        SIZE.pack(0),
        # Many fields: read, they would take a hundred times the memory.
        encode(pb.DataRequest(lookup=pb.LookupRequest(path=[pb.PathElement()] * 70_000))),
        encode(pb.DataRequest(traceparent="x")),
    ],
)
async def test_who_sends_no_request_is_hung_up_on(service: Service, sent: bytes) -> None:
    async with opened(service) as connected:
        await asyncio.to_thread(connected.sendall, sent)
        assert await ended(connected)
    assert (await service.put("S", b"abc"))[1]


async def test_large_requests_come_few_at_a_time(service: Service, monkeypatch: Any) -> None:
    monkeypatch.setattr(listener, "_STALL_SECONDS", 1.0)
    part = SIZE.pack(MAX_MESSAGE_BYTES) + bytes(70_000)
    async with contextlib.AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(opened(service)) for _ in range(17)]
        await asyncio.gather(*(asyncio.to_thread(connected.sendall, part) for connected in slow))
        await until(service.plane._large.locked)
        assert (await service.put("S", b"abc"))[1], "others are served"
        assert all(await asyncio.gather(*map(ended, slow)))
    assert not service.plane._large.locked()


@with_tls_too
async def test_who_reads_nothing_holds_entries_and_a_lease_for_a_while_only(start: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(listener, "_STALL_SECONDS", 0.3)
    service, data = await start(memory=32 * MIB, disk=64 * MIB), payload("x", 24 * MIB)
    key, _ = await service.put("S", data)
    # Of the second one, which has another size, the caller would get a lease.
    await service.put("T", b"abc")
    find = pb.FindRequest(namespace=NAMESPACE, digests=[digest("S"), digest("T")], sizes=[len(data), 1])
    for request in (pb.DataRequest(find=find), pb.DataRequest(fetch=pb.FetchRequest(key=key))):
        async with opened(service) as connected:
            await asyncio.to_thread(connected.sendall, encode(request))
            await until(lambda: service.store.entries.get(key).pins == 1)
            await until(lambda: service.store.entries.get(key).pins == 0)
        assert len(service.store.leases) == 0
    assert await service.get("S") == data


@with_tls_too
@pytest.mark.parametrize("sent", [0, 1, 3 * MIB])
@pytest.mark.parametrize("hangs_up", [True, False])
async def test_who_sends_a_part_leaves_nothing(start: Any, monkeypatch: Any, sent: int, hangs_up: bool) -> None:
    monkeypatch.setattr(listener, "_STALL_SECONDS", 0.3)
    service, data = await start(memory=16 * MIB, disk=32 * MIB, max_puts=1), payload("x", 10 * MIB)
    header = pb.PutHeader(namespace=NAMESPACE, path=[digest("S")], size_bytes=len(data), tokens=1, checksum=b"c" * 16)
    async with opened(service) as connected:
        client = Connection(connected, service.store.work.threads)
        assert (await client.call(pb.DataRequest(put=header))).reserved
        await client.send(memoryview(data)[:sent])
        if hangs_up:
            client.end()
        await until(lambda: not reserved(service.store))
        assert await ended(connected)
    assert service.store.residents.home.used_bytes == 0
    assert (await service.put("S", data))[1]


@with_tls_too
async def test_what_the_disk_refuses_leaves_the_connection_usable(start: Any, monkeypatch: Any) -> None:
    service = await start(memory=32 * MIB, disk=64 * MIB)
    disk = service.store.residents.tiers[1]

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(disk, "write", full)
        with pytest.raises(errors.ResourceExhausted, match=r"put at the cache service .* No space left"):
            await service.put("S", payload("x", 24 * MIB))
    assert (await service.put("S", payload("x", 24 * MIB)))[1]
    assert len(service.plane._connections) == 1


@with_tls_too
async def test_a_cancelled_fetch_writes_nothing_afterwards(start: Any) -> None:
    service, moments = await start(memory=64 * MIB, disk=64 * MIB), random.Random(3)
    key, _ = await service.put("S", payload("x", 24 * MIB))
    entry = await service.entry("S")
    for _ in range(20):
        into = bytearray(entry.size)
        task = asyncio.create_task(service.client.fetch(entry, memoryview(into), timeout=30))
        await asyncio.sleep(moments.random() * 0.02)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        before = bytes(into)
        await asyncio.sleep(0.005)
        assert into == before
    await until(lambda: service.store.entries.get(key).pins == 0)
    await until(lambda: len(service.plane._connections) <= 1)
    assert await service.fetch(entry) == payload("x", 24 * MIB)


@with_tls_too
async def test_a_lookup_that_hangs_up_before_the_response_holds_no_lease(service: Service, monkeypatch: Any) -> None:
    await service.put("S", b"abc")
    async with opened(service) as connected:
        asked = hanging(service, "lookup", monkeypatch)
        request = pb.LookupRequest(namespace=NAMESPACE, path=[pb.PathElement(digest=digest("S"))])
        await asyncio.to_thread(connected.sendall, encode(pb.DataRequest(lookup=request)))
        await asked.wait()
        assert len(service.plane._connections) == 2
    await until(lambda: len(service.plane._connections) == 1)


@with_tls_too
async def test_without_a_data_plane_calls_go_by_grpc(counted: Any) -> None:
    service, calls = counted
    assert (await service.put("S", b"abc"))[1]
    await service.plane.stop(5)
    assert await service.get("S") == b"abc"
    assert (await service.put("SA", payload("x", 3 * MIB)))[1]
    # The first call on a connection that is gone, and then no attempt for a while.
    assert calls == ["Connect", "Lookup", "Connect", "Fetch", "Put"]
    with pytest.raises(errors.NotFound):
        await service.fetch(Entry(b"?" * 32, 3, 1, 0, bytes(16), "memory", b""))
    finding = asyncio.create_task(service.find("S"))
    await asyncio.sleep(0)
    finding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await finding


async def test_nobody_waits_for_a_port_that_does_not_answer(counted: Any, monkeypatch: Any) -> None:
    service, calls = counted
    monkeypatch.setattr(connections, "_WAIT_SECONDS", 0.05)
    answers, opened = threading.Event(), connections.connect

    def late(*args: Any) -> socket.socket:
        answers.wait(60)
        return opened(*args)

    monkeypatch.setattr(connections, "connect", late)
    for chunk in "ABC":
        assert (await service.put(["S", chunk], b"abc"))[1]
    assert calls == ["Connect", "Put", "Put", "Put"]
    answers.set()
    # Once it answers, it is used.
    await until(lambda: bool(service.client._transport._data._idle))
    assert await service.get("S", "A") == b"abc"
    assert len(calls) == 4


async def test_what_opens_after_the_client_is_closed_is_closed(counted: Any, monkeypatch: Any) -> None:
    service, _ = counted
    monkeypatch.setattr(connections, "_WAIT_SECONDS", 0.05)
    answers, opened, connect = threading.Event(), list[socket.socket](), connections.connect

    def late(*args: Any) -> socket.socket:
        answers.wait(20)
        opened.append(connect(*args))
        return opened[0]

    monkeypatch.setattr(connections, "connect", late)
    assert (await service.put("S", b"abc"))[1], "by gRPC"
    await service.client.close()
    answers.set()
    await until(lambda: bool(opened) and opened[0].fileno() < 0)


async def test_a_restarted_service_is_served_anew(service: Service) -> None:
    assert (await service.put("S", b"abc"))[1]
    before = service.plane.port
    await service.plane.stop(5)
    await service.plane.start()
    assert service.plane.port == before
    for _ in range(3):
        assert await service.get("S") == b"abc"
    assert len(service.plane._connections) == 1


@with_tls_too
async def test_a_service_that_drains_ends_what_it_does(start: Any) -> None:
    service, data = await start(memory=64 * MIB, disk=64 * MIB), payload("x", 48 * MIB)
    key, _ = await service.put("S", data)
    async with opened(service) as connected:
        client = Connection(connected, service.store.work.threads)
        response = await client.call(pb.DataRequest(fetch=pb.FetchRequest(key=key)))
        stopping = asyncio.create_task(service.plane.stop(20))
        await asyncio.sleep(0.05)
        assert not stopping.done()
        into = bytearray(response.bytes)
        await client.receive([memoryview(into)])
        assert into == data
        await stopping
        assert await ended(connected)


async def test_time_that_is_over_ends_a_call(counted: Any, monkeypatch: Any) -> None:
    service, _ = counted
    await service.put("S", b"abc")
    hanging(service, "lookup", monkeypatch)
    with pytest.raises(errors.DeadlineExceeded, match=r"lookup at the cache service at .* no response in time"):
        await service.find("S", timeout=0.2)
    await until(lambda: not service.plane._connections)


async def test_a_closed_client_says_so(counted: Any, monkeypatch: Any) -> None:
    service, _ = counted
    asked = hanging(service, "lookup", monkeypatch)
    task = asyncio.create_task(service.find("S"))
    await asked.wait()
    await service.client.close()
    with pytest.raises(errors.Unavailable, match="the client is closed"):
        await task


async def test_an_unexpected_error_is_internal(counted: Any, monkeypatch: Any) -> None:
    service, _ = counted

    async def broken(request: Any, *, near: bool, waiting: Any) -> Any:
        raise KeyError("secret")

    monkeypatch.setattr(service.plane._service.lookups, "lookup", broken)
    with pytest.raises(errors.ServiceError, match=r"internal error: KeyError$"):
        await service.find("S")


@pytest.mark.parametrize("addresses", [["127.0.0.1:1", "127.0.0.1:2"], ["127.0.0.1:1", "0.0.0.0:2"]])
async def test_all_ports_of_a_host_share_a_listener(addresses: list[str]) -> None:
    """Both are told the same port of it, which can be bound once only."""
    plane = listener.DataPlane("data", Mock(), addresses)
    assert await plane.start() == [f"{addresses[1].rpartition(':')[0]}:{plane.port}"]
    await plane.stop(0)


@with_tls_too
async def test_only_the_service_that_gave_a_ticket_accepts_it(
    service: Service, authority: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    """Services behind one name: each of its addresses is tried."""
    tls = service.tls.context() if service.tls else None
    async with serving(tmp_path / "other", authority=authority("ours") if tls else None) as other:
        ports = [other.plane.port, service.plane.port]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port)) for port in ports]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        response = await granted(service)
        if tls is not None:
            # Whatever host a service grants: it has to prove the name that was called.
            tls.load_verify_locations(tmp_path / "ours.ca.pem")
            with pytest.raises(ssl.SSLCertVerificationError, match="cache"):
                await asyncio.to_thread(connect, "cache:7070", response, 5, tls)
        (await asyncio.to_thread(connect, "localhost:7070", response, 5, tls)).close()
        with pytest.raises(OSError, match="the ticket was not accepted"):
            await asyncio.to_thread(connect, "localhost:7070", response, 5, tls)


@with_tls_too
async def test_a_certificate_is_asked_for_again_within_an_hour(counted: Any, monkeypatch: Any) -> None:
    service, calls = counted
    monkeypatch.setattr(listener, "MAX_AGE_SECONDS", 0.2)
    for _ in range(4):
        await service.find("S")
        await asyncio.sleep(0.3)
    # A call finds that its connection was closed, and the next one opens another.
    assert calls == (["Connect"] if service.tls is None else ["Connect", "Lookup", "Connect", "Lookup"])


@with_tls_too
async def test_without_tls_nobody_enters_a_port_that_has_it(service: Service) -> None:
    ticket = (await granted(service)).ticket
    with socket.create_connection(("127.0.0.1", service.plane.port)) as plain:
        plain.sendall(ticket)
        plain.settimeout(20)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            answer = await asyncio.to_thread(plain.recv, 100)
        if service.tls is None:
            assert answer == ticket
        else:
            assert ticket not in answer
            assert await ended(plain)


async def test_a_service_that_breaks_off_is_asked_by_grpc(counted: Any, monkeypatch: Any) -> None:
    service, calls = counted
    data = payload("x", 3 * MIB)
    await service.put("S", data)
    entry = await service.entry("S")

    async def broken(*_: object) -> list[bytes]:
        raise Broken("cut")

    monkeypatch.setattr(transport.Connection, "receive", broken)
    assert await service.fetch(entry) == data
    assert calls == ["Connect", "Fetch"]
    with pytest.raises(errors.NotFound, match="never stored"):
        await service.fetch(Entry(b"?" * 32, 3, 1, 0, entry.checksum, "memory", b""))
