"""Names of chunks and entries: SHA-256 over a canonical binary form, 32 bytes, imported by every side.

Every field is written with its length before it, so no two different inputs have one form, and every kind of digest
begins with a tag of its own, so a digest of one kind is never one of another.
"""

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

DIGEST_BYTES = 32
_FRAME = DIGEST_BYTES.to_bytes(8, "little")


def namespace(model: bytes, settings: Mapping[str, str], tenant: str) -> bytes:
    """Digest of all that changes KV bytes besides the tokens.

    `model` is the fingerprint of weights, configuration and tokenizer; `settings` names what else the worker
    decided (dtype, layout, RoPE); `tenant` keeps users apart.
    """
    pairs = [part for key in sorted(settings) for part in (key.encode(), settings[key].encode())]
    return _digest(b"namespace", [model, tenant.encode(), *pairs])


def chunk_digest(tokens: Sequence[int]) -> bytes:
    """Digest of a chunk's (or a system prompt's) token ids."""
    return _digest(b"chunk", [struct.pack(f"<{len(tokens)}I", *tokens)])


def neighbours_variant(neighbours: Iterable[bytes]) -> bytes:
    """Variant digest of a chunk encoded after these neighbours' digests, in this order (FusionRAG 3.1)."""
    return _digest(b"neighbours", list(neighbours))


def versions_variant(most: int) -> bytes:
    """Variant digest of chunks computed in a prompt, of which `most` are kept by what stood before (Cache-Craft)."""
    return _digest(b"versions", [most.to_bytes(8, "little")])


def anchors_variant(percent: int) -> bytes:
    """Variant digest of chunks of which anchor tokens alone are kept, so many percent fewer (KVLink 2.4)."""
    return _digest(b"anchors", [percent.to_bytes(8, "little")])


def entry_key(namespace: bytes, path: Sequence[bytes], variant: bytes = b"") -> bytes:
    """Key of an entry: a path of chunk digests, the system prompt first, and how its last chunk was encoded."""
    return variant_key(path_keys(namespace, path)[-1], variant)


def path_keys(namespace: bytes, path: Sequence[bytes]) -> list[bytes]:
    """Keys of the exact entries of every prefix of a path; one hash an element, since each extends the one before."""
    keys, key = [], namespace
    for digest in path:
        key = _digest(b"path", [key, digest])
        keys.append(key)
    return keys


def variant_key(path_key: bytes, variant: bytes) -> bytes:
    """Key of the entry that is this path's last chunk, encoded as `variant`; the exact entry when it is empty."""
    return _digest(b"variant", [path_key, variant]) if variant else path_key


def replica_key(namespace: bytes, system: bytes, chunk: bytes) -> bytes:
    """Names all entries that hold this chunk after this system prompt, whatever stands between the two."""
    return _digest(b"replicas", [namespace, system, chunk])


def _digest(tag: bytes, parts: Sequence[bytes]) -> bytes:
    # One call of the hash, which costs as much as 64 bytes more: a Lookup of 20 chunks makes up to 40 digests.
    message = _framed(tag)
    for part in parts:
        message += _FRAME if len(part) == DIGEST_BYTES else len(part).to_bytes(8, "little")
        message += part
    return hashlib.sha256(message).digest()


@lru_cache(maxsize=16)
def _framed(tag: bytes) -> bytes:
    return len(tag).to_bytes(8, "little") + tag


MOST_VERSIONS = 16
VERSIONS = {versions_variant(most): most for most in range(1, MOST_VERSIONS + 1)}
"""How many versions of a chunk behind one system prompt are kept, by their variant.

The variant names the bound, so it holds wherever an entry comes to lie, and no request cuts what another one keeps.
"""
