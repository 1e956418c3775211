"""Ranks entries of the remote tier in the order of preference of `Index.find`."""

from collections.abc import Iterable, Sequence

from fusionkv.kvcache_service.hits import HitKind
from fusionkv.kvcache_service.index.index import common, similarity
from fusionkv.kvcache_service.index.record import Record
from fusionkv.kvcache_service.keys import DIGEST_BYTES, VERSIONS, entry_key, path_keys

Rank = tuple[float, ...]


class HitRanker:
    """Ranks entries for the last element of a path."""

    def __init__(self, namespace: bytes, path: Sequence[bytes], variants: Sequence[bytes]) -> None:
        self._namespace = namespace
        self._exact = path_keys(namespace, path)[-1]
        self._near = b"".join(reversed(path))
        self._ends = (path[-1], path[0])
        self._first = len(path) == 1
        self._variants = {variant: -i for i, variant in reversed(list(enumerate(variants)))}

    def rank(self, record: Record) -> Rank:
        """Rank of an entry, higher is better: exact, then by variant, then by common suffix; () if not usable."""
        if record.key == self._exact:
            return (2,)
        if self._first or record.depth == 1:
            return ()
        if record.variant and record.variant not in self._variants:
            return ()
        if record.variant in VERSIONS:
            similar, shared = similarity(record.trail, self._near)
            return (True, self._variants[record.variant], similar, shared) if similar else ()
        shared = common(record.trail, self._near)
        # If only the chunk is shared, an entry encoded without other chunks before it is preferred.
        alone = shared == 1 and record.depth == 2
        return (bool(record.variant), self._variants.get(record.variant, 0), shared, alone)

    def kind(self, record: Record) -> HitKind:
        return HitKind.EXACT if record.key == self._exact else HitKind.ALTERNATIVE

    def best(self, own: Record | None, others: Iterable[Record]) -> Record | None:
        """The highest-ranked of `others`, if it ranks above `own`."""
        floor = self.rank(own) if own is not None else ()
        for record in sorted(others, key=self.rank, reverse=True):
            if self.rank(record) <= floor:
                return None
            if self._genuine(record):
                return record
        return None

    def _genuine(self, record: Record) -> bool:
        """Whether a record matches its key, so that other services' records never lead to another tenant's KV."""
        trail, end = record.trail, len(record.trail)
        path = [trail[at - DIGEST_BYTES : at] for at in range(end, 0, -DIGEST_BYTES)]
        names = (record.chunk, record.system) == self._ends and record.namespace == self._namespace
        return names and entry_key(record.namespace, path, record.variant) == record.key
