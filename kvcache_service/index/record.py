"""An entry's metadata, its serialised form in persistent indexes, and the kinds of hits."""

import enum
import struct
from dataclasses import dataclass
from typing import Any

import xxhash

from fusionkv.kvcache_service.keys import DIGEST_BYTES, entry_key

CHECKSUM_BYTES = 16
MAX_SIGNATURE_BYTES = 63
# Versions of the format. Records without a signature use the first, which older services can read.
_PLAIN, _SIGNED = 1, 2
NEWEST = _SIGNED
"""The highest record version that can be read."""
# Flags.
VARIANT, OFFERED = 1, 2
# version, elements of the path, flags, size, tokens, base, checksum, place
_HEAD = struct.Struct("<BHBQII16sQ")
# Limits of the in-memory columns, above those of entries and tiers.
_MAX_BYTES, _MAX_OFFSET = 2**32 - 1, 2**63 - 1


class HitKind(enum.Enum):
    """EXACT: found by its exact path. ALTERNATIVE: encoded behind other chunks, or as a variant. MISS: not found."""

    EXACT = "exact"
    ALTERNATIVE = "alternative"
    MISS = "miss"


@dataclass(frozen=True, slots=True)
class EntryRecord:
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
) -> EntryRecord:
    """Creates a record and derives its key; `path` starts with the system prompt."""
    key, trail = entry_key(namespace, path, variant), b"".join(reversed(path))
    return EntryRecord(key, namespace, trail, variant, size, tokens, base, checksum, offered, signature)


def encode(record: EntryRecord, offset: int) -> bytes:
    """Serialises a record and the offset of its bytes, with a checksum that also covers the key."""
    head = _HEAD.pack(
        _SIGNED if record.signature else _PLAIN,
        record.depth,
        VARIANT * bool(record.variant) | OFFERED * record.offered,
        record.size,
        record.tokens,
        record.base,
        record.checksum,
        offset,
    )
    body = b"".join((head, record.namespace, record.variant, record.trail, record.signature))
    return body + xxhash.xxh3_64_digest(record.key + body)


def decode_place(key: bytes, value: bytes) -> tuple[int, int] | None:
    """Decodes only offset and size, at a quarter of the cost of `decode`; None if `decode` would raise."""
    try:
        _, _, _, size, *_, offset = _head(key, value)
    except ValueError:
        return None
    return offset, size


def decode(key: bytes, value: bytes) -> tuple[EntryRecord, int]:
    """Decodes a record and the offset of its bytes. Raises ValueError unless `encode` gave `value` for `key`."""
    _, depth, flags, size, tokens, base, digest, offset = _head(key, value)
    names, at = value[_HEAD.size : -8], DIGEST_BYTES * (1 + (flags & VARIANT))
    end = at + DIGEST_BYTES * depth
    namespace, variant, trail, signature = names[:DIGEST_BYTES], names[DIGEST_BYTES:at], names[at:end], names[end:]
    offered = bool(flags & OFFERED)
    return EntryRecord(key, namespace, trail, variant, size, tokens, base, digest, offered, signature), offset


def _head(key: bytes, value: bytes) -> tuple[Any, ...]:
    """The fields of `_HEAD` of a valid record. Raises ValueError as `decode` does."""
    if len(value) < _HEAD.size + 8 or xxhash.xxh3_64_digest(key + value[:-8]) != value[-8:]:
        raise ValueError("a damaged index record")
    head = _HEAD.unpack_from(value)
    version, depth, flags, size, *_, offset = head
    possible = version in (_PLAIN, _SIGNED) and depth > 0 and len(key) == DIGEST_BYTES
    signature_bytes = len(value) - _HEAD.size - 8 - DIGEST_BYTES * (1 + (flags & VARIANT) + depth)
    fits = signature_bytes == 0 if version == _PLAIN else 0 < signature_bytes <= MAX_SIGNATURE_BYTES
    if not possible or not fits or size > _MAX_BYTES or offset > _MAX_OFFSET:
        raise ValueError(f"an index record of version {version} that is invalid in versions 1 to {_SIGNED}")
    return head


def is_later(key: bytes, value: bytes) -> bool:
    """Whether a record is intact and of a version later than NEWEST."""
    return len(value) > 8 and value[0] > NEWEST and xxhash.xxh3_64_digest(key + value[:-8]) == value[-8:]
