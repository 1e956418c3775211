"""What is known of an entry besides its bytes, and its form in the disk tier's index."""

import struct
from dataclasses import dataclass

import xxhash

from fusionkv.kvcache_service.keys import DIGEST_BYTES, entry_key

CHECKSUM_BYTES = 16
MOST_SIGNATURE_BYTES = 63
# A record without a signature has the first form, as ever: a service from before signatures reads it.
_PLAIN, _SIGNED = 1, 2
NEWEST = _SIGNED
"""The highest version of a record that is read."""
_VARIANT, _OFFERED = 1, 2
# version, elements of the path, flags, size, tokens, base, checksum, place
_HEAD = struct.Struct("<BHBQII16sQ")
# What the table in memory has room for; a longer entry is refused anyway, and no tier is as large.
_MOST_BYTES, _MOST_OFFSET = 2**32 - 1, 2**63 - 1


@dataclass(frozen=True, slots=True)
class Record:
    """One entry's names and numbers; immutable for the entry's whole life.

    The path is kept as one string of bytes from the chunk back to the system prompt: the index sorts by it, and
    40 bytes of object overhead a digest are saved.
    """

    key: bytes
    namespace: bytes
    trail: bytes
    """Digests of the chunk, of the chunk before it, ... of the system prompt."""
    variant: bytes
    size: int
    tokens: int
    base: int
    checksum: bytes
    offered: bool = False
    """Computed on the way of a request, and kept only as long as no better entry of the chunk is there."""
    signature: bytes = b""
    """Its maker's, for those who fetch it; up to 63 bytes that nothing here looks into."""

    @property
    def depth(self) -> int:
        """Elements of the path; 1 is a system prompt."""
        return len(self.trail) // DIGEST_BYTES

    @property
    def chunk(self) -> bytes:
        return self.trail[:DIGEST_BYTES]

    @property
    def system(self) -> bytes:
        return self.trail[-DIGEST_BYTES:]


def make(
    namespace: bytes,
    path: list[bytes],
    variant: bytes,
    size: int,
    tokens: int,
    base: int,
    checksum: bytes,
    *,
    offered: bool = False,
    signature: bytes = b"",
) -> Record:
    """A record with its key derived; `path` has the system prompt first."""
    key, trail = entry_key(namespace, path, variant), b"".join(reversed(path))
    return Record(key, namespace, trail, variant, size, tokens, base, checksum, offered, signature)


def encode(record: Record, offset: int) -> bytes:
    """The record and where its bytes are, with a checksum over both and the key."""
    head = _HEAD.pack(
        _SIGNED if record.signature else _PLAIN,
        record.depth,
        _VARIANT * bool(record.variant) | _OFFERED * record.offered,
        record.size,
        record.tokens,
        record.base,
        record.checksum,
        offset,
    )
    body = b"".join((head, record.namespace, record.variant, record.trail, record.signature))
    return body + xxhash.xxh3_64_digest(record.key + body)


def place(key: bytes, value: bytes) -> tuple[int, int] | None:
    """Offset and size alone, at a quarter of the cost of `decode`; None where that raises."""
    if len(value) < _HEAD.size + 8 or xxhash.xxh3_64_digest(key + value[:-8]) != value[-8:]:
        return None
    version, depth, flags, size, *_, offset = _HEAD.unpack_from(value)
    if not _possible(key, version, depth, size, offset):
        return None
    names = DIGEST_BYTES * (1 + (flags & _VARIANT) + depth)
    return (offset, size) if _fits(version, len(value) - _HEAD.size - 8 - names) else None


def decode(key: bytes, value: bytes) -> tuple[Record, int]:
    """The record and the offset of its bytes.

    Raises:
        ValueError: `value` is not what `encode` wrote under `key`.
    """
    body, checksum = value[:-8], value[-8:]
    if len(body) < _HEAD.size or xxhash.xxh3_64_digest(key + body) != checksum:
        raise ValueError("a damaged index record")
    version, depth, flags, size, tokens, base, digest, offset = _HEAD.unpack_from(body)
    names, at = body[_HEAD.size :], DIGEST_BYTES * (1 + (flags & _VARIANT))
    end = at + DIGEST_BYTES * depth
    if not _possible(key, version, depth, size, offset) or not _fits(version, len(names) - end):
        raise ValueError(f"an index record of version {version} that none of versions 1 to {_SIGNED} can be")
    namespace, variant, trail, signature = names[:DIGEST_BYTES], names[DIGEST_BYTES:at], names[at:end], names[end:]
    offered = bool(flags & _OFFERED)
    return Record(key, namespace, trail, variant, size, tokens, base, digest, offered, signature), offset


def _possible(key: bytes, version: int, depth: int, size: int, offset: int) -> bool:
    known = version in (_PLAIN, _SIGNED) and depth > 0 and len(key) == DIGEST_BYTES
    return known and size <= _MOST_BYTES and offset <= _MOST_OFFSET


def _fits(version: int, left: int) -> bool:
    """Whether a record of this form has so many bytes behind its names: those of a signature, or none."""
    return left == 0 if version == _PLAIN else 0 < left <= MOST_SIGNATURE_BYTES


def later(key: bytes, value: bytes) -> bool:
    """Whether a record is whole, and of a form that only a later version of this program knows."""
    return len(value) > 8 and value[0] > NEWEST and xxhash.xxh3_64_digest(key + value[:-8]) == value[-8:]
