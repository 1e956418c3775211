"""The index finds exact paths, variants, versions that are most alike, then the longest common suffix."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.index.index import HitRanker, Index
from fusionkv.kvcache_service.index.record import EntryRecord, HitKind
from fusionkv.protos.contract import limits
from fusionkv.protos.runtime.errors import NotFound
from tests.examples import examples
from tests.kvcache_service import tools
from tests.kvcache_service.tools import NAMESPACE, common, index_of, path, record


def entry(names: str, variant: str = "") -> EntryRecord:
    return record(names, variant=variant.encode() * 32)


def find(index: Index, names: str, variants: dict[int, str] | None = None) -> list[tuple[str, Any]]:
    wanted = [[v.encode() * 32 for v in (variants or {}).get(i, "")] for i in range(len(names))]
    found = index.lookup(NAMESPACE, path(names), wanted)
    assert [key for _, _, key in found] == keys.path_keys(NAMESPACE, path(names))
    return [(kind.value, None if row is None else index.rows.record(row)) for kind, row, _ in found]


# Entries by path, with `:` and their variant; the path asked for, with the variants of its last element; and for each
# element the entry that is found: exactly (=), as an alternative (~), or none (-).
CASES = [
    ("S SA SXB", "SABC", "", "=S =SA ~SXB -"),
    # The system prompt is found exactly or not, and is never dropped.
    ("TA ST", "T", "", "-"),
    ("TA ST", "SA", "", "- -"),
    # Of entries that share the chunk alone, the one encoded alone wins.
    *(("SAC SC SZC", f"S{other}C", "", "- - ~SC") for other in "0BMz"),
    ("SAC SC SZC", "SYZC", "", "- - - ~SZC"),
    # Variants in the order asked, after exact, before plain; never one that was not asked for.
    ("SXA SYA:v SZA:w", "SA", "wv", "- ~SZA:w"),
    ("SXA SYA:v SZA:w", "SA", "qv", "- ~SYA:v"),
    ("SXA SYA:v SZA:w", "SA", "q", "- ~SXA"),
    ("SXA SYA:v SZA:w SA", "SA", "wv", "- =SA"),
    ("SA:v", "SA", "", "- -"),
    ("SA:v", "SA", "w", "- -"),
]


@pytest.mark.parametrize(("stored", "asked", "variants", "expected"), CASES)
def test_what_is_found(stored: str, asked: str, variants: str, expected: str) -> None:
    entries = {name: entry(*name.split(":")) for name in stored.split()}
    kinds = {"=": "exact", "~": "alternative", "-": "miss"}
    found = find(index_of(*entries.values()), asked, {len(asked) - 1: variants})
    assert found == [(kinds[each[0]], entries.get(each[1:])) for each in expected.split()]


def test_an_entry_of_another_namespace_is_not_found() -> None:
    index = index_of(*(record(names, namespace=b"m" * 32) for names in ("SA", "S")))
    assert find(index, "SA") == [("miss", None), ("miss", None)]


def test_an_entry_is_added_once() -> None:
    with pytest.raises(KeyError):
        index_of(entry("SA"), entry("SA"))


paths = st.lists(st.sampled_from("ABC"), max_size=5).map(lambda tail: "S" + "".join(tail))


@settings(max_examples=examples(200), deadline=None)
@given(st.sets(paths, max_size=25), paths, st.randoms(use_true_random=False))
def test_suffix_search_agrees_with_trying_every_entry(stored: set[str], asked: str, random: Any) -> None:
    entries, variant = {names: entry(names) for names in stored}, entry("SA", "v")
    index = index_of(*entries.values(), variant)
    for key in (variant.key, *(entries.pop(names).key for names in random.sample(sorted(stored), len(stored) // 3))):
        index.remove(key)
    index.check_integrity()

    for i, (kind, row, _) in enumerate(index.lookup(NAMESPACE, path(asked), [(variant.variant,)] * len(asked))):
        found = None if row is None else index.rows.record(row)
        prefix = asked[: i + 1]
        replicas = [n for n in entries if len(n) > 1 and n[-1] == prefix[-1]] if i else []
        if prefix in entries:
            assert (kind, found) == (HitKind.EXACT, entries[prefix])
        elif replicas:
            best = max(common(n, prefix) for n in replicas)
            good = [n for n in replicas if common(n, prefix) == best]
            alone = ["S" + prefix[-1]] if best == 1 and "S" + prefix[-1] in good else good
            assert kind is HitKind.ALTERNATIVE
            assert found in [entries[n] for n in alone]
        else:
            assert (kind, found) == (HitKind.MISS, None)
    for left in entries.values():
        index.remove(left.key)
    index.check_integrity()
    assert (len(index.rows), index.namespace_keys(NAMESPACE)) == (0, [])


THREE = keys.versions_variant(3)


def version(names: str) -> EntryRecord:
    return record(names, variant=THREE)


def alike(one: str, other: str) -> tuple[float, int]:
    """Of the chunks between first and last that one of them has, the share that both have; then the common suffix."""
    a, b = set(one[1:-1]), set(other[1:-1])
    return len(a & b) / len(a | b) if a | b else 0.0, common(one, other)


paths_to_x = st.lists(st.sampled_from("ABCDE"), max_size=5).map(lambda before: "S" + "".join(before) + "X")


@settings(max_examples=examples(200), deadline=None)
@given(st.sets(paths_to_x, max_size=8), paths_to_x, st.booleans())
def test_the_version_that_is_most_alike_is_found(stored: set[str], asked: str, plain: bool) -> None:
    entries = {names: version(names) for names in stored}
    fallback = record("SZZX")
    index = index_of(*entries.values(), *([fallback] if plain else []))
    best = max((alike(names, asked) for names in stored), default=(0.0, 0))
    good = [entries[names].key for names in stored if alike(names, asked) == best and best[0] > 0]
    expected = good or ([fallback.key] if plain else [])
    kind, row, _ = index.lookup(NAMESPACE, path(asked), [(), *[(THREE,)] * (len(asked) - 1)])[-1]
    assert kind is (HitKind.ALTERNATIVE if expected else HitKind.MISS)
    assert (index.rows.key(row) in expected) if row is not None else not expected
    # Without its name none is found; and what the remote tier holds is judged in the same way.
    plainly = index.lookup(NAMESPACE, path(asked), [()] * len(asked))[-1][1]
    assert plainly == (index.row(fallback.key) if plain else None)
    ranker = HitRanker(NAMESPACE, path(asked), [THREE])
    found = ranker.best(None, entries.values())
    assert (found.key in good) if found is not None else not good
    if found is not None:
        assert ranker.kind(found) is HitKind.ALTERNATIVE
        assert ranker.best(found, entries.values()) is None
        assert ranker.best(fallback, entries.values()) is not None


async def test_no_more_are_kept_than_their_variant_allows(tmp_path: Path) -> None:
    """Put at the same time, of several chunks and bounds; over a restart; and while one is leased."""
    bounds = {keys.versions_variant(most): most for most in (1, 3)}
    only = keys.versions_variant(1)

    def kept() -> Counter[tuple[bytes, bytes]]:
        return Counter((e.record.chunk, e.record.variant) for e in service.store.entries)

    async def put(names: str, variant: bytes) -> bool:
        more = {"variant": variant, "offered": bool(variant)}
        return bool((await service.put(path(names), names.encode() * 1000, **more))[1])

    async with tools.serving(tmp_path) as service:
        puts = [put(f"S{before}{chunk}", v) for before in "ABCDEFGH" for chunk in "XY" for v in (b"", *bounds)]
        assert all(await asyncio.gather(*puts))
        expected = {(chunk * 32, v): most for chunk in (b"X", b"Y") for v, most in (bounds | {b"": 8}).items()}
        assert kept() == expected

        assert await put("SHIX", only)
        found = await service.find(*path("SHZ"), (*path("X"), [only]))
        leased = found.hits[3].entry
        assert leased.variant == only
        assert await put("SNX", only)
        assert kept() == expected
        assert await service.fetch(leased) == b"SHIX" * 1000, "whoever has a lease fetches what was replaced"
        await service.client.release(found.lease)
        with pytest.raises(NotFound):
            await service.fetch(leased)
    async with tools.serving(tmp_path) as service:
        assert kept() == expected
        assert await put("SPX", THREE)
        assert kept() == expected


async def test_the_coldest_version_goes(service: Any) -> None:

    async def kept(*puts: str) -> set[str]:
        for names in puts:
            service.clock.now += 1
            assert (await service.put(path(names), names.encode(), variant=THREE))[1]
        return tools.stored(service.store)

    await kept("SAX", "SBX", "SCX")
    service.clock.now += 1
    s, a, x = path("SAX")
    assert (await service.find(s, a, (x, [THREE]))).hits[2].kind is HitKind.ALTERNATIVE
    assert await kept("SDX") == {"SAX", "SCX", "SDX"}, "A's was asked for, B's was the oldest of the others"
    assert await kept("SEX") == {"SAX", "SDX", "SEX"}


@pytest.mark.parametrize("most", [0, limits.MOST_VERSIONS + 1])
def test_a_bound_out_of_range_is_none(most: int) -> None:
    assert keys.versions_variant(most) not in keys.VERSIONS
