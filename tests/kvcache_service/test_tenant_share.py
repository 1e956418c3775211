"""A tenant's share of the tiers: its own coldest entries give way to its new ones, and nobody else's do."""

import asyncio
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.blobs import Blobs
from fusionkv.kvcache_service.store import shares
from fusionkv.protos.runtime.errors import ResourceExhausted
from tests.kvcache_service.tools import MIB, payload, serving
from tests.waiting import until

SIZE = MIB // 16
BUSY, QUIET = (keys.namespace(b"model", {}, name) for name in ("busy", "quiet"))
TIERS = {"memory": {"memory": 2 * MIB, "disk": 0}, "disk": {"memory": MIB, "disk": 2 * MIB}}


@pytest.fixture(params=TIERS)
async def service(request: pytest.FixtureRequest, start: Any) -> Any:
    """A service whose home tier, of this name, has room for 32 entries, 16 of them of one tenant."""
    return await start(tenant_share=0.5, high_watermark=1.0, **TIERS[request.param])


async def put(service: Any, name: str, namespace: bytes = BUSY, size: int = SIZE, **more: Any) -> bytes:
    service.clock.now += 1
    key, _ = await service.put(["S", name], payload(name, size), namespace=namespace, **more)
    return bytes(key)


def there(service: Any, given: list[bytes]) -> list[int]:
    """Which of these entries are stored, by number."""
    return [n for n, key in enumerate(given) if service.store.entries.get(key) is not None]


def taken(service: Any, namespace: bytes) -> list[int]:
    """Bytes of a tenant's entries in each tier."""
    store = service.store
    entries = [e for e in store.entries if keys.tenant_of(e.record.namespace) == keys.tenant_of(namespace)]
    return [sum(e.places[tier.name].size for e in entries if tier.name in e.places) for tier in store.residents.tiers]


