"""KV events: read by vLLM's own definitions, in order, replayed, and of no consequence to the service."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusionkv.kvcache_service.keys import entry_key, path_keys, primed_variant
from tests.kvcache_service.tools import MIB, NAMESPACE, digest, payload, record, serving
from tests.system.cache_process import flags
from tests.waiting import until, wait_until

msgspec = pytest.importorskip("msgspec")
zmq = pytest.importorskip("zmq")
events: Any = pytest.importorskip("fusionkv.kvcache_service.events")
END = (-1).to_bytes(8, "big", signed=True)


# From vllm/distributed/kv_events.py of vLLM 0.32, the same fields in the same order.
class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Subscriber:
    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket, self._replay = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self._socket.connect(endpoint)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self._replay.connect(events.replay_endpoint(endpoint))
        self.numbers, self.received = list[int](), list[Any]()

    def take(self) -> list[Any]:
        """All events so far."""
        while self._socket.poll(0):
            self._add(*self._socket.recv_multipart())
        return self.received

    def replay(self, start: int) -> list[Any]:
        """All events that are left from a sequence number on."""
        self.numbers, self.received = [], []
        self._replay.send_multipart((b"", start.to_bytes(8, "big")))
        while self._replay.poll(10_000):
            _, topic, number, payload = self._replay.recv_multipart()
            if number == END:
                return self.received
            self._add(topic, number, payload)
        raise AssertionError("no end of a replay")

    def _add(self, topic: bytes, number: bytes, payload: bytes) -> None:
        assert topic.startswith(b"kv@")
        batch = msgspec.msgpack.Decoder(KVEventBatch).decode(payload)
        assert abs(batch.ts - time.time()) < 600
        assert batch.data_parallel_rank == 0
        self.numbers.append(int.from_bytes(number, "big"))
        self.received += batch.events

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/e"


@pytest.fixture
def publisher(endpoint: str) -> Iterator[Any]:
    with contextlib.closing(events.EventPublisher(endpoint, "kv@pod@fusionkv")) as made:
        yield made


@pytest.fixture
def subscriber(publisher: Any, endpoint: str) -> Iterator[Subscriber]:
    with contextlib.closing(Subscriber(endpoint)) as made:
        # Its subscription has arrived once it receives: until then, the publisher sends it nothing.
        wait_until(lambda: publisher.removed(b"ping", "disk") or made.take())
        yield made


def known(received: list[Any]) -> dict[str, set[bytes]]:
    """What a router holds of these events: keys by medium."""
    held: dict[str, set[bytes]] = {"CPU": set(), "STORAGE": set()}
    for event in received:
        if isinstance(event, AllBlocksCleared):
            held = {"CPU": set(), "STORAGE": set()}
        elif isinstance(event, BlockStored):
            held[event.medium or ""].update(map(bytes, event.block_hashes))  # type: ignore[arg-type]
        else:
            held[event.medium or ""].difference_update(map(bytes, event.block_hashes))
    return held


def held(store: Any) -> dict[str, set[bytes]]:
    tiers = {"memory": "CPU", "disk": "STORAGE"}
    return {
        medium: {entry.record.key for entry in store.entries if tier in entry.places}
        for tier, medium in tiers.items()
    }


async def test_a_router_knows_what_each_tier_holds(start: Any, publisher: Any, subscriber: Subscriber) -> None:
    """After puts, evictions from memory and from disk, promotions, and deletions."""
    service = await start(memory=2 * MIB, disk=6 * MIB)
    service.store.entries.listener = publisher
    for number in range(24):
        await service.put(["S", f"{number}"], payload(f"{number}", MIB // 2))
    for number in range(24):
        if entry := await service.entry("S", f"{number}"):
            await service.fetch(entry)
    await service.settled()
    await until(lambda: known(subscriber.take()) == held(service.store))
    both = held(service.store)
    assert both["CPU"] < both["STORAGE"]
    assert any(isinstance(event, BlockRemoved) and event.medium == "CPU" for event in subscriber.received)
    assert any(isinstance(event, BlockRemoved) and event.medium == "STORAGE" for event in subscriber.received)
    await service.client.delete(namespace=NAMESPACE)
    await until(lambda: known(subscriber.take()) == {"CPU": set(), "STORAGE": set()})
    assert subscriber.numbers == list(range(subscriber.numbers[0], subscriber.numbers[-1] + 1))


async def test_an_event_says_how_its_entry_is_found(start: Any, publisher: Any, subscriber: Subscriber) -> None:
    service = await start()
    service.store.entries.listener = publisher
    variant, path = primed_variant(b"p" * 32), [digest(name) for name in "SAB"]
    await service.put("S", b"system", tokens=11)
    await service.put("SAB", b"chunk", variant=variant, tokens=5)

    def stored() -> list[Any]:
        return [event for event in subscriber.take() if isinstance(event, BlockStored) and event.medium == "CPU"]

    await until(lambda: len(stored()) == 2)
    system, chunk = stored()
    assert (system.block_hashes, system.parent_block_hash, system.block_size) == (
        [entry_key(NAMESPACE, path[:1])], None, 11,
    )  # fmt: skip
    assert chunk.block_hashes == [entry_key(NAMESPACE, path, variant)]
    assert chunk.parent_block_hash == path_keys(NAMESPACE, path)[1]
    assert chunk.extra_keys == [(NAMESPACE, path[-1], variant)]
    assert (chunk.token_ids, chunk.block_size, chunk.lora_id, chunk.lora_name) == ([], 5, None, None)


def test_one_that_comes_late_replays(publisher: Any, endpoint: str) -> None:
    """All, or from a number on; the first event voids what is known from before a start."""
    made = [record(name) for name in ("S", "SA", "SB")]
    for one in made:
        publisher.stored(one, "disk")
        publisher.removed(one.key, "memory")
    with contextlib.closing(Subscriber(endpoint)) as late:
        wait_until(lambda: len(late.replay(0)) == 7)
        assert isinstance(late.received[0], AllBlocksCleared)
        assert known(late.received)["STORAGE"] == {one.key for one in made}
        last = late.numbers[-1]
        late.replay(last)
        assert late.numbers == [last]
        assert late.replay(last + 1) == []
        # What is no request gets no answer.
        late._replay.send_multipart((b"", b"odd"))
        late._replay.send_multipart((b"odd",))
        assert len(late.replay(0)) == 7


def test_what_is_kept_for_replays_is_bounded(publisher: Any, endpoint: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(events, "_REPLAY_BYTES", 1000)
    one = record("S")
    with contextlib.closing(Subscriber(endpoint)) as late:
        for _ in range(20):
            publisher.stored(one, "disk")
            wait_until(publisher._queue.empty)
        wait_until(lambda: late.replay(0) and late.numbers[0] > 0)
        assert sum(len(payload) for _, payload in publisher._sent) <= 1000


def test_a_replay_has_no_gaps(endpoint: str, monkeypatch: Any) -> None:
    """However many batches there were, and also when another replay was read just before."""
    monkeypatch.setattr(events, "_MAX_MESSAGES", 100)
    monkeypatch.setattr(events, "_BATCH", 1)
    with contextlib.closing(events.EventPublisher(endpoint, "kv@pod@fusionkv")) as publisher:
        for _ in range(5000):
            publisher.stored(record("S"), "disk")
        wait_until(publisher._queue.empty)
        with contextlib.closing(Subscriber(endpoint)) as late:
            for _ in range(5):
                late.replay(0)
                assert late.numbers[-1] == 5000
                assert late.numbers == list(range(4901, 5001))


def test_one_that_reads_nothing_and_one_that_is_killed_cost_nothing(
    publisher: Any, subscriber: Subscriber, endpoint: str, monkeypatch: Any
) -> None:
    """Nor does a queue that is full: the number that is missing tells a subscriber of it."""
    dead = Subscriber(endpoint)
    dead.close()
    one, began = record("S"), time.monotonic()
    for _ in range(5000):
        publisher.stored(one, "disk")
    assert time.monotonic() - began < 5
    wait_until(publisher._queue.empty)
    wait_until(lambda: len(subscriber.take()) > 5000)
    monkeypatch.setattr(publisher._queue, "maxsize", 1)
    for _ in range(2000):
        publisher.stored(one, "disk")
    monkeypatch.setattr(publisher._queue, "maxsize", 0)

    def gap() -> bool:
        publisher.stored(one, "disk")
        subscriber.take()
        return subscriber.numbers[-1] - subscriber.numbers[0] >= len(subscriber.numbers)

    wait_until(gap)


@pytest.mark.parametrize("endpoint", ["tcp://*", "http://127.0.0.1:1", "ipc://relative", "tcp://127.0.0.1:port", ""])
def test_a_malformed_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(OSError, match=r"expected tcp://ADDRESS:PORT or ipc:///PATH"):
        events.EventPublisher(endpoint, "kv@pod@fusionkv")


def test_replays_are_beside_the_events() -> None:
    assert events.replay_endpoint("tcp://*:5557") == "tcp://*:5558"
    assert events.replay_endpoint("ipc:///run/kv") == "ipc:///run/kv.replay"


def test_an_endpoint_that_cannot_be_used_is_named() -> None:
    with pytest.raises(OSError, match="events_endpoint can't be used: ipc:///nowhere/at/all: No such file"):
        events.EventPublisher("ipc:///nowhere/at/all", "kv@pod@fusionkv")


@pytest.mark.system
async def test_a_service_publishes_where_it_is_told(launch: Any, tmp_path: Path, endpoint: str) -> None:
    """From its start on, when it publishes what its disk has."""
    async with serving(tmp_path / "data") as service:
        await service.put("S", b"data")
    launch(*flags(tmp_path / "data", "--events-endpoint", endpoint))

    def stored(subscriber: Subscriber) -> bool:
        first, *others = subscriber.replay(0)
        assert isinstance(first, AllBlocksCleared)
        return [event.medium for event in others if isinstance(event, BlockStored)] == ["STORAGE"]

    with contextlib.closing(Subscriber(endpoint)) as subscriber:
        await until(lambda: stored(subscriber))
