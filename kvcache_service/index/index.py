"""The in-memory index: finds entries for a prompt's path, exact or alternative; ranks those of the remote tier."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from fusionkv.kvcache_service.index.record import EntryRecord, HitKind
from fusionkv.kvcache_service.index.rows import DigestTable, Rows
from fusionkv.kvcache_service.keys import DIGEST_BYTES, VERSIONS, entry_key, path_keys, replica_key, variant_key


class Index:
    """All visible entries, by row number. Not thread-safe. Refilled from the disk tier's index at start.

    FusionRAG's alternative path drops the earlier chunks of a path one at a time until an entry is found: n hashes
    for the n-th chunk, and only entries stored behind a suffix of the path are found. Here all entries of one chunk
    behind one system prompt, with the same encoding (plain, or one variant), form a group with one hash, independent
    of the chunks between.

    Nearly all groups have one member, stored in a hash table. Larger groups are sorted by reversed path: the member
    that shares the longest suffix with a path is adjacent to that path's insertion point, so two comparisons find it.
    """

    def __init__(self, tiers: int = 0) -> None:
        self.rows = Rows(tiers)
        self._keys = DigestTable()
        self._singletons = DigestTable()  # rows of groups of one member, by the group's digest
        self._groups: dict[bytes, list[tuple[bytes, int]]] = {}  # members of larger groups, as sorted (trail, row)

    def row(self, key: bytes) -> int | None:
        return next((row for row in self._keys.rows(key) if self.rows.key(row) == key), None)

    def namespace_keys(self, namespace: bytes) -> list[bytes]:
        return [self.rows.key(row) for row in self.rows.prefixes.in_namespace(namespace)]

    def add(self, record: EntryRecord, heat: float = 0.0) -> int:
        """Adds an entry and returns its row. Raises KeyError if the key exists."""
        if self.row(record.key) is not None:
            raise KeyError(record.key.hex())
        row = self.rows.add(record, heat)
        self._keys.add(record.key, row)
        if record.depth > 1:
            digest = group_digest(record)
            if digest not in self._groups:
                other = self._singleton(digest, record.namespace, record.system, record.chunk, record.variant)
                if other is None:
                    self._singletons.add(digest, row)
                    return row
                self._singletons.remove(digest, other)
                self._groups[digest] = [(self.rows.record(other).trail, other)]
            insort(self._groups[digest], (record.trail, row))
        return row

    def remove(self, key: bytes) -> None:
        """Removes an entry. Raises KeyError if it does not exist."""
        row = self.row(key)
        if row is None:
            raise KeyError(key.hex())
        record = self.rows.record(row)
        self._keys.remove(key, row)
        if record.depth > 1:
            digest = group_digest(record)
            members = self._groups.get(digest)
            if members is None:
                self._singletons.remove(digest, row)
            else:
                del members[bisect_left(members, (record.trail, row))]
                if len(members) == 1:
                    del self._groups[digest]
                    self._singletons.add(digest, members[0][1])
        self.rows.remove(row)

    def lookup(
        self, namespace: bytes, path: Sequence[bytes], variants: Sequence[Sequence[bytes]]
    ) -> list[tuple[HitKind, int | None, bytes]]:
        """Finds the best entry for each element of a path.

        An exact entry is preferred, then the variants in order, then the plain entry with the longest common suffix.
        Of versions, the one with the most similar earlier chunks is chosen, if it shares any. The system prompt has
        no alternatives.

        variants: those wanted for each element, best first. Returns for each element the kind of hit, the row (None
        for a miss), and the key of an exact entry.
        """
        hits: list[tuple[HitKind, int | None, bytes]] = []
        for i, key in enumerate(path_keys(namespace, path)):
            row = self.row(key)
            if row is not None:
                hits.append((HitKind.EXACT, row, key))
                continue
            row = self._alternative(namespace, path[: i + 1], variants[i]) if i else None
            hits.append((HitKind.MISS if row is None else HitKind.ALTERNATIVE, row, key))
        return hits

    def replicas(self, record: EntryRecord) -> list[int]:
        """Rows of all entries in a record's group: same chunk, system prompt and encoding."""
        digest = group_digest(record)
        if digest in self._groups:
            return [row for _, row in self._groups[digest]]
        row = self._singleton(digest, record.namespace, record.system, record.chunk, record.variant)
        return [] if row is None else [row]

    def check_integrity(self) -> None:
        """Raises AssertionError unless every entry is found by its key and is in its group, which has no others."""
        self.rows.check_integrity()
        self._keys.check_integrity()
        self._singletons.check_integrity()
        records = {row: self.rows.record(row) for row in self.rows}
        assert len(records) == len(self._keys) == len(self.rows)
        assert all(self.row(record.key) == row for row, record in records.items())
        assert all(len(members) > 1 and members == sorted(members) for members in self._groups.values())
        chunks = {row: record for row, record in records.items() if record.depth > 1}
        assert len(self._singletons) + sum(map(len, self._groups.values())) == len(chunks)
        for row, record in chunks.items():
            digest = group_digest(record)
            members = self._groups.get(digest)
            if members is None:
                assert row in self._singletons.rows(digest)
            else:
                assert (record.trail, row) in members

    def _alternative(self, namespace: bytes, path: Sequence[bytes], variants: Sequence[bytes]) -> int | None:
        for variant in (*variants, b""):
            digest = _group_digest(namespace, path[0], path[-1], variant)
            if members := self._groups.get(digest):
                row: int | None = _with_longest_suffix(members, path)
            else:
                row = self._singleton(digest, namespace, path[0], path[-1], variant)
            if row is not None and variant in VERSIONS:
                row = _most_similar(members or [(self.rows.record(row).trail, row)], path)
            if row is not None:
                return row
        return None

    def _singleton(self, digest: bytes, namespace: bytes, system: bytes, chunk: bytes, variant: bytes) -> int | None:
        rows = self._singletons.rows(digest)
        return next((row for row in rows if self.rows.matches(row, namespace, system, chunk, variant)), None)


