"""Keys: different inputs never share one, and their form does not change unnoticed."""

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionkv.kvcache_service import keys

digests = st.binary(min_size=32, max_size=32)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=6)
# Small alphabets and empty values make near-collisions likely.
names = st.dictionaries(st.sampled_from(["", "a", "b", "ab"]), st.sampled_from(["", "a", "b", "ab"]), max_size=3)


namespaces = st.tuples(st.sampled_from([b"", b"m", b"mm"]), names, st.sampled_from(["", "m", "a", "ab"]))
few = st.sampled_from([bytes(32), b"\1" * 32, b"\2" * 32])
variants = st.sampled_from([b"", b"\1" * 32, b"\2" * 32])
paths = st.tuples(few, st.lists(few, min_size=1, max_size=4).map(tuple), variants)


@given(st.data())
@pytest.mark.parametrize(
    ("digest", "inputs"),
    [
        (keys.namespace, namespaces),
        (keys.chunk_digest, st.tuples(tokens)),
        (keys.entry_key, paths),
        (keys.neighbours_variant, st.tuples(st.lists(few, max_size=3))),  # whose order matters
    ],
)
def test_digests_are_equal_only_for_equal_inputs(digest: Any, inputs: Any, data: st.DataObject) -> None:
    one, other = data.draw(inputs), data.draw(inputs)
    assert (digest(*one) == digest(*other)) == (one == other)


@given(names, st.randoms())
def test_the_order_of_settings_does_not_matter(settings: dict[str, str], random: Any) -> None:
    items = list(settings.items())
    random.shuffle(items)
    assert keys.namespace(b"m", dict(items), "") == keys.namespace(b"m", settings, "")


@given(namespaces, namespaces)
def test_a_namespace_begins_with_its_tenant(one: Any, other: Any) -> None:
    tenants = [keys.tenant_of(keys.namespace(*parts)) for parts in (one, other)]
    assert (tenants[0] == tenants[1]) == (one[2] == other[2])


@given(digests, st.lists(digests, min_size=1, max_size=5))
def test_the_keys_of_a_path_are_those_of_its_prefixes(namespace: bytes, path: list[bytes]) -> None:
    assert keys.path_keys(namespace, path) == [keys.entry_key(namespace, path[: n + 1]) for n in range(len(path))]


@given(digests)
def test_a_digest_of_one_kind_is_never_one_of_another(digest: bytes) -> None:
    made = [
        keys.namespace(digest, {}, ""),
        keys.chunk_digest([int.from_bytes(digest[i : i + 4], "little") for i in range(0, 32, 4)]),
        keys.neighbours_variant([digest]),
        *keys.VERSIONS,
        keys.entry_key(digest, [digest]),
        keys.variant_key(digest, digest),
        keys.replica_key(digest, digest, digest),
    ]
    assert len(set(made)) == len(made)
    assert all(len(d) == keys.DIGEST_BYTES for d in made)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_is_none_is_refused(token: int) -> None:
    with pytest.raises(struct.error):
        keys.chunk_digest([token])


def test_golden_vectors() -> None:
    """A change here orphans every stored entry: it needs a release note, and a new tag in the digests."""
    namespace = keys.namespace(b"\1" * 32, {"dtype": "bfloat16", "layout": "paged-1", "rope": "default"}, "tenant")
    system, chunk = keys.chunk_digest([1, 2, 3]), keys.chunk_digest([4, 2**32 - 1])
    variant = keys.neighbours_variant([system, chunk])
    assert {
        "namespace": namespace.hex(),
        "empty chunk": keys.chunk_digest([]).hex(),
        "chunk": chunk.hex(),
        "exact": keys.entry_key(namespace, [system, chunk]).hex(),
        "variant": keys.entry_key(namespace, [system, chunk], variant).hex(),
        "replicas": keys.replica_key(namespace, system, chunk).hex(),
        "versions": keys.versions_variant(3).hex(),
    } == GOLDEN


GOLDEN = {
    "namespace": "1a51bace374f73fa95fba6d3e76c81ea882c11a791d488eadc213513b42a16b4",
    "empty chunk": "6396e45b7a6e073fe5e640e0048dfc83923017116d886f74ce5c67e3f6241610",
    "chunk": "1819c54651015f7fe94e0f2f406cf8e1bbb2118e10477770336de3b681c31954",
    "exact": "eefad014407acce71ed27a7bc9214ea400fcf399a87e06405655b93a628f8814",
    "variant": "3fdbc25a2b5ccbcd2fd57d93b7aa6ffaa0c5ed1784877f9c74b09b8f7cce2cab",
    "replicas": "5c8a4c65dff4b0de4b88697a5b4199ffc8f1dcf2ec74891741d59e79cfa5d6f2",
    "versions": "29113b319c30b84fcf34b09cdb130be4d080e74fe983b0fe1a68b70e21b31ffb",
}
