"""A Redis behind TLS: its certificate is checked against the CA that the URL names, and for the host it names."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fusionkv.kvcache_service.remote.redis_engine import RedisEngine
from fusionkv.kvcache_service.tiers.base import Unreachable
from tests.conftest import Authority
from tests.system.redis_process import RedisServer

pytestmark = pytest.mark.system


@asynccontextmanager
async def behind_tls(redis: RedisServer, certificate: tuple[Path, Path]) -> AsyncIterator[int]:
    """The port of a TLS end in front of a Redis (the one that tests start speaks none itself)."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        sink.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_connection("127.0.0.1", redis.port)
        await asyncio.gather(copy(reader, outer), copy(inner, writer))

    end = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    try:
        yield end.sockets[0].getsockname()[1]
    finally:
        end.close()


@pytest.fixture
async def ask(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """`await ask(certificate, ca)` writes to a Redis with that certificate, and reads it."""
    redis = RedisServer(tmp_path)

    async def once(certificate: tuple[Path, Path], ca: Path) -> bool:
        async with behind_tls(redis, certificate) as port:
            url = f"rediss://127.0.0.1:{port}?ssl_ca_certs={ca}"
            engine = RedisEngine(url, ttl=60, timeout=20)
            try:
                await asyncio.to_thread(engine.put, [("a", b"1")])
                return await asyncio.to_thread(engine.get, ["a"]) == [b"1"]
            finally:
                engine.close()

    yield once
    redis.kill9()


async def test_a_certificate_of_the_named_ca_is_taken(
    ask: Callable[..., Any], authority: Callable[[str], Authority]
) -> None:
    own = authority("own")
    assert await ask(own.issue("redis"), own.ca)


async def test_another_ca_and_another_host_are_refused(
    ask: Callable[..., Any], authority: Callable[[str], Authority]
) -> None:
    own, other = authority("own"), authority("other")
    with pytest.raises(Unreachable):
        await ask(own.issue("redis"), other.ca)
    with pytest.raises(Unreachable):
        await ask(own.issue("elsewhere", ("10.9.8.7",)), own.ca)
