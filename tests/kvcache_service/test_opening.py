"""A store that serves while its index is still being loaded: found by key, held back, killed, damaged."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import lmdb
import pytest

from fusionkv.bench.cache import scale
from fusionkv.kvcache_service.client import HitKind
from fusionkv.kvcache_service.index.record import encode
from fusionkv.kvcache_service.store import recovery, store
from fusionkv.kvcache_service.tiers.base import Recovered
from fusionkv.kvcache_service.tiers.disk import DiskTier
from fusionkv.kvcache_service.tiers.index_file import HEATS, RECORDS, IndexReader
from fusionkv.protos.runtime.errors import DataLoss, NotFound, Unavailable
from tests.kvcache_service import tools
from tests.kvcache_service.test_index_rewrite import PAGE, churn, opened
from tests.kvcache_service.tools import digest
from tests.system.cache_process import check_stopped, flags
from tests.waiting import until

DATA = {name: tools.payload(name, 6000) for name in "ABCDEF"}


class Held(DiskTier):
    """A disk tier whose recovery stops after `first` entries, until `go` is set."""

    first = 0

    def recover(self) -> Iterator[Recovered]:
        self.go.wait(60)
        found = super().recover()
        yield from islice(found, self.first)
        self.later.wait(60)
        yield from found


@asynccontextmanager
async def opening(directory: Path, first: int | None, monkeypatch: Any) -> AsyncIterator[tuple[tools.Service, Any]]:
    """A service that loads `first` entries (None: the check of the index goes on), and what lets it load all."""
    monkeypatch.setattr(recovery, "_BATCH", 1)
    monkeypatch.setattr(Held, "go", threading.Event(), raising=False)
    monkeypatch.setattr(Held, "later", threading.Event(), raising=False)
    monkeypatch.setattr(Held, "first", first or 0)
    monkeypatch.setattr(tools, "DiskTier", Held)
    if first is not None:
        Held.go.set()

    async with tools.serving(directory, opened=False) as service:

        async def release() -> None:
            Held.go.set()
            Held.later.set()
            await service.store.ready.wait()

        try:
            await until(lambda: len(service.store.entries) == (first or 0))
            assert not service.store.ready.is_set()
            yield service, release
        finally:
            await release()


async def filled(directory: Path) -> dict[str, bytes]:
    """Stores the data; gives the entries' keys."""
    async with tools.serving(directory) as service:
        keys = {name: (await service.put(["S", name], data))[0] for name, data in DATA.items()}
        await service.put("SAF", DATA["F"], variant=digest("v"))
        return keys


async def kinds(service: tools.Service, *paths: str) -> list[HitKind]:
    """How the last elements of paths are found."""
    return [(await service.find(*path)).hits[-1].kind for path in paths]


@pytest.mark.parametrize("first", [None, 0, 3])
async def test_lookups_and_fetches_are_answered(tmp_path: Path, first: int | None, monkeypatch: Any) -> None:
    await filled(tmp_path)
    async with opening(tmp_path, first, monkeypatch) as (service, release):
        for loaded in (False, True):
            for name, data in DATA.items():
                assert await kinds(service, f"S{name}") == [HitKind.EXACT]
                assert await service.get("S", name) == data
            # Encoded right behind the system prompt, and found behind another chunk.
            hits = (await service.find(*"SBA")).hits
            assert [hit.kind for hit in hits] == [HitKind.MISS, HitKind.EXACT, HitKind.ALTERNATIVE]
            assert await service.fetch(hits[2].entry) == DATA["A"]
            assert await kinds(service, "SZ") == [HitKind.MISS]
            if not loaded:
                await release()
        assert len(service.store.entries) == len(DATA) + 1


