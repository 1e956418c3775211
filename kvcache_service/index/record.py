"""An entry's metadata, and its serialised form in persistent indexes."""

import struct
from dataclasses import dataclass

import xxhash

from fusionkv.kvcache_service.keys import DIGEST_BYTES, entry_key

CHECKSUM_BYTES = 16
MAX_SIGNATURE_BYTES = 63
# Versions of the format. Records without a signature use the first, which older services can read.
_PLAIN, _SIGNED = 1, 2
NEWEST = _SIGNED
"""The highest record version that can be read."""
_VARIANT, _OFFERED = 1, 2
# version, elements of the path, flags, size, tokens, base, checksum, place
_HEAD = struct.Struct("<BHBQII16sQ")
# Limits of the in-memory columns, above those of entries and tiers.
_MAX_BYTES, _MAX_OFFSET = 2**32 - 1, 2**63 - 1


@dataclass(frozen=True, slots=True)
class Record:
    """Immutable metadata of one entry.

    The path is one byte string in reverse order: the index sorts by it, and it saves 40 bytes of object overhead per
    digest.
    """

    key: bytes
    namespace: bytes
    trail: bytes
    """The path reversed: digests of the chunk, of the chunk before it, ..., of the system prompt."""
    variant: bytes
    size: int
    tokens: int
    base: int
    checksum: bytes
    offered: bool = False
    """Computed while serving a request, and kept only until a better entry of the chunk is stored."""
    signature: bytes = b""
    """The writer's signature, for readers: up to 63 opaque bytes."""

    @property
    def depth(self) -> int:
        """Number of elements in the path; 1 for a system prompt."""
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
    """Creates a record and derives its key; `path` starts with the system prompt."""
    key, trail = entry_key(namespace, path, variant), b"".join(reversed(path))
    return Record(key, namespace, trail, variant, size, tokens, base, checksum, offered, signature)


def encode(record: Record, offset: int) -> bytes:
    """Serialises a record and the offset of its bytes, with a checksum that also covers the key."""
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
    """Decodes only offset and size, at a quarter of the cost of `decode`; None if `decode` would raise."""
    if len(value) < _HEAD.size + 8 or xxhash.xxh3_64_digest(key + value[:-8]) != value[-8:]:
        return None
    version, depth, flags, size, *_, offset = _HEAD.unpack_from(value)
    if not _possible(key, version, depth, size, offset):
        return None
    names = DIGEST_BYTES * (1 + (flags & _VARIANT) + depth)
    return (offset, size) if _fits(version, len(value) - _HEAD.size - 8 - names) else None


def decode(key: bytes, value: bytes) -> tuple[Record, int]:
    """Decodes a record and the offset of its bytes.

    Raises:
        ValueError: `value` is not the output of `encode` for `key`.
    """
    body, checksum = value[:-8], value[-8:]
    if len(body) < _HEAD.size or xxhash.xxh3_64_digest(key + body) != checksum:
        raise ValueError("a damaged index record")
    version, depth, flags, size, tokens, base, digest, offset = _HEAD.unpack_from(body)
    names, at = body[_HEAD.size :], DIGEST_BYTES * (1 + (flags & _VARIANT))
    end = at + DIGEST_BYTES * depth
    if not _possible(key, version, depth, size, offset) or not _fits(version, len(names) - end):
        raise ValueError(f"an index record of version {version} that is invalid in versions 1 to {_SIGNED}")
    namespace, variant, trail, signature = names[:DIGEST_BYTES], names[DIGEST_BYTES:at], names[at:end], names[end:]
    offered = bool(flags & _OFFERED)
    return Record(key, namespace, trail, variant, size, tokens, base, digest, offered, signature), offset


def _possible(key: bytes, version: int, depth: int, size: int, offset: int) -> bool:
    known = version in (_PLAIN, _SIGNED) and depth > 0 and len(key) == DIGEST_BYTES
    return known and size <= _MAX_BYTES and offset <= _MAX_OFFSET


def _fits(version: int, signature_bytes: int) -> bool:
    """Whether a record of this version may end with so many bytes of signature."""
    return signature_bytes == 0 if version == _PLAIN else 0 < signature_bytes <= MAX_SIGNATURE_BYTES


def later(key: bytes, value: bytes) -> bool:
    """Whether a record is intact and of a version later than NEWEST."""
    return len(value) > 8 and value[0] > NEWEST and xxhash.xxh3_64_digest(key + value[:-8]) == value[-8:]
