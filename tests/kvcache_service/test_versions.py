"""Versions of a chunk: which one a path finds, against trying all, and how many are kept, at a real service."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.index import record
from fusionkv.kvcache_service.index.index import HitRanker, Index
from fusionkv.kvcache_service.index.record import HitKind
from fusionkv.protos.runtime.errors import NotFound
from tests.examples import examples
from tests.kvcache_service import tools
from tests.kvcache_service.tools import path

NAMESPACE = b"n" * 32
THREE = keys.versions_variant(3)


def entry(names: str, variant: bytes = THREE) -> record.Record:
    return record.make(NAMESPACE, path(names), variant, 100, 5, 0, b"c" * 16)


def alike(one: str, other: str) -> tuple[float, int]:
    """Of the chunks between first and last that one of them has, the share that both have; then the common suffix."""
    a, b, end = set(one[1:-1]), set(other[1:-1]), 0
    while end < min(len(one), len(other)) and one[-1 - end] == other[-1 - end]:
        end += 1
    return len(a & b) / len(a | b) if a | b else 0.0, end


paths = st.lists(st.sampled_from("ABCDE"), max_size=5).map(lambda before: "S" + "".join(before) + "X")


@settings(max_examples=examples(200), deadline=None)
@given(st.sets(paths, max_size=8), paths, st.booleans())
def test_the_version_that_is_most_alike_is_found(stored: set[str], asked: str, plain: bool) -> None:
    entries = {names: entry(names) for names in stored}
    index = Index()
    for one in entries.values():
        index.add(one)
    fallback = entry("SZZX", b"")
    if plain:
        index.add(fallback)
    index.check_integrity()
    best = max((alike(names, asked) for names in stored), default=(0.0, 0))
    good = [entries[names].key for names in stored if alike(names, asked) == best and best[0] > 0]
    expected = good or ([fallback.key] if plain else [])
    kind, row, _ = index.find(NAMESPACE, path(asked), [(), *[(THREE,)] * (len(asked) - 1)])[-1]
    assert kind is (HitKind.ALTERNATIVE if expected else HitKind.MISS)
    assert (index.rows.key(row) in expected) if row is not None else not expected
    # Without its name none is found; and what the remote tier holds is judged in the same way.
    plainly = index.find(NAMESPACE, path(asked), [()] * len(asked))[-1][1]
    assert plainly == (index.row(fallback.key) if plain else None)
    ranker = HitRanker(NAMESPACE, path(asked), [THREE])
    found = ranker.best(None, entries.values())
    assert (found.key in good) if found is not None else not good
    if found is not None:
        assert ranker.kind(found) is HitKind.ALTERNATIVE
        assert ranker.best(found, entries.values()) is None
        assert ranker.best(fallback, entries.values()) is not None


def test_an_exact_entry_comes_before_every_version() -> None:
    index, exact = Index(), entry("SABX", b"")
    for one in (exact, entry("SABX"), entry("SAX")):
        index.add(one)
    kind, row, _ = index.find(NAMESPACE, path("SABX"), [(), (), (), (THREE,)])[-1]
    assert kind is HitKind.EXACT
    assert row == index.row(exact.key)


async def test_no_more_are_kept_than_their_variant_allows(tmp_path: Path) -> None:
    """Put at the same time, of several chunks and bounds; over a restart; and while one is leased."""
    bounds = {keys.versions_variant(most): most for most in (1, 3)}

    def kept(service: Any) -> Counter[tuple[bytes, bytes]]:
        return Counter((e.record.chunk, e.record.variant) for e in service.store.residents)

    async with tools.serving(tmp_path) as service:
        client = service.client

        async def put(names: str, variant: bytes) -> bool:
            digests, data = path(names), memoryview(names.encode() * 1000)
            more: Any = {"namespace": NAMESPACE, "tokens": 1, "base": 0, "timeout": 30, "offered": bool(variant)}
            return bool((await client.put(path=digests, variant=variant, data=data, **more))[1])

        puts = [put(f"S{before}{chunk}", v) for before in "ABCDEFGH" for chunk in "XY" for v in (b"", *bounds)]
        assert all(await asyncio.gather(*puts))
        expected = {(chunk * 32, v): most for chunk in (b"X", b"Y") for v, most in (bounds | {b"": 8}).items()}
        assert kept(service) == expected

        (only,) = (v for v, most in bounds.items() if most == 1)
        assert await put("SHIX", only)
        lookup = [(path("S")[0], []), (path("H")[0], []), (path("Z")[0], []), (path("X")[0], [only])]
        found = await client.lookup(NAMESPACE, lookup, timeout=10)
        leased = found.hits[3].entry
        assert leased is not None
        assert leased.variant == only
        assert await put("SNX", only)
        assert kept(service) == expected
        buffer = bytearray(leased.size)
        await client.fetch(leased, memoryview(buffer), timeout=30)
        assert buffer == b"SHIX" * 1000, "whoever has a lease fetches what was replaced"
        await client.release(found.lease)
        with pytest.raises(NotFound):
            await client.fetch(leased, memoryview(buffer), timeout=30)
    async with tools.serving(tmp_path) as service:
        assert kept(service) == expected
        client = service.client
        assert await put("SPX", THREE)
        assert kept(service) == expected


async def test_the_coldest_version_goes(start: Any) -> None:
    service = await start()

    def kept() -> set[str]:
        trails = (e.record.trail for e in service.store.residents)
        return {"".join(chr(byte) for byte in trail[::-32]) for trail in trails}

    async def put(names: str) -> None:
        service.clock.now += 1
        assert (await service.put(path(names), names.encode(), variant=THREE))[1]

    for names in ("SAX", "SBX", "SCX"):
        await put(names)
    service.clock.now += 1
    found = (await service.find(path("S")[0], path("A")[0], (path("X")[0], [THREE]))).hits[2]
    assert found.kind is HitKind.ALTERNATIVE
    await put("SDX")
    assert kept() == {"SAX", "SCX", "SDX"}, "A's was asked for, B's was the oldest of the others"
    await put("SEX")
    assert kept() == {"SAX", "SDX", "SEX"}


@pytest.mark.parametrize("most", [0, keys.MOST_VERSIONS + 1])
def test_a_bound_out_of_range_is_none(most: int) -> None:
    assert keys.versions_variant(most) not in keys.VERSIONS
