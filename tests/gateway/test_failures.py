"""What breaks around a gateway: workers killed and busy, callers that leave, kill -9, too many streams."""

import asyncio
import contextlib
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fusionkv.gateway.client.client import AsyncClient, Client
from fusionkv.gateway.client.results import Token
from fusionkv.protos.runtime.errors import ResourceExhausted, ServiceError, Unavailable
from tests.commands import fusionkv
from tests.gateway.conftest import Serve, Start, succeeds
from tests.ports import free_port
from tests.processes import Footing
from tests.waiting import wait_until

pytestmark = pytest.mark.system


def streaming(client: Client, tokens: int) -> Any:
    """An answer over corpus c that has begun."""
    events = client.stream("c", "a long one?", max_tokens=tokens)
    next(event for event in events if isinstance(event, Token))
    return events


def answered(client: Client, question: str = "a question?") -> bool:
    return client.ask("c", question, max_tokens=1).summary.tokens_generated == 1


def answered_soon(client: Client) -> None:
    """Tries again for as long as the status says to."""
    wait_until(lambda: succeeds(lambda: answered(client), Unavailable, ResourceExhausted))
    assert answered(client)


def test_a_killed_worker_is_replaced_before_the_first_token(start: Start, serve: Serve) -> None:
    first = start("--listen", f"127.0.0.1:{free_port()}")
    second = start()
    client, _ = serve([first, second])
    client.ingest("c", "d.txt", "some text")
    first.kill9()
    assert all(answered(client, f"question {i}?") for i in range(8))
    events = streaming(client, 1500)
    second.kill9()
    with pytest.raises(Unavailable):
        list(events)
    with pytest.raises(Unavailable, match=r"fusion worker .*\(is the worker running\? is the gateway's"):
        client.ask("c", "nobody there?")
    assert [i.name for i in client.list()] == ["c"]
    start("--listen", first.address)
    answered_soon(client)


def test_encoding_without_the_cache_says_that_the_cache_is_away(start: Start, serve: Serve) -> None:
    client, _ = serve(start("--cache", f"127.0.0.1:{free_port()}"))
    client.ingest("c", "d.txt", "some text")
    with pytest.raises(Unavailable, match=r"at the cache service at .*failed to connect") as raised:
        list(client.precompute("c"))
    assert "is the worker running?" not in str(raised.value)


def test_too_many_are_refused_until_one_leaves(start: Start, serve: Serve) -> None:
    """The gateway's only place is free again then, and the worker's, which lets none wait."""
    client, _ = serve(start("--max-requests", "1", "--max-queue", "0"), "--max-requests", "1")
    client.ingest("c", "d.txt", "some text")
    events = streaming(client, 1900)
    with pytest.raises(ResourceExhausted, match="1 requests are in flight;"):
        client.ask("c", "busy?", max_tokens=1)
    events.close()
    answered_soon(client)


@pytest.mark.long
@pytest.mark.slow
def test_a_gateway_killed_during_ingest_has_whole_documents_only(start: Start, serve: Serve) -> None:
    worker = start()
    client, gateway = serve(worker, "--chunk-tokens", "32")
    acknowledged: list[str] = []
    ten = threading.Event()

    def ingest(part: int) -> None:
        with contextlib.suppress(ServiceError):
            for i in range(1000):
                name = f"{part}-{i:03}.txt"  # of one length, as the number of chunks depends on it
                client.ingest("c", name, "\n\n".join(f"{name} part {p}" for p in range(3)))
                acknowledged.append(name)
                if len(acknowledged) >= 10:
                    ten.set()

    with ThreadPoolExecutor(4) as threads:
        threads.map(ingest, range(4))
        assert ten.wait(120)
        gateway.kill9()
    client, _ = serve(worker)
    items = {i.name: i.chunks for i in client.list("c")}
    assert set(acknowledged) <= set(items)
    chunks = items[acknowledged[0]]
    assert set(items.values()) == {chunks}
    for name in acknowledged[:5]:
        found = [p for p in client.retrieve("c", f"{name} part", top_k=20) if p.document == name]
        assert len(found) == chunks


@pytest.mark.long
@pytest.mark.slow
def test_a_busy_gateway_refuses_documents_and_the_command_waits(start: Start, serve: Serve, tmp_path: Path) -> None:
    limits = ("--max-requests", "1", "--max-document-bytes", "1KiB", "--max-ingest-bytes", "1KiB")
    client, gateway = serve(start(), *limits)
    pages = tmp_path / "pages"
    pages.mkdir()
    for i in range(12):
        (pages / f"{i}.txt").write_text("some words " * 60)
    fusionkv("ingest", "c", pages, "--gateway", gateway.address, "--concurrency", "12")
    assert len(client.list("c")) == 12
    assert client.stats().requests_failed > 0, "or nothing was refused"


STREAMS, PLACES = 80, 4
# More of the gateway's memory than before: 1,000 streams took 63 MB (docs/journal/reliability.md).
MOST_BYTES = 64 << 20


async def outcomes(address: str) -> Counter[str]:
    """Of as many questions at once: their statuses, and whether one that is refused is told when to come back."""

    async def one(number: int) -> str:
        try:
            await client.ask("c", f"page {number}?", max_tokens=2)
        except ServiceError as error:
            return f"{error.status.name}{' for now' if error.retry_after is not None else ''}"
        return "OK"

    async with AsyncClient(address, timeout=120) as client:
        return Counter(await asyncio.gather(*map(one, range(STREAMS))))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_streams_are_held_or_refused(start: Start, serve: Serve) -> None:
    client, gateway = serve(start("--max-queue", str(STREAMS)), "--max-requests", str(PLACES))
    client.ingest("c", "d.txt", "some text")
    assert answered(client)
    before = most = Footing.of(gateway.process.pid)
    asking = asyncio.create_task(outcomes(gateway.address))
    while not asking.done():
        most = max(most, Footing.of(gateway.process.pid), key=lambda footing: footing.bytes)
        await asyncio.sleep(0.1)
    assert most.bytes <= before.bytes + MOST_BYTES
    assert not Footing.of(gateway.process.pid).outgrew(before, 1, MOST_BYTES, 24)
    found = await asking
    assert set(found) == {"OK", "RESOURCE_EXHAUSTED for now"}
    assert found["OK"] >= PLACES
