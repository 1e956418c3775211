"""The encrypted disk tier: segment files of AES-256-GCM ciphertext, in blocks of 1 MiB of an entry.

Segments have the same layout as without encryption. Key id, nonce and tag of a block (32 bytes) are stored in
`segments/<n>.seal`, at an offset derived from the block's. Nonces are 96 random bits per block written, so by NIST SP
800-38D a key is good for 2^32 blocks. Place and entry size are authenticated as associated data. A block that cannot
be decrypted, also for an unknown key, counts as damaged: a miss, and deleted when it is read.
"""

import os
import struct
from collections.abc import Sequence
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fusionkv.kvcache_service.index.record import EntryRecord
from fusionkv.kvcache_service.tiers.base import Place
from fusionkv.kvcache_service.tiers.disk import DiskTier
from fusionkv.kvcache_service.tiers.extents import ALIGNMENT
from fusionkv.kvcache_service.tiers.segments import SEGMENT_BYTES
from fusionkv.protos.runtime.watched import ID_BYTES, KeyRing

BLOCK_BYTES = 1 << 20
_NONCE_BYTES, _TAG_BYTES = 12, 16
HEAD_BYTES = ID_BYTES + _NONCE_BYTES
_SEAL_BYTES = HEAD_BYTES + _TAG_BYTES
# File with the id of the key that encrypted last.
_MARK = "key"


class DiskKeys(KeyRing[AESGCM]):
    """AES-256-GCM keys of a file, for the disk tier and the remote tier: the first encrypts, all decrypt."""

    def __init__(self, file: Path) -> None:
        """Raises BadFile if the file cannot be read or is malformed."""
        super().__init__(file, "the disk keys", AESGCM)

    def seal(self, data: bytes, bound: bytes) -> tuple[bytes, bytes]:
        """Head (key id and nonce) and ciphertext, which ends with the tag. `bound` is authenticated too."""
        key, nonce = self.newest, os.urandom(_NONCE_BYTES)
        return key.id + nonce, key.value.encrypt(nonce, data, bound)

    def open(self, head: bytes, sealed: bytes, bound: bytes, what: str) -> bytes:
        """Decrypts what `seal` returned. Raises FileNotFoundError, which names `what`, if that is impossible."""
        key = self.find(head[:ID_BYTES])
        if key is None:
            raise FileNotFoundError(f"{what} is not encrypted, or its key is unknown")
        try:
            return key.value.decrypt(head[ID_BYTES:], sealed, bound)
        except (InvalidTag, ValueError) as error:  # ValueError: the head is truncated
            raise FileNotFoundError(f"{what} is damaged") from error


def check_key(directory: Path, keys: DiskKeys | None) -> None:
    """Raises OSError if a disk tier was last encrypted with a key that is missing: reads would delete entries."""
    mark = directory / _MARK
    id = mark.read_bytes() if mark.exists() else b""
    if len(id) == ID_BYTES and (keys is None or keys.find(id) is None):
        raise OSError(f"{directory} is encrypted with a key that disk_keys lacks: add it, or remove the directory")


class SealedDiskTier(DiskTier):
    """A DiskTier in which each place must be written once, sequentially, as the store does."""

    readable = False

    def __init__(self, directory: Path, capacity_bytes: int, keys: DiskKeys, *, sync: bool = False) -> None:
        """See DiskTier."""
        super().__init__(directory, capacity_bytes, sync=sync)
        self._keys = keys
        self._marked = b""
        self._mark = directory / _MARK
        self._tails: dict[int, bytearray] = {}  # offset of a place -> bytes of an incomplete block

    def write(self, place: Place, at: int, data: Sequence[memoryview]) -> None:
        tail = self._tails.pop(place.offset, bytearray()) if at else bytearray()
        start = at - len(tail)
        assert start % BLOCK_BYTES == 0, f"a write at {at} after {len(tail)} bytes beyond the last block"
        for piece in data:
            tail += piece
            while len(tail) >= BLOCK_BYTES:
                self._seal(place, start, bytes(tail[:BLOCK_BYTES]))
                del tail[:BLOCK_BYTES]
                start += BLOCK_BYTES
        if tail and start + len(tail) == place.size:
            self._seal(place, start, bytes(tail))
        elif tail:
            self._tails[place.offset] = tail

    def read(self, place: Place, at: int, size: int) -> memoryview:
        first = at // BLOCK_BYTES * BLOCK_BYTES
        blocks = [self._open(place, start) for start in range(first, at + size, BLOCK_BYTES)]
        return memoryview(blocks[0] if len(blocks) == 1 else b"".join(blocks))[at - first : at - first + size]

    def free(self, place: Place) -> None:
        self._tails.pop(place.offset, None)
        super().free(place)

    def commit(self, record: EntryRecord, place: Place, heat: float) -> None:
        if self._sync:
            os.fdatasync(self._seal_at(place, 0)[0])
        super().commit(record, place, heat)

    def _seal(self, place: Place, start: int, block: bytes) -> None:
        head, sealed = self._keys.seal(block, _bound(place, start))
        if head[:ID_BYTES] != self._marked:
            self._marked = head[:ID_BYTES]
            self._mark.write_bytes(self._marked)
        file, offset = self._seal_at(place, start)
        os.pwrite(file, head + sealed[-_TAG_BYTES:], offset)
        super().write(place, start, [memoryview(sealed)[:-_TAG_BYTES]])

    def _open(self, place: Place, start: int) -> bytes:
        """Decrypts the block at byte `start` of a place."""
        file, offset = self._seal_at(place, start)
        seal = os.pread(file, _SEAL_BYTES, offset)
        data = super().read(place, start, min(BLOCK_BYTES, place.size - start))
        sealed = bytes(data) + seal[HEAD_BYTES:]
        return self._keys.open(seal[:HEAD_BYTES], sealed, _bound(place, start), f"a block at {place.offset + start}")

    def _seal_at(self, place: Place, start: int) -> tuple[int, int]:
        """File descriptor and offset of a block's seal. Blocks start at distinct multiples of 4096."""
        segment, offset = divmod(place.offset + start, SEGMENT_BYTES)
        return self.segments.file(segment, "seal"), offset // ALIGNMENT * _SEAL_BYTES


def _bound(place: Place, start: int) -> bytes:
    return struct.pack("<QQ", place.offset + start, place.size)
