"""A cache service that fails in the middle: every answer is full attention's, says so, and comes in time."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from grpc.aio import insecure_channel

from fusionkv.fusion_worker.load import write_back
from fusionkv.fusion_worker.load.prompt_load import PromptLoad
from fusionkv.fusion_worker.prompt import Chunk, ChunkSource
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.kvcache.v1.kvcache_pb2_grpc import KVCacheServiceStub
from tests.chaos.network import Relay
from tests.fusion_worker.oracle import Parts, oracle, prompt, random_ids
from tests.ports import free_port
from tests.services import start_cache

pytestmark = pytest.mark.system
LOOKUP, FETCH = 2.0, 1.0
# What a busy machine may add to the times below, which without these limits were 40 s and more.
MARGIN = 20.0
# KV travels in pieces larger than this, all other messages are smaller.
BULK = 4096
# The machine itself, at an address where the service does not listen.
HOST = "127.0.0.9"
CACHE_FAILED = ("fetch failed: ", "lookup failed: ", "fetches took longer ")


class Line:
    """Does to bulk data between a worker and the cache service what it is told; the rest passes.

    `address` is where the worker finds the service. plane: whether it can reach the data plane there as well.
    """

    def __init__(self, target: str, data_port: int, plane: bool) -> None:
        self.address = f"{HOST}:{free_port()}"
        ways = {self.address: target, **({f"{HOST}:{data_port}": f"127.0.0.1:{data_port}"} if plane else {})}
        self._ways = [Way(self, listen, to) for listen, to in ways.items()]
        self.up: Callable[[bytes], bytes | None] = lambda data: data
        self.down: Callable[[bytes], bytes | None] = lambda data: data
        self.touched = 0
        self._stalled = False

    async def start(self) -> None:
        for way in self._ways:
            await way.start()

    async def close(self) -> None:
        for way in self._ways:
            await way.close()

    def passed(self, data: bytes, down: bool) -> bytes | None:
        if self._stalled or len(data) < BULK:
            return b"" if self._stalled else data
        self.touched += down
        return self.down(data) if down else self.up(data)

    def stall(self, data: bytes) -> bytes:
        """From here on nothing passes, in either direction, until the connections are cut."""
        self._stalled = True
        return b""

    def heal(self) -> None:
        """New connections work as they should; those that stalled end."""
        self.up = self.down = lambda data: data
        if self._stalled:
            for way in self._ways:
                way.part()
        self._stalled = False


class Way(Relay):
    """One of a line's ways: that of gRPC, or that of the data plane."""

    def __init__(self, line: Line, listen: str, target: str) -> None:
        super().__init__(listen, target)
        self._line = line

    def passed(self, data: bytes, down: bool) -> bytes | None:
        return self._line.passed(data, down)


@pytest.fixture(params=[True, False], ids=["data plane", "grpc"])
async def line(cache_service: str, request: Any) -> AsyncIterator[Line]:
    async with insecure_channel(cache_service) as channel:
        granted = await KVCacheServiceStub(channel).Connect(pb.ConnectRequest(), timeout=20)
    made = Line(cache_service, granted.port, request.param)
    await made.start()
    yield made
    await made.close()


@pytest.fixture
def behind(line: Line, cached: Any, start: Any) -> Any:
    """`await behind(family, parts, ...)`: a worker that the line connects to a cache service that has the prompt."""

    async def make(family: str, parts: Parts, **more: Any) -> Any:
        await (await cached(family)).fill(*parts)
        rig = await start(family, cache=line.address, **more)
        # Whatever is slow once is over.
        await undegraded(rig, ([1], [[2]], [3]), tenant=rig.tenant + "warm")
        await rig.stored()
        return rig

    return make


async def undegraded(rig: Any, parts: Parts, **more: Any) -> Any:
    """Asks until the cache does not fail; gives that answer."""
    async with asyncio.timeout(60):
        while (answer := await rig.ask(*parts, **more)).summary.degraded:
            pass
    return answer


def flip(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]