async def test_puts_and_deletes_wait(tmp_path: Path, monkeypatch: Any) -> None:
    """Until it is known which space is free, nothing is written; an entry that is there already needs no space."""
    key = (await filled(tmp_path))["A"]
    async with opening(tmp_path, None, monkeypatch) as (service, release):
        used = service.store.residents.home.used_bytes
        put = asyncio.create_task(service.put(["S", "new"], b"x" * 9000))
        deletion = asyncio.create_task(service.client.delete([key]))
        await until(lambda: not put.done() and len(service.store.ready._waiters or ()) == 2)
        assert service.store.residents.home.used_bytes == used == 0
        assert await kinds(service, "SA") == [HitKind.EXACT]
        await release()
        assert (await put)[1]
        assert await deletion == 1
        assert await kinds(service, "SA") == [HitKind.MISS]
    async with tools.serving(tmp_path) as service:
        assert await kinds(service, "SA") == [HitKind.MISS]
        assert len(service.store.entries) == len(DATA) + 1


async def test_all_of_a_namespace_is_deleted(tmp_path: Path, monkeypatch: Any) -> None:
    await filled(tmp_path)
    async with opening(tmp_path, 3, monkeypatch) as (service, release):
        deletion = asyncio.create_task(service.client.delete(namespace=tools.NAMESPACE))
        await until(lambda: len(service.store.ready._waiters or ()) == 1)
        await release()
        assert await deletion == len(DATA) + 1
        assert len(service.store.entries) == 0


async def test_what_waits_too_long_is_unavailable(tmp_path: Path, monkeypatch: Any) -> None:
    await filled(tmp_path)
    monkeypatch.setattr(store, "_OPEN_SECONDS", 0.05)
    async with opening(tmp_path, None, monkeypatch) as (service, _):
        for call in (service.put(["S", "new"], b"x" * 9000), service.client.delete([digest("any")])):
            with pytest.raises(Unavailable, match="the index is being loaded"):
                await call


async def test_a_damaged_entry_is_deleted_once_that_can_be(tmp_path: Path, monkeypatch: Any) -> None:
    await filled(tmp_path)
    # Before the lookup, which may copy the entry to memory at any time.
    for segment in (tmp_path / "segments").glob("*.kv"):
        segment.write_bytes(segment.read_bytes().replace(DATA["A"], DATA["A"][:100] + b"damage" + DATA["A"][106:]))
    monkeypatch.setattr(store, "_OPEN_SECONDS", 0.05)
    async with opening(tmp_path, None, monkeypatch) as (service, release):
        entry = await service.entry(*"SA")
        for _ in range(2):
            with pytest.raises(DataLoss):
                await service.fetch(entry)
        await release()
        for error in (DataLoss, NotFound):
            with pytest.raises(error):
                await service.fetch(entry)


async def test_a_damaged_index_frees_what_was_found_with_its_lease(tmp_path: Path, monkeypatch: Any) -> None:
    """All values can be read, but not all keys are found: the check starts it empty."""
    lowest, file = min((await filled(tmp_path)).values()), tmp_path / "index" / "data.mdb"
    file.write_bytes(file.read_bytes().replace(lowest, bytes([lowest[0] ^ 0x80, *lowest[1:]])))
    async with opening(tmp_path, None, monkeypatch) as (service, release):
        found = {name: await service.find("S", name) for name in DATA}
        there = {name: lookup for name, lookup in found.items() if lookup.hits[1].entry is not None}
        assert there
        for name, lookup in there.items():
            assert await service.fetch(lookup.hits[1].entry) == DATA[name]
        await release()
        residents = service.store.residents
        assert len(residents.entries) == 0
        assert residents.home.used_bytes == len(there) * 8192, "what is leased is not free"
        assert (await service.put(["S", "new"], b"x" * 9000))[1]
        for lookup in found.values():
            await service.client.release(lookup.lease)
        assert residents.home.used_bytes == 12288


async def test_of_two_entries_that_claim_the_same_bytes_one_is_left(tmp_path: Path, monkeypatch: Any) -> None:
    await filled(tmp_path)
    tier = DiskTier(tmp_path, 16 * tools.MIB)
    found = {one.record.chunk: one for one in tier.recover()}
    owner, liar = found[digest("A")], found[digest("B")]
    tier.close()
    with lmdb.open(str(tmp_path / "index"), max_dbs=2) as env, env.begin(write=True) as txn:
        txn.put(liar.record.key, encode(liar.record, owner.place.offset), db=env.open_db(RECORDS, txn))
    async with opening(tmp_path, None, monkeypatch) as (service, release):
        assert await kinds(service, "SA", "SB") == [HitKind.EXACT, HitKind.EXACT]
        with service.store.reader.pinned(liar.record.key) as read:
            await release()
            with pytest.raises(NotFound, match="its place on the disk was another entry's"):
                await service.store.reader.verify(read)
        await until(lambda: len(service.store.entries) == len(DATA))
        assert await kinds(service, "SA", "SB") == [HitKind.EXACT, HitKind.MISS]
        assert await service.get(*"SA") == DATA["A"]


