"""The index finds what the contract says: exact, then variants, then the longest common suffix."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.index import record
from fusionkv.kvcache_service.index.index import Index
from fusionkv.kvcache_service.index.record import HitKind
from tests.examples import examples
from tests.kvcache_service.tools import path

NAMESPACE = b"n" * 32


def entry(names: str, variant: str = "", namespace: bytes = NAMESPACE) -> record.Record:
    return record.make(namespace, path(names), variant.encode() * 32, 100, 5, 0, b"c" * 16)


def index_of(*entries: record.Record) -> Index:
    index = Index()
    for one in entries:
        index.add(one)
    index.check_integrity()
    return index


def find(index: Index, names: str, variants: dict[int, str] | None = None) -> list[tuple[str, Any]]:
    wanted = [[v.encode() * 32 for v in (variants or {}).get(i, "")] for i in range(len(names))]
    found = index.find(NAMESPACE, path(names), wanted)
    assert [key for _, _, key in found] == keys.path_keys(NAMESPACE, path(names))
    return [(kind.value, None if row is None else index.rows.record(row)) for kind, row, _ in found]


def test_exact_path_alternative_and_miss() -> None:
    s, sa, sxb = entry("S"), entry("SA"), entry("SXB")
    index = index_of(s, sa, sxb)
    assert find(index, "SABC") == [("exact", s), ("exact", sa), ("alternative", sxb), ("miss", None)]


def test_the_system_prompt_is_found_exactly_or_not_and_is_never_dropped() -> None:
    index = index_of(entry("TA"), entry("ST"))
    assert find(index, "T") == [("miss", None)]
    assert find(index, "SA") == [("miss", None), ("miss", None)]


def test_an_entry_of_another_namespace_is_not_found() -> None:
    index = index_of(entry("SA", namespace=b"m" * 32), entry("S", namespace=b"m" * 32))
    assert find(index, "SA") == [("miss", None), ("miss", None)]


def test_of_entries_that_share_the_chunk_alone_the_one_encoded_alone_wins() -> None:
    alone, before, after = entry("SC"), entry("SAC"), entry("SZC")
    index = index_of(before, alone, after)
    for other in "0BMz":
        assert find(index, f"S{other}C")[2] == ("alternative", alone)
    assert find(index, "SYZC")[3] == ("alternative", after)


def test_variants_in_the_order_asked_after_exact_before_plain() -> None:
    plain, v, w = entry("SXA"), entry("SYA", "v"), entry("SZA", "w")
    index = index_of(plain, v, w)
    assert find(index, "SA", {1: "wv"})[1] == ("alternative", w)
    assert find(index, "SA", {1: "qv"})[1] == ("alternative", v)
    assert find(index, "SA", {1: "q"})[1] == ("alternative", plain)
    exact = entry("SA")
    index.add(exact)
    assert find(index, "SA", {1: "wv"})[1] == ("exact", exact)


def test_a_variant_that_was_not_asked_for_is_never_given() -> None:
    index = index_of(entry("SA", "v"))
    assert find(index, "SA") == [("miss", None), ("miss", None)]
    assert find(index, "SA", {1: "w"})[1] == ("miss", None)


def test_removed_entries_are_not_found() -> None:
    one, two, v = entry("SXA"), entry("SYA"), entry("SA", "v")
    index = index_of(one, two, v)
    index.remove(one.key)
    index.remove(v.key)
    index.check_integrity()
    assert find(index, "SXA", {2: "v"})[2] == ("alternative", two)
    index.remove(two.key)
    index.check_integrity()
    assert not len(index.rows)
    assert index.namespace_keys(NAMESPACE) == []


paths = st.lists(st.sampled_from("ABC"), max_size=5).map(lambda tail: "S" + "".join(tail))


@settings(max_examples=examples(200), deadline=None)
@given(st.sets(paths, max_size=25), paths, st.randoms(use_true_random=False))
def test_suffix_search_agrees_with_trying_every_entry(stored: set[str], asked: str, random: Any) -> None:
    entries = {names: entry(names) for names in stored}
    index = index_of(*entries.values())
    for names in random.sample(sorted(stored), len(stored) // 3):
        index.remove(entries.pop(names).key)
    index.check_integrity()

    def common(a: str, b: str) -> int:
        n = 0
        while n < min(len(a), len(b)) and a[-1 - n] == b[-1 - n]:
            n += 1
        return n

    for i, (kind, row, _) in enumerate(index.find(NAMESPACE, path(asked), [()] * len(asked))):
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