FAULTS = {
    "a flipped bit": flip,
    "nothing more comes": None,
    "the connection breaks": lambda data: None,
    "the connection breaks halfway": lambda data: data[: len(data) // 2],
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fetch_that_fails(fault: str, line: Line, behind: Any) -> None:
    parts = prompt(90, 70)
    rig = await behind("qwen3", parts, lookup_timeout=LOOKUP, fetch_timeout=FETCH)
    line.down = FAULTS[fault] or line.stall
    expected = oracle("qwen3").full_attention(parts)
    started = time.perf_counter()
    answers = await asyncio.gather(*(rig.ask(*parts, ratio=r, expected=expected) for r in (0.0, 0.4)))
    elapsed = time.perf_counter() - started
    assert line.touched
    for answer in answers:
        s = answer.summary
        # A broken connection may fail the other request's lookup as well.
        assert s.degraded_reason.startswith(CACHE_FAILED)
        assert (s.degraded, s.ratio, s.tokens_recomputed, s.context_tokens) == (True, 1.0, 160, 160)
        assert (len(s.hits), s.chunks_missed, s.tokens_encoded, s.bytes_fetched) == (0, 0, 0, 0)
    # The fetch may also be told to delete what arrived damaged, with a timeout of its own.
    assert elapsed < LOOKUP + 2 * FETCH + MARGIN
    await rig.settled()

    line.heal()
    await undegraded(rig, parts, ratio=1.0, expected=expected)


async def test_a_request_beside_one_that_fails(line: Line, behind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests wait for one fetch; one is cancelled, the fetch fails, the other is answered all the same."""
    parts = prompt(120)
    rig = await behind("llama", parts, lookup_timeout=30, fetch_timeout=FETCH)
    cache, both = rig.servicer.cache, asyncio.Barrier(2)
    look_up = cache.lookup

    async def together(*args: Any, **more: Any) -> Any:
        """Neither fetches before both have looked up: what stalls is no lookup."""
        found = await look_up(*args, **more)
        await both.wait()
        return found

    monkeypatch.setattr(cache, "lookup", together)
    line.down = line.stall
    expected = oracle("llama").full_attention(parts)
    first, second = (asyncio.create_task(rig.ask(*parts, expected=expected)) for _ in range(2))
    await rig.until(lambda: line.touched > 0)
    first.cancel()
    assert (await second).summary.degraded
    assert first.cancelled()


async def test_a_cache_slow_over_many_chunks_costs_one_timeout(line: Line, behind: Any) -> None:
    parts = prompt(*range(78, 84))
    rig = await behind("llama", parts, lookup_timeout=LOOKUP, fetch_timeout=2.0, max_loads=1)

    def crawl(data: bytes) -> bytes:
        time.sleep(0.2)  # a chunk comes in two or three pieces: under the timeout for one, and over it for six
        return data

    line.down = crawl
    started = time.perf_counter()
    answer = await rig.ask(*parts, ratio=0.0, expected=oracle("llama").full_attention(parts))
    assert time.perf_counter() - started < LOOKUP + 2.0 + MARGIN
    assert answer.summary.degraded_reason == "fetches took longer than 2 s together"
    line.heal()


@pytest.mark.parametrize("slow", ["lookup", "fetch"])
async def test_a_slow_cache_costs_no_more_than_its_bound(slow: str, line: Line, behind: Any) -> None:
    """Whatever the timeouts of single calls are: here they are a hundred times as long."""
    parts, bound = prompt(120), 0.6
    rig = await behind("llama", parts, lookup_timeout=60.0, fetch_timeout=60.0, cache_seconds=bound)
    if slow == "lookup":
        line.stall(b"")
    line.down = line.stall
    answer = await rig.ask(*parts, expected=oracle("llama").full_attention(parts))
    assert answer.summary.degraded_reason.startswith(CACHE_FAILED)
    seconds = answer.summary.seconds
    assert bound / 2 < seconds.lookup + seconds.load < 30
    line.heal()


async def test_loads_that_end_before_their_first_step_hold_nothing(start: Any) -> None:
    """As when another part of the prompt fails while its request waits for room."""
    rig = await start("llama")
    chunks = [Chunk(tuple(random_ids(20, number))) for number in range(3)]
    path = tuple(chunk.digest for chunk in chunks)
    parts = [ChunkSource(c, 20 * n, 20 * n, path[: n + 1], c.digest, alone=False) for n, c in enumerate(chunks)]
    async with PromptLoad(rig.pool, rig.servicer.loader.loads).admit(parts, 4):
        pass
    await rig.settled()
    rig.pool.clear()  # of what was loaded to its end all the same
    assert rig.pool.free.count == rig.pool.capacity


async def test_a_load_that_nobody_waits_for_ends(line: Line, behind: Any) -> None:
    parts = prompt(90)
    slow = {"lookup_timeout": LOOKUP, "fetch_timeout": 60.0, "cache_seconds": 60.0}
    rig = await behind("llama", parts, max_loads=1, **slow)
    line.down = line.stall
    loads = rig.servicer.loader.loads
    # Nothing is fetched before both wait for it: from its first bytes on a lookup would not pass either.
    async with loads.turns:
        waiting = [asyncio.create_task(rig.ask(*parts)) for _ in range(2)]
        # Only the chunk: one request alone pins the system prompt three times, as its chunk's load needs it too.
        await rig.until(lambda: any(pooled.tokens == 90 and pooled.pins == 3 for pooled in loads._loads))
    await rig.until(lambda: bool(line.touched))
    waiting[0].cancel()
    await asyncio.wait([waiting[0]])
    await asyncio.sleep(0.05)
    assert loads._loads, "the other still waits for it"
    started = time.perf_counter()
    waiting[1].cancel()
    await asyncio.wait([waiting[1]])
    await rig.settled()
    assert time.perf_counter() - started < 30, "far from the fetch's timeout"
    assert not loads._loads
    assert rig.pool.chunks.idle < len(parts[1][0]), "nothing of the chunk is left"
    line.heal()
    await undegraded(rig, parts, expected=oracle("llama").full_attention(parts))


async def test_an_entry_that_is_gone_when_its_lease_has_ended_is_a_miss(
    start: Any, launch: Any, tmp_path: Path
) -> None:
    parts, service = prompt(40, 30), start_cache(launch, tmp_path, "--lease-ms", "50")
    await (await start("llama", cache=service.address)).fill(*parts)
    rig = await start("llama", cache=service.address, max_loads=1)
    loads, leases = rig.servicer.loader.loads, rig.servicer.cache._local._leases
    async with loads.turns:
        waiting = asyncio.create_task(rig.ask(*parts, ratio=0.0, expected=oracle("llama").full_reuse(parts)))
        await rig.until(lambda: len(loads._loads) == 3 and time.monotonic() > max(leases.values()))
        await rig.servicer.cache.delete(namespace=rig.namespace)
    s = (await waiting).summary
    assert (s.degraded_reason, s.chunks_missed) == ("", 2)


async def test_a_fetch_without_memory(cached: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = prompt(40, 30)
    await (await cached("llama")).fill(*parts)
    rig = await cached("llama")
    monkeypatch.setattr(rig.servicer.loader.storage, "put_in", out_of_memory)
    s = (await rig.ask(*parts, expected=oracle("llama").full_attention(parts))).summary
    assert s.degraded_reason == "fetch failed: out of memory"


def out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("out of memory\non this GPU")


async def test_nobody_there(special: Any) -> None:
    rig, parts = await special("qwen3", cache="127.0.0.1:1", lookup_timeout=LOOKUP), prompt(30, 30)
    expected, started = oracle("qwen3").full_attention(parts), time.perf_counter()
    recipes = "full_reuse", "prophetkv", "epic", "cache_craft+versions", "kvlink"
    for recipe in recipes:
        s = (await rig.ask(*parts, recipe=recipe, expected=expected)).summary
        assert (s.degraded, s.tokens_recomputed, s.context_tokens) == (True, 60, 60)
        assert "lookup failed" in s.degraded_reason
    assert time.perf_counter() - started < len(recipes) * LOOKUP + MARGIN
    plain = await rig.ask(*parts, recipe="full_attention")
    assert not plain.summary.degraded, "full attention does not ask the cache"


async def test_puts_into_the_void_hold_no_pages(line: Line, start: Any) -> None:
    """Chunks wait to be stored and the service answers no more: their pages are free after one timeout."""
    rig = await start("llama", cache=line.address, fetch_timeout=FETCH, lookup_timeout=30)
    line.up = line.stall
    answer = await rig.ask([1, 2], [random_ids(12, i) for i in range(50)], [3])
    assert not answer.summary.degraded
    started = time.perf_counter()
    await rig.settled()
    # Two are being sent, the rest wait: not one timeout for each pair of them, 25 s together.
    assert time.perf_counter() - started < 15 * FETCH
    assert rig.pool.chunks.idle > 50 * 12 - 1


async def test_a_chunk_that_an_unexpected_error_drops_counts(cached: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, parts, dropped = await cached("llama"), ([1, 2], [random_ids(9, 1)], [3]), Mock()
    monkeypatch.setattr(rig.servicer.loader.storage, "take_out", Mock(side_effect=RuntimeError("broken")))
    monkeypatch.setattr(write_back, "_dropped", dropped)
    await rig.fill(*parts)
    assert dropped.add.call_args_list == [call(1, {"fusionkv.reason": "error"})] * 2


async def test_no_room_to_wait(cached: Any) -> None:
    """max_puts = 0 stores nothing, and answers as ever."""
    rig, parts = await cached("llama", max_puts=0), ([1, 2], [random_ids(9, 1)], [3])
    for _ in range(2):
        assert not (await rig.fill(*parts)).summary.degraded
    assert (await (await cached("llama")).ask(*parts)).summary.chunks_missed == 1
