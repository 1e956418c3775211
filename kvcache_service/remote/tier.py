"""The remote tier: entries shared by any number of cache services, and the index of their paths.

An entry's bytes are stored in values of 1 MiB, named by key, checksum and number, so that different bytes of two
services for the same entry are never mixed. The record is written after all bytes, to two places: under the exact
key, and, for lookups behind other paths, to one of SLOTS places per chunk, selected by the key. Later entries
overwrite earlier ones there, which bounds a chunk's index.

A chunk's index has a single hash tag, which keeps it in one slot of a Redis Cluster.
"""

import os
from collections.abc import Iterable, Sequence
from itertools import islice

from cryptography.exceptions import InvalidTag

from fusionkv.kvcache_service.index import record as records
from fusionkv.kvcache_service.index.record import Record
from fusionkv.kvcache_service.keys import DIGEST_BYTES, path_keys, replica_key
from fusionkv.kvcache_service.remote.engine import BLOCK_BYTES, Engine
from fusionkv.kvcache_service.tiers.disk_keys import DiskKeys
from fusionkv.protos.runtime.key_ring import ID_BYTES

SLOTS = 4
_NONCE_BYTES = 12


class RemoteTier:
    """Stores entries in an Engine. Methods block, are thread-safe, and raise the errors of an Engine.

    The caller must verify the results: records with `HitRanker`, bytes with the record's checksum.
    """

    name = "remote"

    def __init__(self, engine: Engine, keys: DiskKeys | None = None) -> None:
        """keys: encrypt blocks with AES-256-GCM; the first key encrypts, all decrypt. None: no encryption."""
        self._engine = engine
        self._keys = keys

    def find(
        self, namespace: bytes, path: Sequence[bytes], variants: Sequence[Sequence[bytes]], wanted: Sequence[int]
    ) -> list[list[Record]]:
        """Candidate records for the elements `wanted` of a path, in one round trip; see `Index.find`."""
        exact = path_keys(namespace, path)
        requested: list[list[str]] = []
        for i in wanted:
            tag = _tag(namespace, path[0], path[i])
            places = [_place(tag, kind, n) for kind in (b"", *variants[i]) for n in range(SLOTS)] if i else []
            requested.append([_exact(tag, exact[i]), *places])
        values = iter(self._engine.get([name for names in requested for name in names]))
        return [_decoded(islice(values, len(names))) for names in requested]

    def read(self, record: Record, first: int, count: int) -> list[bytes]:
        """Reads up to `count` blocks of an entry, starting at block `first`.

        Raises:
            FileNotFoundError: A block has expired, or cannot be decrypted.
        """
        names = _blocks(record)[first : first + count]
        return [self._opened(name, value) for name, value in zip(names, self._engine.get(names), strict=True)]

    def write(self, record: Record, first: int, blocks: Sequence[bytes]) -> None:
        """Writes consecutive blocks of an entry, all of BLOCK_BYTES but the last."""
        names = _blocks(record)[first : first + len(blocks)]
        self._engine.put([(name, self._sealed(name, block)) for name, block in zip(names, blocks, strict=True)])

    def commit(self, record: Record) -> None:
        """Makes an entry visible to `find`. All its blocks must be written before."""
        value = record.key + records.encode(record, 0)
        self._engine.put([(name, value) for name in _index(record)])

    def touch(self, entries: Sequence[Record]) -> list[bool]:
        """Renews entries' time to live; returns whether each is complete."""
        requested = [[*_blocks(entry), *_index(entry)] for entry in entries]
        present = iter(self._engine.touch([name for names in requested for name in names]))
        return [all(list(islice(present, len(names)))) for names in requested]

    def delete(self, entries: Sequence[Record]) -> None:
        """Deletes entries, index records first."""
        self._engine.remove([name for entry in entries for name in _index(entry)])
        self._engine.remove([name for entry in entries for name in _blocks(entry)])

    def delete_all(self, namespace: bytes) -> None:
        """Deletes all entries of a namespace. Takes time proportional to the size of the tier."""
        self._engine.remove_all(_prefix(namespace))

    def probe(self) -> None:
        """Returns if the tier is reachable."""
        self._engine.touch(["fusionkv:probe"])

    def close(self) -> None:
        self._engine.close()

    def _sealed(self, name: str, block: bytes) -> bytes:
        if self._keys is None:
            return block
        key, nonce = self._keys.newest, os.urandom(_NONCE_BYTES)
        return key.id + nonce + key.value.encrypt(nonce, block, name.encode())

    def _opened(self, name: str, value: bytes | None) -> bytes:
        if value is None:
            raise FileNotFoundError(f"{name} has expired")
        if self._keys is None:
            return value
        key = self._keys.find(value[:ID_BYTES])
        if key is None:
            raise FileNotFoundError(f"{name} is not encrypted, or its key is unknown")
        nonce, sealed = value[ID_BYTES : ID_BYTES + _NONCE_BYTES], value[ID_BYTES + _NONCE_BYTES :]
        try:
            return key.value.decrypt(nonce, sealed, name.encode())
        except (InvalidTag, ValueError) as error:
            raise FileNotFoundError(f"{name} is damaged") from error


def blocks_of(record: Record) -> int:
    """Number of an entry's blocks."""
    return -(-record.size // BLOCK_BYTES)


def _blocks(record: Record) -> list[str]:
    start = f"{_prefix(record.namespace)}{record.key.hex()}:{record.checksum.hex()}"
    return [f"{start}:{number}" for number in range(blocks_of(record))]


def _index(record: Record) -> list[str]:
    """Names of an entry's record: the exact one, unless it is a variant, and that of its slot."""
    tag = _tag(record.namespace, record.system, record.chunk)
    own = [] if record.variant else [_exact(tag, record.key)]
    return own if record.depth == 1 else [*own, _place(tag, record.variant, record.key[0] % SLOTS)]


def _exact(tag: str, key: bytes) -> str:
    return f"{tag}{key.hex()}"


def _place(tag: str, variant: bytes, number: int) -> str:
    return f"{tag}{variant.hex()}:{number}"


def _tag(namespace: bytes, system: bytes, chunk: bytes) -> str:
    return f"{_prefix(namespace)}{{{replica_key(namespace, system, chunk).hex()}}}:"


def _prefix(namespace: bytes) -> str:
    return f"fusionkv:{namespace.hex()}:"


def _decoded(values: Iterable[bytes | None]) -> list[Record]:
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
