"""HTTP connections that are held open: each ends in time, there are only so many, and others are served."""

import asyncio
import contextlib
import dataclasses
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from aiohttp import web

from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.http.listener import Listener
from fusionkv.protos.runtime.errors import ServiceError
from tests.gateway.strangers import malformed
from tests.stopwatch import SLOWER
from tests.waiting import until

HALF = b"GET / HTTP/1.1\r\nHost: gateway\r\nX-Half: "
WHOLE = b"GET / HTTP/1.1\r\nHost: gateway\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
# What is not tested takes longer than any test.
LONG = GatewayConfig(
    http_head_seconds=600, http_body_seconds=600, http_send_seconds=600, http_idle_seconds=600, drain_seconds=0
)
Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


class Served(Listener):
    """The gateway's own listener: greets, reads a body, streams for a second, or sends more than anybody reads."""

    def __init__(self, address: str, **limits: Any) -> None:
        super().__init__(dataclasses.replace(LONG, http_listen=(address,), **limits))
        self.cancelled = 0
        self.get("/", self._greet)
        self.get("/stream", self._stream)
        self.get("/flood", self._flood)
        self.get("/left", self._left)
        self.post("/", self._read)

    def failed(self, error: Exception) -> web.Response:
        assert isinstance(error, web.HTTPException | ServiceError), error
        status = error.status if isinstance(error, web.HTTPException) else getattr(error, "http_status", 400)
        return web.Response(status=status)

    async def _greet(self, request: web.Request) -> web.Response:
        return web.Response(text="here")

    async def _read(self, request: web.Request) -> web.Response:
        return web.Response(text=str(len(await self.body(request))))

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(10):
            await asyncio.sleep(0.1)
            await response.write(b"event\n")
        return response

    async def _flood(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(bytes(1 << 20))
        finally:
            self.cancelled += 1

    async def _left(self, request: web.Request) -> web.StreamResponse:
        """Writes after the client has left, and before the handler is cancelled for that."""
        response = web.StreamResponse()
        await response.prepare(request)
        assert request.transport is not None
        request.transport.abort()
        await response.write(b"event\n")
        return response


Serve = Callable[..., Any]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    started: list[Served] = []

    async def start(address: str = "127.0.0.1:0", **limits: Any) -> tuple[Served, str]:
        started.append(Served(address, **limits))
        return started[-1], (await started[-1].start())[0]

    yield start
    for one in started:
        await one.stop(0)


async def sent(address: str, data: bytes, here: str = "") -> tuple[Reader, Writer]:
    """A connection, from the address `here` if one is given, that has sent these bytes."""
    if address.startswith("unix:"):
        reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
    else:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), local_addr=(here, 0) if here else None)
    writer.write(data)
    await writer.drain()
    return reader, writer


async def ended(reader: Reader) -> bytes:
    """All that comes until the other side ends the connection."""
    said = b""
    try:
        async with asyncio.timeout(60):
            while part := await reader.read(1 << 16):
                said += part
    except ConnectionError:
        pass
    return said


async def status(address: str, data: bytes = WHOLE) -> int:
    """Of the first response; the connection stays open as long as the server wants. 0: there is none."""
    try:
        reader, writer = await sent(address, data)
        line = await asyncio.wait_for(reader.readline(), 60)
        writer.close()
    except ConnectionError:
        return 0
    return int(line.split()[1]) if line else 0


async def test_heads_that_never_end(serve: Serve) -> None:
    # What comes behind a request in one piece is not known to be a head: it ends as an idle connection does.
    # Callers and server share an event loop: on busy cores, a caller can be late by most of a second.
    _, address = await serve(http_head_seconds=0.8 * SLOWER, http_idle_seconds=1.2 * SLOWER)
    began = asyncio.get_running_loop().time()
    half = [await sent(address, data) for data in (*[HALF] * 20, *[b""] * 20, *[WHOLE + HALF] * 5)]
    slow, writer = await sent(address, HALF)

    async def trickle() -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.05)

    trickling = asyncio.create_task(trickle())
    waiting = asyncio.gather(*(ended(reader) for reader, _ in half), ended(slow))
    while not waiting.done():
        assert await status(address) == 200, "others are served"
        await asyncio.sleep(0.01)
    assert asyncio.get_running_loop().time() - began >= 0.8 * SLOWER
    await trickling
    *said, slow_said = await waiting
    assert not any(said[:40])
    assert all(b"200 OK" in one for one in said[40:]), "the request before the half one is answered"
    assert not slow_said


async def test_bodies_that_never_end(serve: Serve) -> None:
    _, address = await serve(http_body_seconds=0.3)
    open_ones = [await sent(address, POST + b"part") for _ in range(20)]
    waiting = asyncio.gather(*(ended(reader) for reader, _ in open_ones))
    while not waiting.done():
        assert await status(address) == 200
        assert await status(address, POST + bytes(1000)) == 200
    assert {said.split()[1] for said in await waiting} == {b"408"}
    # The connection does not wait long for a body that nobody wants, behind a refusal.
    reader, _ = await sent(address, POST.replace(b"POST /", b"POST /none"))
    assert b"404" in await ended(reader)


