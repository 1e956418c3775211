"""Digests that name chunks and entries: SHA-256 over a canonical binary form, used by services and clients.

Fields are length-prefixed, so different inputs have different forms. Each kind of digest starts with its own tag, so
digests of different kinds never collide.
"""

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence

from fusionkv.protos.contract import limits
from fusionkv.protos.runtime.errors import InvalidArgument

DIGEST_BYTES = limits.DIGEST_BYTES
_TENANT_BYTES = 8


def namespace(model: bytes, settings: Mapping[str, str], tenant: str) -> bytes:
    """Digest of everything but the tokens that affects KV bytes. It begins with that of the tenant.

    Args:
        model: Fingerprint of weights, configuration and tokenizer.
        settings: Other properties chosen by the worker, such as dtype, layout and RoPE.
        tenant: Isolates users from each other.
    """
    pairs = [text for key in sorted(settings) for text in (key.encode(), settings[key].encode())]
    name = tenant.encode()
    return tenant_of(_digest(b"tenant", [name])) + _digest(b"namespace 2", [model, name, *pairs])[_TENANT_BYTES:]


def tenant_of(namespace: bytes) -> bytes:
    """The part of a namespace that all namespaces of its tenant begin with."""
    return namespace[:_TENANT_BYTES]


def chunk_digest(tokens: Sequence[int]) -> bytes:
    """Digest of the token ids of a chunk or system prompt."""
    return _digest(b"chunk", [struct.pack(f"<{len(tokens)}I", *tokens)])


def neighbours_variant(neighbours: Iterable[bytes]) -> bytes:
    """Variant digest of a chunk encoded after these neighbours, given by digest, in order (FusionRAG 3.1)."""
    return _digest(b"neighbours", list(neighbours))


def primed_variant(primer: bytes) -> bytes:
    """Variant digest of a chunk encoded after the system prompt and this primer, given by digest."""
    return _digest(b"primed", [primer])


def primer_name(corpus: str) -> bytes:
    """The path's digest of the entry that holds a corpus's primer as token ids."""
    return _digest(b"primer", [corpus.encode()])


def versions_variant(most: int) -> bytes:
    """Variant digest of chunks computed within a prompt, with up to `most` versions per chunk (Cache-Craft)."""
    return _digest(b"versions", [most.to_bytes(8, "little")])


def entry_key(namespace: bytes, path: Sequence[bytes], variant: bytes = b"") -> bytes:
    """Key of an entry, from its path (system prompt first) and its last chunk's variant."""
    return variant_key(path_keys(namespace, path)[-1], variant)


def path_keys(namespace: bytes, path: Sequence[bytes]) -> list[bytes]:
    """Keys of the exact entries of all prefixes of a path; one hash per element, since each extends the previous."""
    keys, key = [], namespace
    for digest in path:
        key = _digest(b"path", [key, digest])
        keys.append(key)
    return keys


def variant_key(path_key: bytes, variant: bytes) -> bytes:
    """Key of a path's last chunk encoded as `variant`; the exact entry's key if it is empty."""
    return _digest(b"variant", [path_key, variant]) if variant else path_key


def replica_key(namespace: bytes, system: bytes, chunk: bytes) -> bytes:
    """Digest common to all entries of a chunk behind a system prompt, independent of the chunks between."""
    return _digest(b"replicas", [namespace, system, chunk])


def _digest(tag: bytes, fields: Sequence[bytes]) -> bytes:
    # A single call of the hash: another costs as much as 64 bytes, and a Lookup of 20 chunks makes up to 40 digests.
    message = b""
    for field in (tag, *fields):
        message += len(field).to_bytes(8, "little") + field
    return hashlib.sha256(message).digest()


VERSIONS = {versions_variant(most): most for most in range(1, limits.MOST_VERSIONS + 1)}
"""Maximum number of versions of a chunk behind one system prompt, by variant.

The variant encodes the limit, so all services apply the same one, and no request lowers that of another.
"""


def check_digests(values: Iterable[bytes], what: str) -> None:
    """Raises InvalidArgument unless all are digests."""
    for digest in values:
        if len(digest) != DIGEST_BYTES:
            raise InvalidArgument(f"{what} has {len(digest)} bytes, a digest has {DIGEST_BYTES}")


def check_path(namespace: bytes, elements: Sequence[bytes], limit: int) -> None:
    """Raises InvalidArgument unless a path has 1 to `limit` digests, and a namespace."""
    check_digests([namespace], "the namespace")
    if not 1 <= len(elements) <= limit:
        raise InvalidArgument(f"a path of {len(elements)} elements; 1 to {limit} are allowed")
    check_digests(elements, "a digest of the path")
