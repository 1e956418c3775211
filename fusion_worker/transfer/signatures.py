"""Signatures of cache entries: workers sign the entries that they store, and reject those that no worker signed.

A signature binds bytes to their names, in two steps:

1. A seal of the bytes: AES-256-GMAC with a random nonce. The cache service's checksum would not be enough: bytes with
   a given XXH3 are easy to make.
2. HMAC-SHA256 over the seal, the entry's names (namespace, system prompt, chunk, variant, key), and its checksum,
   size, tokens and base. It is verified at lookup, with names that the worker computes itself for the requested
   chunk. This also binds an entry found by another path, whose key the worker can't compute, to the chunk's tokens.
"""

import asyncio
import hmac
import logging
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from opentelemetry import metrics

from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.client import CacheClient, Entry, Hit, HitKind
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime.checksum import checksum
from fusionkv.protos.runtime.errors import DataLoss, ServiceError
from fusionkv.protos.runtime.watched import ID_BYTES, KeyRing

# Maximum seconds that a request waits for rejected entries to be deleted, so that it can store their replacements.
DELETE_SECONDS = 0.5
_NONCE_BYTES, _TAG_BYTES, _MAC_BYTES = 12, 16, 16
_SEAL = slice(ID_BYTES, ID_BYTES + _NONCE_BYTES + _TAG_BYTES)
_NUMBERS = struct.Struct("<QII?")
# Bytes sealed at a time, which blocks the other threads of the process (GIL) for 0.2 ms.
_PIECE_BYTES = 1 << 20
_MISS = Hit(HitKind.MISS, None)
_FAULTS = ("unsigned", "unknown key", "wrong signature", "another variant", "other bytes")
_faults = logs.RateLimitedLog(logging.getLogger(__name__))
_rejected = metrics.get_meter(__name__).create_counter(
    "fusionkv.worker.entries_rejected", description="Entries that no worker signed, by reason"
)


@dataclass(frozen=True, slots=True)
class _Secrets:
    """The keys derived from one key of the file: one for names, one for bytes."""

    names: bytes
    data: bytes

    @classmethod
    def of(cls, key: bytes) -> "_Secrets":
        names, data = (hmac.digest(key, b"fusionkv.entry.1." + use, "sha256") for use in (b"names", b"bytes"))
        return cls(names, data)


class Signer:
    """Signs with the first key of a file and verifies with all of its keys.

    A signature has 48 bytes: the key's id (4), the seal's nonce (12) and tag (16), and half of the HMAC (16).
    """

    def __init__(self, file: Path) -> None:
        """Raises BadFile when the file can't be read or does not have the format of protos/runtime/watched.py."""
        self._keys = KeyRing(file, "the signing keys", _Secrets.of)
        for fault in _FAULTS:  # an alert would not see the first one as an increase of something new
            _rejected.add(0, {"fusionkv.reason": fault})

    def sign(
        self, namespace: bytes, path: Sequence[bytes], variant: bytes, data: memoryview, *, tokens: int, base: int
    ) -> bytes:
        """Signs an entry, given the arguments of its Put. Takes 0.2 ms per MiB."""
        newest = self._keys.newest
        seal = _seal(newest.value.data, os.urandom(_NONCE_BYTES), data)
        names = (namespace, path[0], path[-1], variant, keys.entry_key(namespace, path, variant))
        numbers = _NUMBERS.pack(len(data), tokens, base, len(path) == 1)
        return newest.id + seal + _mac(newest.value, *names, numbers, checksum(data), seal)

    def fault(self, namespace: bytes, system: bytes, chunk: bytes, first: bool, entry: Entry) -> str:
        """Why an entry's signature is not valid for a chunk, or for the system prompt (`first`); empty if it is."""
        if not entry.signature:
            return "unsigned"
        key = self._keys.find(entry.signature[:ID_BYTES])
        if key is None:
            return "unknown key"
        names = (namespace, system, chunk, entry.variant, entry.key)
        numbers = _NUMBERS.pack(entry.size, entry.tokens, entry.base, first)
        mac = _mac(key.value, *names, numbers, entry.checksum, entry.signature[_SEAL])
        return "" if hmac.compare_digest(entry.signature[_SEAL.stop :], mac) else "wrong signature"

    def genuine(
        self, namespace: bytes, path: Sequence[tuple[bytes, Sequence[bytes]]], hits: Sequence[Hit]
    ) -> tuple[list[Hit], list[bytes]]:
        """Checks the hits of a lookup. Rejected entries are counted, and logged at most once a minute.

        namespace, path, hits: those of `CacheClient.lookup`. Returns the hits, with misses in place of rejected
        entries, and the keys of those entries.
        """
        system, checked, rejected = path[0][0], [], []
        for i, (hit, (chunk, variants)) in enumerate(zip(hits, path, strict=True)):
            if (entry := hit.entry) is not None:
                fault = self.fault(namespace, system, chunk, i == 0, entry)
                if not fault and entry.variant and entry.variant not in variants:
                    fault = "another variant"
                if fault:
                    _reject(entry, fault)
                    rejected.append(entry.key)
                    hit = _MISS
            checked.append(hit)
        return checked, rejected

    async def verify(self, cache: CacheClient, entry: Entry, data: memoryview) -> None:
        """Checks the bytes of a `genuine` entry against its seal. Takes 0.2 ms per MiB.

        Raises DataLoss if they differ; the cache service has been asked to delete the entry.
        """
        key, seal = self._keys.find(entry.signature[:ID_BYTES]), entry.signature[_SEAL]
        # The key may have been removed from the file since the lookup.
        if key is not None and seal == await asyncio.to_thread(_seal, key.value.data, seal[:_NONCE_BYTES], data):
            return
        _reject(entry, "other bytes")
        with suppress(ServiceError):
            await cache.delete([entry.key], timeout=DELETE_SECONDS)
        raise DataLoss(f"the bytes of entry {entry.key.hex()} are not those that a worker signed; it is deleted")


def _reject(entry: Entry, fault: str) -> None:
    _rejected.add(1, {"fusionkv.reason": fault})
    _faults.warning("rejected an entry of the cache service", DataLoss(f"{entry.key.hex()}: {fault}"))


def _seal(key: bytes, nonce: bytes, data: memoryview) -> bytes:
    """Nonce and tag of an AES-256-GMAC. A key is good for 2^32 random nonces (NIST SP 800-38D)."""
    sealing = Cipher(algorithms.AES(key), modes.GCM(nonce)).encryptor()
    for at in range(0, len(data), _PIECE_BYTES):
        sealing.authenticate_additional_data(data[at : at + _PIECE_BYTES])
    sealing.finalize()
    return nonce + sealing.tag


def _mac(secrets: _Secrets, *parts: bytes) -> bytes:
    """HMAC over length-prefixed parts, which makes the encoding unambiguous."""
    message = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hmac.digest(secrets.names, message, "sha256")[:_MAC_BYTES]
