"""Checks that a worker's KV pool is consistent."""

import itertools

from fusionkv.fusion_worker.compute.kv_pool import KVPool


def check_pool(pool: KVPool, idle: bool = False) -> None:
    """Checks that every slot has exactly one owner and, with `idle`, that nothing is pinned or reserved.

    Raises:
        AssertionError: a check failed.
    """
    chunks = (*pool._residents.values(), *pool._hidden)
    owned = sorted([*pool._free, *(run for r in chunks for run in r.runs)], key=lambda r: r.start)
    for a, b in itertools.pairwise(owned):
        assert a.start + a.length <= b.start, f"{a} and {b} overlap"
    assert sum(run.length for run in owned) + pool._fresh == pool.capacity, "slots were lost or given out twice"
    assert all(r.pins >= 0 for r in chunks), "a chunk was unpinned twice"
    if idle:
        assert pool._fresh == 0, f"{pool._fresh} fresh slots are still reserved"
        assert not any(r.pins for r in chunks), "a chunk is still pinned"
