"""What the shared index costs a cache service in processor time: `python -P bench/services/shared_index.py redis://host:port`.

It writes and deletes entries of a namespace of its own. The figures of docs/replicas.md.
"""

import asyncio
import os
import secrets
import sys
import time

from fusionkv.kvcache_service.cluster.elsewhere import Choice
from fusionkv.kvcache_service.cluster.shared_index import MARK_BYTES, Change, SharedIndex, group_of
from fusionkv.kvcache_service.index import record

ENTRIES, BATCH, CHUNKS, ROUNDS = 6400, 64, 20, 300


async def run(url: str) -> None:
    shared = SharedIndex(url, cluster=False, password=None, timeout=10, expiry=600)
    mark, namespace, system = secrets.token_bytes(MARK_BYTES), os.urandom(32), os.urandom(32)
    await shared.beat(mark, "bench:1", "serving", {})
    entries = [
        record.make(namespace, [system, os.urandom(32)], b"", 1 << 20, 512, 8, os.urandom(16)) for _ in range(ENTRIES)
    ]
    for what, kept in (("publishing", True), ("withdrawing", False)):
        changes = [Change(entry.key, group_of(entry), entry if kept else None) for entry in entries]
        if not kept:
            await _look(shared, namespace, system, entries)
        started = time.process_time()
        for at in range(0, ENTRIES, BATCH):
            await shared.apply(mark, changes[at : at + BATCH])
        print(f"{what} an entry: {1e3 * (time.process_time() - started) / ENTRIES:.3f} ms")
    await shared.beat(mark, "bench:1", "left", {})
    await shared.close()


async def _look(shared: SharedIndex, namespace: bytes, system: bytes, entries: list[record.Record]) -> None:
    groups = [group_of(entry) for entry in entries[:CHUNKS]]
    await shared.entries(groups)
    started = time.process_time()
    for _ in range(ROUNDS):
        found = await shared.entries(groups)
    asked = time.process_time()
    for _ in range(ROUNDS):
        for entry, group, there in zip(entries, groups, found, strict=False):
            best = Choice(namespace, [system, entry.chunk], []).best(None, group, there)
            assert best is not None
            assert best.record == entry
    chosen = time.process_time()
    print(f"asking for {CHUNKS} chunks: {1e3 * (asked - started) / ROUNDS:.2f} ms")
    print(f"choosing for {CHUNKS} chunks: {1e3 * (chosen - asked) / ROUNDS:.2f} ms")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    asyncio.run(run(sys.argv[1]))