@pytest.mark.system
async def test_killed_and_stopped_while_it_loads(launch: Any, cache_client: Any, tmp_path: Path) -> None:
    """An index of 30,000 entries is searched as soon as the process serves, and is whole after each end."""
    chunks, dice = 30_000, random.Random(1)
    scale.write_files(tmp_path / "data", chunks)
    disk = scale.capacity(chunks)
    early = 0
    for end in ("kill", "kill", "stop", "kill", "stop"):
        service = launch(*flags(tmp_path / "data", memory="1MiB", disk=str(disk)))
        path = [(name, ()) for name in scale.path_of(dice.randrange(chunks // scale.GROUP))]
        found = await cache_client(service).lookup(scale.NAMESPACE, path, timeout=20)
        assert [hit.kind for hit in found.hits[1:]] == [HitKind.EXACT] * scale.PATH
        early += f"{chunks} entries" not in service.log
        await asyncio.sleep(dice.uniform(0, 0.3))
        if end == "kill":
            service.kill9()
        else:
            assert service.stop() == 0
    assert early, "all of it was loaded before the first lookup"
    assert await check_stopped(tmp_path / "data", disk) == chunks


Whole = tuple[Path, dict[bytes, dict[bytes, bytes]]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """An index with records within pages and on pages of their own, and what LMDB reads from it."""
    folder = tmp_path_factory.mktemp("whole") / "index"
    with opened(folder) as index:
        churn(index, random.Random(5), 300, 0, longest=150)
    with lmdb.open(str(folder), max_dbs=2, readonly=True) as env, env.begin() as txn:
        return folder, {name: dict(txn.cursor(db=env.open_db(name, txn))) for name in (RECORDS, HEATS)}


def test_a_reader_finds_what_lmdb_finds(whole: Whole) -> None:
    folder, there = whole
    reader, dice = IndexReader(folder / "data.mdb"), random.Random(1)
    for name, values in there.items():
        assert len(values) > 20
        assert {key: reader.get(name, key) for key in values} == values
        assert all(reader.get(name, dice.randbytes(32)) is None for _ in range(200))
        assert all(reader.get(name, key) is None for key in (b"", b"\0" * 32, b"\xff" * 32, min(values)[:31]))
    assert reader.get(b"another", min(there[RECORDS])) is None


def test_a_reader_of_a_damaged_file_never_fails(whole: Whole, tmp_path: Path) -> None:
    """Bits, pages, and the end of the file: each value is found or not."""
    folder, there = whole
    data, dice, found = (folder / "data.mdb").read_bytes(), random.Random(7), set[bool]()
    for trial in range(150):
        damaged = bytearray(data)
        for _ in range((1, 30, 3000)[trial % 3]):
            damaged[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        for _ in range(trial % 4):
            at = PAGE * dice.randrange(len(data) // PAGE)
            damaged[at : at + PAGE] = dice.choice((bytes(PAGE), b"\xff" * PAGE, dice.randbytes(PAGE)))
        if trial % 5 == 0:
            del damaged[dice.randrange(len(data)) :]
        path = tmp_path / f"{trial}"
        path.write_bytes(damaged)
        reader = IndexReader(path)
        for name, values in there.items():
            found |= {reader.get(name, key) == value for key, value in values.items()}
    assert found == {False, True}


@pytest.mark.parametrize("content", [None, b"", b"x", bytes(PAGE), bytes(3 * PAGE)], ids=["none", *"0123"])
def test_a_reader_of_no_file_finds_nothing(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    assert IndexReader(tmp_path / "file").get(RECORDS, b"k" * 32) is None
