"""A Redis behind TLS: its certificate is checked against the CA that the URL names, and for the host it names."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fusionkv.kvcache_service.cluster.shared_index import SharedIndex
from fusionkv.protos.runtime.errors import Unavailable
from tests.conftest import Authority
from tests.system.redis_process import RedisServer

pytestmark = pytest.mark.system
MARK = b"m" * 8


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
async def beat(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """`await beat(certificate, ca)` says to a Redis with that certificate that somebody is alive."""
    redis = RedisServer(tmp_path)

    async def once(certificate: tuple[Path, Path], ca: Path) -> bool:
        async with behind_tls(redis, certificate) as port:
            url = f"rediss://127.0.0.1:{port}?ssl_ca_certs={ca}"
            index = SharedIndex(url, cluster=False, password=None, timeout=20, expiry=60)
            try:
                await index.beat(MARK, "a:1", "serving", {})
                return (await index.beat(MARK, "a:1", "serving", {}))[0]
            finally:
                await index.close()

    yield once
    redis.kill9()


async def test_a_certificate_of_the_named_ca_is_taken(
    beat: Callable[..., Any], authority: Callable[[str], Authority]
) -> None:
    own = authority("own")
    assert await beat(own.issue("redis"), own.ca)


async def test_another_ca_and_another_host_are_refused(
    beat: Callable[..., Any], authority: Callable[[str], Authority]
) -> None:
    own, other = authority("own"), authority("other")
    with pytest.raises(Unavailable):
        await beat(own.issue("redis"), other.ca)
    with pytest.raises(Unavailable):
        await beat(own.issue("elsewhere", ("10.9.8.7",)), own.ca)
