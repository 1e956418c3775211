"""The index: from a prompt's path to the entries that serve it, exact, alternative or none."""

import enum
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from fusionkv.kvcache_service.keys import DIGEST_BYTES, path_keys, replica_key
from fusionkv.kvcache_service.record import Record


class HitKind(enum.Enum):
    """How a chunk was found: by its exact prefix path, encoded behind other chunks or as a variant, or not."""

    EXACT = "exact"
    ALTERNATIVE = "alternative"
    MISS = "miss"


class Index:
    """All visible entries. In memory, one thread; the disk tier's index refills it at start.

    The alternative path of the paper drops the earlier chunks of a path one at a time until an entry is found: n
    hashes for the n-th chunk, and only entries stored behind a suffix of the present path are found. Here all plain
    entries of one chunk behind one system prompt form a group, found by one hash and sorted by their paths read
    backwards. Of a sorted group the member with the longest common beginning is a neighbour of the place where the
    present path would stand, so two comparisons find the entry that shares the longest suffix, at any depth.
    """

    def __init__(self) -> None:
        self._records: dict[bytes, Record] = {}
        # (trail, key) of plain entries by replica key, sorted.
        self._plain: dict[bytes, list[tuple[bytes, bytes]]] = {}
        # Keys by (replica key, variant), in the order they were added.
        self._variants: dict[tuple[bytes, bytes], dict[bytes, None]] = {}
        self._namespaces: dict[bytes, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def get(self, key: bytes) -> Record | None:
        return self._records.get(key)

    def namespace_keys(self, namespace: bytes) -> list[bytes]:
        return list(self._namespaces.get(namespace, ()))

    def add(self, record: Record) -> None:
        """Makes an entry visible; its key must not be there yet."""
        if record.key in self._records:
            raise KeyError(record.key.hex())
        self._records[record.key] = record
        self._namespaces.setdefault(record.namespace, set()).add(record.key)
        if record.depth == 1:
            return
        replicas = replica_key(record.namespace, record.system, record.chunk)
        if record.variant:
            self._variants.setdefault((replicas, record.variant), {})[record.key] = None
        else:
            insort(self._plain.setdefault(replicas, []), (record.trail, record.key))

    def remove(self, key: bytes) -> None:
        """Makes an entry invisible; it must be there."""
        record = self._records.pop(key)
        _discard(self._namespaces, record.namespace, key)
        if record.depth == 1:
            return
        replicas = replica_key(record.namespace, record.system, record.chunk)
        if record.variant:
            group = self._variants[replicas, record.variant]
            del group[key]
            if not group:
                del self._variants[replicas, record.variant]
        else:
            trails = self._plain[replicas]
            del trails[bisect_left(trails, (record.trail, key))]
            if not trails:
                del self._plain[replicas]

    def find(
        self, namespace: bytes, path: Sequence[bytes], variants: Sequence[Sequence[bytes]]
    ) -> list[tuple[HitKind, Record | None]]:
        """What there is for each element of `path`; `variants[i]` are those preferred for element i, best first.

        An exact entry comes first, then the variants, then the plain entry with the longest common suffix. The
        system prompt, element 0, is found exactly or not at all.
        """
        found: list[tuple[HitKind, Record | None]] = []
        for i, key in enumerate(path_keys(namespace, path)):
            record = self._records.get(key)
            if record is not None:
                found.append((HitKind.EXACT, record))
                continue
            other = self._alternative(namespace, path[: i + 1], variants[i]) if i else None
            found.append((HitKind.MISS, None) if other is None else (HitKind.ALTERNATIVE, other))
        return found

    def _alternative(self, namespace: bytes, path: Sequence[bytes], variants: Sequence[bytes]) -> Record | None:
        replicas = replica_key(namespace, path[0], path[-1])
        for variant in variants:
            group = self._variants.get((replicas, variant))
            if group:
                return self._records[next(reversed(group))]
        trails = self._plain.get(replicas)
        if not trails:
            return None
        trail = b"".join(reversed(path))
        at = bisect_left(trails, (trail, b""))
        nearest = max(trails[max(at - 1, 0) : at + 1], key=lambda member: _common(member[0], trail))
        return self._records[nearest[1]]

    def check_integrity(self) -> None:
        """Every record is in exactly the groups that it belongs to, and no group holds anything else."""
        plain = {member for group in self._plain.values() for member in group}
        variants = {key for group in self._variants.values() for key in group}
        chunks = [r for r in self._records.values() if r.depth > 1]
        assert plain == {(r.trail, r.key) for r in chunks if not r.variant}
        assert variants == {r.key for r in chunks if r.variant}
        assert all(group and group == sorted(group) for group in self._plain.values())
        assert all(self._variants.values())
        assert sum(map(len, self._plain.values())) == len(plain)
        named = {(namespace, key) for namespace, keys in self._namespaces.items() for key in keys}
        assert named == {(r.namespace, r.key) for r in self._records.values()}
        assert all(key == record.key for key, record in self._records.items())


def _common(a: bytes, b: bytes) -> int:
    """Number of digests that two trails begin with in common."""
    limit = min(len(a), len(b))
    at = 0
    while at < limit and a[at : at + DIGEST_BYTES] == b[at : at + DIGEST_BYTES]:
        at += DIGEST_BYTES
    return at // DIGEST_BYTES


def _discard(groups: dict[bytes, set[bytes]], name: bytes, key: bytes) -> None:
    groups[name].discard(key)
    if not groups[name]:
        del groups[name]
