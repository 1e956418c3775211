"""The remote tier: entries shared by any number of cache services, and the index of their paths, in a RemoteEngine.

An entry's bytes are stored in values of 1 MiB, or of 16 MiB in an object store. They are named by key, checksum and
number, so that different bytes of two services for the same entry are never mixed. The record is written after all
bytes, to two places: under the exact key, and, for lookups behind other paths, to one of SLOTS places per chunk,
selected by the key. Later entries overwrite earlier ones there, which bounds a chunk's index.

A chunk's index has a single hash tag, which keeps it in one slot of a Redis Cluster.

The names of an encrypted entry hold the id of its key, so that a service without the key does not find the entry: it
would delete what it can't read.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import islice

from fusionkv.kvcache_service.index import record as records
from fusionkv.kvcache_service.index.record import EntryRecord
from fusionkv.kvcache_service.keys import DIGEST_BYTES, entry_key, path_keys, replica_key
from fusionkv.kvcache_service.tiers.sealed_disk import HEAD_BYTES, DiskKeys

SLOTS = 4
# Size of a value: larger ones block other clients of a Redis, smaller ones need more calls.
BLOCK_BYTES = 1 << 20


class RemoteEngine(ABC):
    """A distributed store of values of slightly more than `block_bytes` by name, which expire or are evicted.

    Methods block and are thread-safe. They connect on first use, and reconnect after a loss. All of them raise

        Unreachable: The store does not respond in time.
        OSError: The store returns an error.
    """

    block_bytes: int = BLOCK_BYTES
    """Size of a value that holds an entry's bytes, a multiple of BLOCK_BYTES."""
    renew_seconds: float = 60.0
    """Maximum interval in which entries that are used are renewed."""
    lookup_values: int | None = None
    """Maximum number of values that one lookup asks for; None is no limit."""

    @abstractmethod
    def get(self, names: Sequence[str]) -> list[bytes | None]:
        """Values by name, None if missing, in one round trip."""

    def get_into(self, names: Sequence[str], into: Sequence[memoryview]) -> bool:
        """Fills buffers with the values of these names; returns whether all exist, with the buffers' sizes."""
        values = self.get(names)
        for value, view in zip(values, into, strict=True):
            if value is None or len(value) != len(view):
                return False
            view[:] = value
        return True

    @abstractmethod
    def put(self, values: Sequence[tuple[str, bytes]]) -> None:
        """Stores (name, value) pairs. Existing values are replaced, or kept if equal."""

    @abstractmethod
    def touch(self, names: Sequence[str]) -> list[bool]:
        """Renews the time to live of values; returns whether each exists."""

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Removes values; missing ones are ignored."""

    @abstractmethod
    def remove_all(self, prefix: str) -> None:
        """Removes all values whose names have a prefix. Takes time proportional to the size of the store."""

    def probe(self) -> None:
        """Returns if the store is reachable."""
        self.touch(["fusionkv:probe"])

    @abstractmethod
    def close(self) -> None:
        """Closes the connections."""


class RemoteTier:
    """Stores entries in a RemoteEngine. Methods block, are thread-safe, and raise its errors.

    The caller must verify the results: records with `HitRanker`, bytes with the record's checksum.
    """

    def __init__(self, engine: RemoteEngine, keys: DiskKeys | None = None) -> None:
        """keys: encrypt blocks with AES-256-GCM; the first key encrypts, all decrypt. None: no encryption."""
        self.engine = engine
        self._keys = keys

    def lookup(
        self, namespace: bytes, path: Sequence[bytes], variants: Sequence[Sequence[bytes]], elements: Sequence[int]
    ) -> list[list[EntryRecord]]:
        """Candidate records for `elements` of a path, by number, in one round trip; see `Index.lookup`."""
        exact = path_keys(namespace, path)
        requested: list[list[str]] = []
        for i in elements:
            tags = [_tag(prefix, namespace, path[0], path[i]) for prefix in self._prefixes(namespace)]
            kinds = (b"", *variants[i]) if i else ()
            slots = [_slot(tag, kind, n) for tag in tags for kind in kinds for n in range(SLOTS)]
            requested.append([*(f"{tag}{exact[i].hex()}" for tag in tags), *slots])
        values = iter(self._found([name for names in requested for name in names]))
        return [_decoded(islice(values, len(names))) for names in requested]

    def find(self, namespace: bytes, digests: Sequence[bytes]) -> list[list[EntryRecord]]:
        """Candidate records, in one round trip, of entries with a path of one digest each."""
        prefixes = self._prefixes(namespace)
        keys = [(digest, entry_key(namespace, [digest]).hex()) for digest in digests]
        names = [f"{_tag(prefix, namespace, digest, digest)}{key}" for digest, key in keys for prefix in prefixes]
        values = iter(self._found(names))
        return [_decoded(islice(values, len(prefixes))) for _ in digests]

    def read(self, record: EntryRecord, first: int, into: memoryview) -> None:
        """Fills a buffer with consecutive blocks of an entry, starting at block `first`.

        Raises FileNotFoundError if a block has expired, has another size, or cannot be decrypted.
        """
        size = self.engine.block_bytes
        views = [into[at : at + size] for at in range(0, len(into), size)]
        each = [self._blocks(record, prefix) for prefix in self._prefixes(record.namespace)]
        if not any(self._fill(names[first : first + len(views)], views) for names in each):
            raise FileNotFoundError(f"of {each[0][first]} and {len(views) - 1} more, one has expired or is damaged")

    def write(self, record: EntryRecord, first: int, blocks: Sequence[bytes]) -> None:
        """Writes consecutive blocks of an entry, all of the engine's `block_bytes` but the last."""
        names = self._blocks(record)[first : first + len(blocks)]
        self.engine.put([(name, self._sealed(name, block)) for name, block in zip(names, blocks, strict=True)])

    def commit(self, record: EntryRecord) -> None:
        """Makes an entry visible to `lookup`. All its blocks must be written before."""
        value = record.key + records.encode(record, 0)
        self.engine.put([(name, value) for name in self._index(record)])

    def touch(self, entries: Sequence[EntryRecord]) -> list[bool]:
        """Renews entries' time to live; returns whether each is complete."""
        requested = [[*self._blocks(entry), *self._index(entry)] for entry in entries]
        present = iter(self.engine.touch([name for names in requested for name in names]))
        return [all(list(islice(present, len(names)))) for names in requested]

    def delete(self, entries: Sequence[EntryRecord]) -> None:
        """Deletes entries, index records first."""
        each = [(entry, prefix) for entry in entries for prefix in self._prefixes(entry.namespace)]
        self.engine.remove([name for of in each for name in self._index(*of)])
        self.engine.remove([name for of in each for name in self._blocks(*of)])

    def delete_all(self, namespace: bytes) -> None:
        """Deletes all entries of a namespace. Takes time proportional to the size of the tier."""
        self.engine.remove_all(_prefix(namespace))

    def _found(self, names: Sequence[str]) -> list[bytes | None]:
        """Values by name; None if missing, or beyond what the engine looks up at once."""
        values = self.engine.get(names[: self.engine.lookup_values])
        return [*values, *[None] * (len(names) - len(values))]

    def _sealed(self, name: str, block: bytes) -> bytes:
        return block if self._keys is None else b"".join(self._keys.seal(block, name.encode()))

    def _fill(self, names: Sequence[str], views: Sequence[memoryview]) -> bool:
        """As `RemoteEngine.get_into`, of blocks. Raises FileNotFoundError if one cannot be decrypted."""
        if self._keys is None:
            return self.engine.get_into(names, views)
        for name, view, value in zip(names, views, self.engine.get(names), strict=True):
            block = self._keys.open(value[:HEAD_BYTES], value[HEAD_BYTES:], name.encode(), name) if value else b""
            if len(block) != len(view):
                return False
            view[:] = block
        return True

    def _prefixes(self, namespace: bytes) -> list[str]:
        """Prefixes of the names of a namespace's entries that this service can read: that of new entries first."""
        ids = [""] if self._keys is None else [f"{key.id.hex()}:" for key in self._keys.value]
        return [_prefix(namespace) + id for id in ids]

    def _blocks(self, record: EntryRecord, prefix: str = "") -> list[str]:
        """Names of an entry's blocks. prefix: empty for that of new entries."""
        start = f"{prefix or self._prefixes(record.namespace)[0]}{record.key.hex()}:{record.checksum.hex()}"
        return [f"{start}:{number}" for number in range(-(-record.size // self.engine.block_bytes))]

    def _index(self, record: EntryRecord, prefix: str = "") -> list[str]:
        """Names of an entry's record: the exact one, unless it is a variant, and that of its slot."""
        prefix = prefix or self._prefixes(record.namespace)[0]
        tag = _tag(prefix, record.namespace, record.system, record.chunk)
        exact = [] if record.variant else [f"{tag}{record.key.hex()}"]
        return exact if record.depth == 1 else [*exact, _slot(tag, record.variant, record.key[0] % SLOTS)]


def _slot(tag: str, variant: bytes, number: int) -> str:
    return f"{tag}{variant.hex()}:{number}"


def _tag(prefix: str, namespace: bytes, system: bytes, chunk: bytes) -> str:
    return f"{prefix}{{{replica_key(namespace, system, chunk).hex()}}}:"


def _prefix(namespace: bytes) -> str:
    return f"fusionkv:{namespace.hex()}:"


def _decoded(values: Iterable[bytes | None]) -> list[EntryRecord]:
    """Distinct valid records among values."""
    unique = {}
    for value in values:
        if value is not None:
            try:
                record, _ = records.decode(value[:DIGEST_BYTES], value[DIGEST_BYTES:])
            except ValueError:
                continue  # of a later version, or not ours
            if record.size and record.tokens:
                unique[record.key, record.checksum] = record
    return list(unique.values())
