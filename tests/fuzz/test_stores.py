"""What lies in the tiers and in Redis, written by whoever could: a service takes what it can use, and no other."""

import asyncio
import itertools
import math
import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from fusionkv.kvcache_service.cluster.shared_index import Change, SharedIndex, group_of
from fusionkv.kvcache_service.index import record as records
from fusionkv.kvcache_service.index.record import Record
from fusionkv.kvcache_service.metrics import Counters
from fusionkv.kvcache_service.store.entries import Residents
from fusionkv.kvcache_service.tiers.base import Recovered
from fusionkv.kvcache_service.tiers.disk import DiskTier
from fusionkv.kvcache_service.tiers.memory import MemoryTier
from fusionkv.kvcache_service.tiers.remote import RemoteTier
from tests.fuzz.decoders import GOOD
from tests.fuzz.effort import fuzz
from tests.system.redis_process import RedisServer

pytestmark = pytest.mark.hypothesis

MIB = 1 << 20
NUMBERS = st.one_of(st.integers(0, 5), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
PLACES = st.one_of(st.integers(0, 40).map(lambda n: 4096 * n), NUMBERS)
HEATS = st.one_of(st.floats().map(lambda heat: struct.pack("<d", heat)), st.binary(max_size=9))


@st.composite
def entries(draw: st.DrawFn) -> tuple[bytes, bytes, bytes]:
    """Key, record and heat of an entry that nobody put; the record's checksum is right."""
    key = draw(st.one_of(st.binary(min_size=32, max_size=32), st.binary(min_size=1, max_size=40)))
    names = st.binary(min_size=32, max_size=32)
    trail, variant = b"".join(draw(st.lists(names, max_size=3))), draw(st.one_of(st.just(b""), names))
    size, offset = draw(st.one_of(st.integers(1, 9000), NUMBERS)), draw(PLACES)
    small = st.integers(0, 2**32 - 1)
    numbers, signature = (size, draw(small), draw(small)), draw(st.binary(max_size=70))
    made = Record(key, draw(names), trail, variant, *numbers, bytes(16), draw(st.booleans()), signature)
    return key, records.encode(made, offset), draw(HEATS)


INDEXES = st.lists(entries(), max_size=8, unique_by=lambda entry: entry[0])


def checked(found: Sequence[Recovered], capacity: int) -> None:
    """Places do not overlap and lie within the tier; heats can be ordered; a table takes all of it."""
    places = sorted((each.place.offset, each.place.size) for each in found)
    assert all(size > 0 and at + size <= capacity for at, size in places)
    assert all(at + size <= after for (at, size), (after, _) in itertools.pairwise(places))
    assert all(0 <= each.heat < math.inf for each in found)


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where that can be: thousands of small transactions."""
    made = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    yield made
    shutil.rmtree(made)


def test_the_index_of_a_disk(folder: Path) -> None:
    tier = DiskTier(folder, MIB)
    (folder / "segments/000000.kv").write_bytes(bytes(MIB // 2))
    ledger = tier._ledger

    def index_on_disk(found: list[tuple[bytes, bytes, bytes]]) -> None:
        with ledger._env.begin(write=True) as txn:
            txn.drop(ledger._records, delete=False)
            txn.drop(ledger._heats, delete=False)
            for key, value, heat in found:
                txn.put(key, value, db=ledger._records)
                txn.put(key, heat or b"-", db=ledger._heats)
        checked(list(tier.recover()), MIB)
        residents = Residents([MemoryTier(MIB), tier], Counters())
        residents.recover()
        residents.check_integrity()

    fuzz(index_on_disk, INDEXES, 60)
    tier.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path_factory.mktemp("redis"))
    yield made
    made.kill9()


def test_the_records_of_a_tier_in_redis(server: RedisServer) -> None:
    tier = RemoteTier(server.url, 8 << 30, space="own", ttl=60, timeout=30)
    client = server.client()

    def records_in_redis(found: list[tuple[bytes, bytes, bytes]]) -> None:
        for name in client.scan_iter(b"fusionkv:tier:{own}:r:*"):
            client.delete(name)
        for key, value, heat in found:
            client.set(b"fusionkv:tier:{own}:r:" + key, value + heat)
        checked(list(tier.recover()), 8 << 30)
        residents = Residents([MemoryTier(MIB), tier], Counters())
        residents.recover()
        residents.index.check_integrity()

    fuzz(records_in_redis, INDEXES, 40)
    tier.close()
    client.close()


MARKS = st.one_of(st.binary(min_size=8, max_size=8), st.binary(max_size=20))
STATES = st.one_of(
    st.tuples(
        st.one_of(st.integers(0, 10**30), st.just(2**43), st.just("x"), st.just("")),
        st.sampled_from(["serving", "leaving", "left", "?", ""]),
        st.one_of(st.just("127.0.0.1:1"), st.text(max_size=20)),
    ).map(lambda parts: " ".join(map(str, parts)).encode(errors="surrogateescape")),
    st.binary(max_size=30),
)
NOTES = st.one_of(st.binary(max_size=100), st.binary(min_size=37, max_size=37), st.binary(min_size=74, max_size=74))
SHARED = st.tuples(
    st.dictionaries(MARKS, STATES, max_size=4),
    st.lists(NOTES, max_size=3),
    st.dictionaries(st.binary(max_size=60), st.binary(max_size=200), max_size=3),
)


def test_the_shared_index_in_redis(server: RedisServer) -> None:
    """Members, notes and entries of any bytes: a service goes on finding and publishing what is its own."""
    own, change = b"own mark", Change(GOOD.key, group_of(GOOD), GOOD)
    group = change.group
    client = server.client()

    async def one(index: SharedIndex, members: Any, notes: Any, found: Any) -> None:
        pipe = client.pipeline(transaction=False)
        pipe.flushall()
        for name, fields in ((b"fusionkv:members", members), (b"fusionkv:group:" + group, found)):
            if fields:
                pipe.hset(name, mapping=fields)
        if notes:
            pipe.rpush(b"fusionkv:seen:" + own, *notes)
        pipe.execute()
        _, seen = await index.beat(own, "127.0.0.1:2", "serving", {})
        assert all(times > 0 for _, times, _ in seen)
        assert index.members[own].address == "127.0.0.1:2"
        await index.apply(own, [change])
        assert GOOD in [entry for entry, _ in (await index.entries([group]))[0]]

    with asyncio.Runner() as runner:
        index = SharedIndex(server.url, cluster=False, password=None, timeout=30, expiry=30)

        def shared_index_in_redis(given: tuple[Any, Any, Any]) -> None:
            runner.run(one(index, *given))

        fuzz(shared_index_in_redis, SHARED, 40)
        runner.run(index.close())
    client.close()