def group_digest(record: EntryRecord) -> bytes:
    return _group_digest(record.namespace, record.system, record.chunk, record.variant)


def _group_digest(namespace: bytes, system: bytes, chunk: bytes, variant: bytes) -> bytes:
    return variant_key(replica_key(namespace, system, chunk), variant)


def _with_longest_suffix(members: Sequence[tuple[bytes, int]], path: Sequence[bytes]) -> int:
    """Row of the member of a sorted group that shares the longest suffix with a path.

    If only the chunk is shared, an entry encoded without other chunks before it is preferred: it depends on none.
    """
    target = b"".join(reversed(path))
    at = bisect_left(members, (target, -1))
    trail, row = max(members[max(at - 1, 0) : at + 1], key=lambda member: common(member[0], target))
    if common(trail, target) == 1:
        alone = path[-1] + path[0]
        at = bisect_left(members, (alone, -1))
        if at < len(members) and members[at][0] == alone:
            row = members[at][1]
    return row


def _most_similar(versions: Sequence[tuple[bytes, int]], path: Sequence[bytes]) -> int | None:
    target = b"".join(reversed(path))
    (shared, _), row = max((similarity(trail, target), row) for trail, row in versions)
    return row if shared else None


def similarity(a: bytes, b: bytes) -> tuple[float, int]:
    """Similarity of the chunks between two trails' ends: their Jaccard index, then the length of `common`."""
    # All digests but the chunk's and the system prompt's.
    one, other = (
        {trail[at : at + DIGEST_BYTES] for at in range(DIGEST_BYTES, len(trail) - DIGEST_BYTES, DIGEST_BYTES)}
        for trail in (a, b)
    )
    return len(one & other) / max(1, len(one | other)), common(a, b)


def common(a: bytes, b: bytes) -> int:
    """Length of the common prefix of two trails, in digests."""
    limit = min(len(a), len(b))
    at = 0
    while at < limit and a[at : at + DIGEST_BYTES] == b[at : at + DIGEST_BYTES]:
        at += DIGEST_BYTES
    return at // DIGEST_BYTES


class HitRanker:
    """Ranks entries of the remote tier for the last element of a path, with the preferences of `Index.lookup`."""

    def __init__(self, namespace: bytes, path: Sequence[bytes], variants: Sequence[bytes]) -> None:
        self._namespace = namespace
        self._exact = path_keys(namespace, path)[-1]
        self._trail = b"".join(reversed(path))
        self._ends = (path[-1], path[0])
        self._is_system = len(path) == 1
        self._variants = {variant: -i for i, variant in reversed(list(enumerate(variants)))}

    def rank(self, record: EntryRecord) -> tuple[float, ...]:
        """Rank of an entry, higher is better: exact, then by variant, then by common suffix; () if not usable."""
        if record.key == self._exact:
            return (2,)
        if self._is_system or record.depth == 1 or (record.variant and record.variant not in self._variants):
            return ()
        if record.variant in VERSIONS:
            similar, shared = similarity(record.trail, self._trail)
            return (True, self._variants[record.variant], similar, shared) if similar else ()
        shared = common(record.trail, self._trail)
        # If only the chunk is shared, an entry encoded without other chunks before it is preferred.
        alone = shared == 1 and record.depth == 2
        return (bool(record.variant), self._variants.get(record.variant, 0), shared, alone)

    def kind(self, record: EntryRecord) -> HitKind:
        return HitKind.EXACT if record.key == self._exact else HitKind.ALTERNATIVE

    def best(self, local: EntryRecord | None, remote: Iterable[EntryRecord]) -> EntryRecord | None:
        """The highest-ranked of `remote`, if it ranks above `local`."""
        floor = self.rank(local) if local is not None else ()
        for record in sorted(remote, key=self.rank, reverse=True):
            if self.rank(record) <= floor:
                return None
            if self._matches_key(record):
                return record
        return None

    def _matches_key(self, record: EntryRecord) -> bool:
        """Whether a record matches its key, so that other services' records never lead to another tenant's KV."""
        trail, end = record.trail, len(record.trail)
        path = [trail[at - DIGEST_BYTES : at] for at in range(end, 0, -DIGEST_BYTES)]
        names = (record.chunk, record.system) == self._ends and record.namespace == self._namespace
        return names and entry_key(record.namespace, path, record.variant) == record.key