async def test_a_busy_tenant_evicts_its_own_entries(service: Any) -> None:
    quiet = [await put(service, f"quiet {n}", QUIET) for n in range(12)]
    busy = [await put(service, f"busy {n}") for n in range(50)]
    assert there(service, quiet) == [*range(12)]
    assert there(service, busy) == [*range(34, 50)]
    assert taken(service, BUSY) == [tier.capacity_bytes // 2 for tier in service.store.residents.tiers]
    assert service.count("evictions", service.store.residents.home.name) == 34


async def test_all_models_and_engines_of_a_tenant_share_its_part(service: Any) -> None:
    busy = [await put(service, f"busy {n}") for n in range(10)]
    blobs = Blobs(service.client, layout="pages", tenant="busy")
    names = [b"%d" % n for n in range(8)]
    await blobs.store(names, [memoryview(payload(name, SIZE)) for name in names])
    assert there(service, busy) == [*range(2, 10)]
    other = [await put(service, f"other {n}", keys.namespace(b"another model", {}, "busy")) for n in range(4)]
    assert (there(service, busy), there(service, other)) == ([*range(6, 10)], [*range(4)])


async def test_deleted_replaced_and_aborted_entries_give_their_bytes_back(service: Any) -> None:
    """A count that was wrong would evict, or fail the check of the service at the end."""
    rng, busy = random.Random(0), list[bytes]()
    for n in range(60):
        size = rng.choice([1, SIZE // 3, SIZE])
        deep = ["S", f"before {n}", f"chunk {n}"]
        service.clock.now += 1
        await service.put(deep, payload(n, size), namespace=BUSY, offered=True)
        key, stored = await service.put(["S", deep[2]], payload(n, size), namespace=BUSY, offered=True)
        assert stored, "it replaces the one that has a chunk before it"
        busy.append(key)
        with pytest.raises(ResourceExhausted):
            await put(service, "large", size=MIB + 1)
        if n % 2:
            assert await service.client.delete([key]) == 1
    assert taken(service, BUSY)[-1] <= MIB
    await service.client.delete(namespace=BUSY)
    assert taken(service, BUSY) == [0] * len(service.store.residents.tiers)
    busy = [await put(service, f"busy {n}") for n in range(16)]
    assert there(service, busy) == [*range(16)]


async def test_a_put_is_refused_while_the_tenants_entries_are_leased(service: Any) -> None:
    busy = [await put(service, f"busy {n}") for n in range(16)]
    await service.settled()
    leases = [service.store.leases.grant([service.store.entries.get(key)], 30.0) for key in busy]
    with pytest.raises(ResourceExhausted, match=r"in the tenant's share .* are leased .* raise tenant_share in"):
        await put(service, "one more")
    await put(service, "quiet", QUIET)
    # Those that are deleted keep their bytes as long as they are leased.
    assert await service.client.delete(busy[:2]) == 2
    with pytest.raises(ResourceExhausted, match="tenant's share"):
        await put(service, "one more")
    service.store.leases.release(leases[0])
    service.store.leases.release(leases[5])
    more = [await put(service, f"more {n}") for n in range(2)]
    assert (there(service, busy), there(service, more)) == ([2, 3, 4, *range(6, 16)], [0, 1])
    for lease in leases:
        service.store.leases.release(lease)


async def test_an_entry_larger_than_the_share_is_refused(service: Any) -> None:
    busy = [await put(service, f"busy {n}") for n in range(4)]
    with pytest.raises(ResourceExhausted, match=r"larger than the tenant's share of the \w+ tier of 1048576: raise"):
        await put(service, "large", size=MIB + 1)
    assert there(service, busy) == [*range(4)]
    large = await put(service, "large", size=MIB)
    assert there(service, [*busy, large]) == [4]


async def test_a_lower_share_after_a_restart(tmp_path: Path, monkeypatch: Any) -> None:
    """What is stored is counted again; the tenant's next puts evict what is too much, so many entries each."""
    monkeypatch.setattr(shares, "_MAX_VICTIMS", 16)
    tiers = {"memory": MIB, "disk": 64 * 4096}
    async with serving(tmp_path, high_watermark=1.0, **tiers) as service:
        quiet = await put(service, "quiet", QUIET, size=1)
        for n in range(50):
            await put(service, f"busy {n}", size=n + 1)
    for share, kept in ((0.9, [51, 52]), (0.4, [52 - 15, 25])):
        async with serving(tmp_path, high_watermark=1.0, tenant_share=share, **tiers) as service:
            for n, entries in enumerate(kept):
                await put(service, f"{share} {n}", size=1)
                service.store.check_integrity(idle=True)
                assert len(service.store.entries) == entries + 1
            assert service.store.entries.get(quiet) is not None


async def test_what_is_put_again_while_its_eviction_is_recorded_survives_a_restart(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """It gets the place that it had, so the record of both has the same key and the same offset."""
    tiers: Any = {"tenant_share": 0.5, "high_watermark": 1.0, **TIERS["disk"]}
    async with serving(tmp_path, **tiers) as service:
        busy = [await put(service, f"busy {n}") for n in range(16)]
        disk, go = service.store.residents.home, threading.Event()
        forget, offset = disk.forget, service.store.entries.get(busy[0]).places[disk.name].offset
        monkeypatch.setattr(
            disk, "forget", lambda entries: (busy[0] not in dict(entries) or go.wait(20), forget(entries))
        )
        one_more = asyncio.create_task(put(service, "one more"))
        await until(lambda: there(service, busy[:1]) == [])
        again = asyncio.create_task(put(service, "busy 0"))
        await until(lambda: offset in service.store.residents.contents[disk.name].reserved or again.done())
        await asyncio.wait([again], timeout=0.3)
        go.set()
        assert await again == busy[0]
        await one_more
        assert service.store.entries.get(busy[0]).places[disk.name].offset == offset
        await service.settled()
    async with serving(tmp_path, **tiers) as service:
        assert there(service, busy) == [0, *range(2, 16)]
