"""Checks that a cache service's store is consistent: `python -m fusionkv.bench.cache.integrity`, once it is stopped.

Every function raises AssertionError if something is wrong. No thread may be working on the store.
"""

import argparse
import asyncio
import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from fusionkv.kvcache_service.__main__ import make_store
from fusionkv.kvcache_service.config import Config
from fusionkv.kvcache_service.index import index as indexes
from fusionkv.kvcache_service.index import rows as columns
from fusionkv.kvcache_service.index.heat import _ROW, ColdQueue
from fusionkv.kvcache_service.index.index import Index
from fusionkv.kvcache_service.index.rows import PrefixTable, Rows, Table
from fusionkv.kvcache_service.store.entries import Leases, Residents, StoredEntry
from fusionkv.kvcache_service.store.store import Store
from fusionkv.kvcache_service.tiers.disk import DiskTier
from fusionkv.kvcache_service.tiers.extents import Extents, Place, aligned


def check_store(store: Store, idle: bool = False) -> None:
    """Index, entries, tiers and leases agree. idle: no call is in progress, so nothing is reserved or pinned."""
    check_residents(store.residents)
    entries = all_entries(store.residents)
    check_leases(store.leases, entries)
    assert not store.committing
    if idle:
        assert not store.residents._reserved, "a reservation leaked"
        assert all(entry.pins == 0 for entry in entries), "a pin leaked"


def check_residents(residents: Residents) -> None:
    """Index, entries and tiers agree, and each place has one owner."""
    check_index(residents.index)
    assert all(entry.visible and residents.home.name in entry.places for entry in residents)
    assert all(entry.held and not entry.visible for entry in residents._leaving), "a deleted entry was not freed"
    for row, entry in list(residents._seen.items()):
        assert entry.row == row
        assert entry.record == residents.index.rows.record(row)
        assert entry.heat == residents.index.rows.heats[row]
        offsets = {name: column[row] for name, column in residents._places.items() if column[row] >= 0}
        assert {name: place.offset for name, place in entry.places.items()} == offsets
    for tier in residents.tiers:
        held: dict[Place, bytes | None] = {
            Place(offset, size): None for (name, offset), size in residents._reserved.items() if name == tier.name
        }
        owners = [entry for entry in all_entries(residents) if tier.name in entry.places]
        for entry in owners:
            place = entry.places[tier.name]
            assert place not in held, "two entries at one place, or a reserved place is an entry's"
            assert place.size == entry.record.size
            held[place] = entry.record.key if entry.visible else None
        check_tier(tier, held)
        check_queue(residents._cold[tier.name])
        assert residents.count(tier) == sum(entry.visible for entry in owners)


def all_entries(residents: Residents) -> list[StoredEntry]:
    """Visible entries, and invisible ones that are still held."""
    return [*residents, *residents._leaving]


def check_leases(leases: Leases, entries: Iterable[StoredEntry]) -> None:
    """Entries' lease counts match the leases, and every lease will expire."""
    counts = Counter(id(entry) for held in leases._held.values() for entry in held)
    assert {lease for _, lease in leases._expiry} >= set(leases._held)
    assert counts == {id(entry): entry.leases for entry in entries if entry.leases}, "leases and counts disagree"


def check_tier(tier: Extents, held: Mapping[Place, bytes | None]) -> None:
    """The allocated places, and a disk tier's records, are those in `held`: key by place, None for a write."""
    taken = {place.offset: aligned(place.size) for place in held}
    free = list(zip(tier._holes.starts, tier._holes.ends, strict=True))
    at = 0
    for start, end in sorted([*free, *((s, s + n) for s, n in taken.items())]):
        assert at == start < end, f"a gap or an overlap at {at}"
        assert start // tier._boundary == (end - 1) // tier._boundary, f"{start}..{end} crosses a boundary"
        at = end
    assert at == tier.capacity_bytes
    merged = all(e != s or s % tier._boundary == 0 for (_, e), (s, _) in itertools.pairwise(free))
    assert merged, "two holes touch"
    assert tier.used_bytes == sum(taken.values())
    if isinstance(tier, DiskTier):
        recorded = {}
        for key, known, _ in tier._ledger.load():
            assert known is not None, f"record {key.hex()} is unreadable"
            recorded[Place(known[1], known[0].size)] = key
        assert recorded == {place: key for place, key in held.items() if key is not None}, "index and store disagree"


