"""The remote tier: entries that any number of cache services share, and the index of their paths.

An entry's bytes are values of 1 MiB, named by its key, its checksum and their number: two services that computed one
entry with different bytes never mix them. The index is written once all bytes are there. It holds an entry's record
twice: under its exact key, and, for whoever looks for the chunk behind another path, in one of SLOTS places of its
chunk, which the key chooses. A later entry takes the place of an earlier one, so a chunk's index is bounded; a record
expires with its entry's bytes, or with its place being taken.

All of a chunk's index has one hash tag, so that a Redis Cluster has it in one slot.
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
    """Methods block, and any thread may call them. All raise what those of an Engine do.

    What is read is the caller's to verify: records by `HitRanker`, bytes by their record's checksum.
    """

    name = "remote"

    def __init__(self, engine: Engine, keys: DiskKeys | None = None) -> None:
        """keys: encrypt every block with AES-256-GCM, the first one writes, all read. None: blocks are plain."""
        self._engine = engine
        self._keys = keys

    def find(
        self, namespace: bytes, path: Sequence[bytes], variants: Sequence[Sequence[bytes]], wanted: Sequence[int]
    ) -> list[list[Record]]:
        """Records that may serve the elements `wanted` of a path, in one round trip; the rest as for `Index.find`."""
        exact = path_keys(namespace, path)
        asked: list[list[str]] = []
        for i in wanted:
            tag = _tag(namespace, path[0], path[i])
            places = [_place(tag, kind, n) for kind in (b"", *variants[i]) for n in range(SLOTS)] if i else []
            asked.append([_exact(tag, exact[i]), *places])
        values = iter(self._engine.get([name for names in asked for name in names]))
        return [_decoded(islice(values, len(names))) for names in asked]

    def read(self, record: Record, first: int, count: int) -> list[bytes]:
        """Up to `count` blocks of an entry from the `first` one on.

        Raises:
            FileNotFoundError: one of them is not there any more, or can't be decrypted.
        """
        names = _blocks(record)[first : first + count]
        return [self._opened(name, value) for name, value in zip(names, self._engine.get(names), strict=True)]

    def write(self, record: Record, first: int, blocks: Sequence[bytes]) -> None:
        """Writes some of an entry's blocks, each of BLOCK_BYTES but the last one."""
        names = _blocks(record)[first : first + len(blocks)]
        self._engine.put([(name, self._sealed(name, block)) for name, block in zip(names, blocks, strict=True)])

    def commit(self, record: Record) -> None:
        """Makes an entry visible to `find`; all its blocks are written."""
        value = record.key + records.encode(record, 0)
        self._engine.put([(name, value) for name in _index(record)])

    def touch(self, entries: Sequence[Record]) -> list[bool]:
        """Whether each entry is there as a whole; its time begins anew."""
        asked = [[*_blocks(entry), *_index(entry)] for entry in entries]
        there = iter(self._engine.touch([name for names in asked for name in names]))
        return [all(list(islice(there, len(names)))) for names in asked]

    def delete(self, entries: Sequence[Record]) -> None:
        """Deletes entries: from the index first."""
        self._engine.remove([name for entry in entries for name in _index(entry)])
        self._engine.remove([name for entry in entries for name in _blocks(entry)])

    def delete_all(self, namespace: bytes) -> None:
        """Deletes all entries of a namespace. It takes as long as the tier is large."""
        self._engine.remove_all(_prefix(namespace))

    def probe(self) -> None:
        """Returns if the tier answers."""
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
            raise FileNotFoundError(f"{name} is not encrypted, or with a key that is not known")
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
    """The names of an entry's record: its own, unless it is a variant, then that which it shares with others."""
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
    """The records among values, each once."""
    found = {}
    for value in values:
        if value is not None:
            try:
                record, _ = records.decode(value[:DIGEST_BYTES], value[DIGEST_BYTES:])
            except ValueError:
                continue  # of a later version, or a stranger's
            if record.size and record.tokens:
                found[record.key, record.checksum] = record
    return list(found.values())