async def test_a_caller_that_reads_nothing(serve: Serve) -> None:
    one, address = await serve(http_send_seconds=0.3)
    _, writer = await sent(address, WHOLE.replace(b"GET /", b"GET /flood"))
    await until(lambda: one.cancelled)
    writer.close()


async def test_a_client_that_leaves_during_a_write_is_no_error_in_the_log(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    _, address = await serve()
    async with httpx2.AsyncClient(timeout=60) as client:
        with pytest.raises(httpx2.TransportError):
            await client.get(f"http://{address}/left")
        assert (await client.get(f"http://{address}/")).text == "here"
    assert not caplog.records


async def test_a_stream_goes_on_for_longer_than_every_limit(serve: Serve) -> None:
    _, address = await serve(**{f"http_{what}_seconds": 0.2 for what in ("head", "body", "send", "idle")})
    async with httpx2.AsyncClient(timeout=60) as client:
        reply = await client.get(f"http://{address}/stream")
    assert reply.text == "event\n" * 10


async def test_connections_that_are_idle(serve: Serve) -> None:
    """After requests that do not wait for each other: a few are answered, who sends many at once is no client."""
    _, address = await serve(http_idle_seconds=0.3)
    one, _ = await sent(address, WHOLE)
    assert (await ended(one)).count(b"200 OK") == 1
    few, many = await sent(address, WHOLE * 8), await sent(address, WHOLE * 1000)
    assert (await ended(few[0])).count(b"200 OK") == 8
    assert (await ended(many[0])).count(b"200 OK") < 64


async def test_only_so_many_connections(serve: Serve, tmp_path: Path) -> None:
    """On a unix socket, where callers have no address, only the limit on all holds."""
    for place in ("127.0.0.1:0", f"unix:{tmp_path / 's'}"):
        _, address = await serve(
            place, http_connections=10, http_connections_per_address=10 if place[0] == "1" else 1
        )
        open_ones = [await sent(address, HALF) for _ in range(10)]
        await until(lambda at=address: _is(status(at), 0))
        for _, writer in open_ones:
            writer.close()
        await until(lambda at=address: _is(status(at), 200))


async def test_only_so_many_connections_of_an_address(serve: Serve) -> None:
    """Another address of the machine is served meanwhile; who ends a connection may have another."""
    _, address = await serve("0.0.0.0:0", http_connections=50, http_connections_per_address=10)
    here = f"127.0.0.1:{address.rpartition(':')[2]}"
    open_ones = [await sent(here, HALF) for _ in range(10)]
    await until(lambda: _is(status(here), 0))
    reader, _ = await sent(here, WHOLE, "127.0.0.2")
    assert b"200 OK" in await reader.readline()
    open_ones[0][1].close()
    await until(lambda: _is(status(here), 200))


async def test_tls_handshakes_that_never_end(serve: Serve, authority: Callable[[str], Any]) -> None:
    ours = authority("ours")
    cert, key = ours.issue("gateway")
    _, address = await serve(http_head_seconds=0.5, tls_cert=cert, tls_key=key)
    open_ones = [await sent(address, data) for data in (b"", b"\x16\x03\x01\x02\x00") for _ in range(20)]
    said = await asyncio.gather(*(ended(reader) for reader, _ in open_ones))
    assert not any(b"HTTP" in one for one in said)
    async with httpx2.AsyncClient(verify=ssl.create_default_context(cafile=str(ours.ca))) as client:
        assert (await client.get(f"https://{address}/")).text == "here"


async def test_heads_that_are_too_large(serve: Serve) -> None:
    _, address = await serve()
    for piece in (b"X: " + b"x" * 8000 + b"\r\n", b"\r\n", b"X: y\r\n", b"x", b"X:" + b" " * 8000 + b"\r\n"):
        reader, writer = await sent(address, WHOLE[:-2] if len(piece) > 2 or piece == b"x" else b"")
        reading = asyncio.create_task(ended(reader))
        with contextlib.suppress(ConnectionError):
            for _ in range((4 << 20) // len(piece) // 64 + 64):
                writer.write(piece * 64)
                await writer.drain()
                # Where the kernel takes megabytes at once, `drain` lets nobody else run.
                await asyncio.sleep(0)
                if reading.done():
                    break
            else:
                pytest.fail(f"all of {piece[:10]!r} was read")
        assert b"200" not in await reading


async def test_malformed_requests_end_the_connection_with_a_400_that_quotes_nothing(serve: Serve) -> None:
    _, address = await serve(http_head_seconds=0.5, http_body_seconds=0.5, http_idle_seconds=0.5)
    shapes = malformed()
    open_ones = [await sent(address, data) for data in shapes.values()]
    replies = await asyncio.gather(*(ended(reader) for reader, _ in open_ones))
    for name, said in zip(shapes, replies, strict=True):
        assert b"zq7secret" not in said, (name, said)
        assert not said or said.split()[1] in (b"200", b"400", b"404", b"405", b"408", b"413", b"417"), (name, said)


async def _is(asked: Any, wanted: int) -> bool:
    return await asked == wanted