def check_queue(queue: ColdQueue) -> None:
    """Every row with a place has an item, which is not above its heat."""
    members = {row for row, place in enumerate(queue._places) if place >= 0}
    assert len(members) == len(queue)
    lowest: dict[int, int] = {}
    for item in queue._heap:
        lowest[item & _ROW] = min(item, lowest.get(item & _ROW, item))
    assert all(row in lowest and lowest[row] <= queue._item(row) for row in members)


def check_index(index: Index) -> None:
    """Every entry is found by its key and is in its group, and groups contain nothing else."""
    check_rows(index.rows)
    check_table(index._keys)
    check_table(index._single)
    records = {row: index.rows.record(row) for row in index.rows}
    assert len(records) == len(index._keys) == len(index.rows)
    assert all(index.row(record.key) == row for row, record in records.items())
    assert all(len(crowd) > 1 and crowd == sorted(crowd) for crowd in index._crowds.values())
    chunks = {row: record for row, record in records.items() if record.depth > 1}
    assert len(index._single) + sum(map(len, index._crowds.values())) == len(chunks)
    for row, record in chunks.items():
        group = indexes.group_key(record)
        crowd = index._crowds.get(group)
        if crowd is None:
            assert row in index._single.rows(group)
        else:
            assert (record.trail, row) in crowd


def check_rows(rows: Rows) -> None:
    """Free rows are unused, columns have one length, and reference counts are right."""
    assert len(set(rows._free)) == len(rows._free)
    assert all(rows._behind[row] == 0 for row in rows._free)
    assert all(len(column) == len(rows._behind) for column in rows.places)
    assert len(rows.heats) == len(rows._behind)
    assert len(rows._fixed) == columns._FIXED.size * len(rows._behind)
    assert len(rows._signatures) <= columns._SIGNATURE.size * len(rows._behind)
    assert len(rows._signatures) % columns._SIGNATURE.size == 0
    used = [behind for behind in rows._behind if behind]
    assert len(used) == len(rows)
    _check_prefixes(rows._behinds, used)


def _check_prefixes(table: PrefixTable, used: Sequence[int]) -> None:
    numbers, counts = np.unique(np.asarray(used, np.int64), return_counts=True)
    known = {number: table._uses[number] for number in table._numbers.values()}
    assert known == dict(zip(numbers.tolist(), counts.tolist(), strict=True))
    assert len(known) + len(table._free) == len(table._values) - 1


def check_table(table: Table) -> None:
    """Every row is reachable from its home slot, and counts are right."""
    for slots, count in zip(table._shards, table._counts, strict=True):
        mask = len(slots) - 1
        taken = [at for at, slot in enumerate(slots) if slot]
        assert len(taken) == count
        assert 4 * count <= 3 * len(slots)
        for at in taken:
            home = (slots[at] >> columns._ROW_BITS) & mask
            assert all(slots[(home + i) & mask] for i in range((at - home) & mask)), "a probe ends too early"


async def check(data_dir: Path, disk_bytes: int) -> int:
    """Opens a disk tier as a start does, checks it, and returns the number of entries.

    Raises OSError if the directory cannot be used, or a service is using it.
    """
    store = make_store(Config(data_dir=data_dir, disk_bytes=disk_bytes, memory_bytes=1 << 20))
    await store.open()
    try:
        check_store(store, idle=True)
        return len(store.residents)
    finally:
        await store.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fusionkv.bench.cache.integrity", description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument(
        "--disk-bytes", type=int, required=True, help="size of the disk tier, as configured in the service"
    )
    options = parser.parse_args(argv)
    print(asyncio.run(check(options.data_dir, options.disk_bytes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
