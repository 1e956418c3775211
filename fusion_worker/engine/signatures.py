"""Whose KV an entry is: workers sign what they put, and take nothing that none of them signed.

A signature is HMAC-SHA256 over what names an entry (namespace, system prompt, chunk, variant, key), over its size,
tokens and base, and over the checksum of its bytes, which is verified on all that is read. The worker verifies it
with the names that it computed itself for the chunk it asked for. So an entry that was found by another path, whose
key the worker can't compute, is bound to the chunk's own tokens as well.
"""

import hmac
import logging
import struct
from collections.abc import Sequence
from pathlib import Path

from opentelemetry import metrics

from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.client import Entry, Hit, HitKind
from fusionkv.protos import logs
from fusionkv.protos.errors import DataLoss
from fusionkv.protos.key_ring import ID_BYTES, KeyRing

_LABEL = b"fusionkv.entry.1"
_NUMBERS = struct.Struct("<QII?")
_MISS = Hit(HitKind.MISS, None)
_faults = logs.Seldom(logging.getLogger(__name__))
_rejected = metrics.get_meter(__name__).create_counter(
    "fusionkv.worker.entries_rejected", description="Entries that no worker signed, by reason; each is a miss"
)


class Signer:
    """Signs with the first of a file's keys and verifies with all of them. 36 bytes: the key's id, and the HMAC."""

    def __init__(self, file: Path) -> None:
        """Raises BadFile when the file can't be read or is not of the form of protos/key_ring.py."""
        self._keys = KeyRing(file, "the signing keys", bytes)

    def sign(
        self,
        namespace: bytes,
        path: Sequence[bytes],
        variant: bytes,
        checksum: bytes,
        *,
        size: int,
        tokens: int,
        base: int,
    ) -> bytes:
        """The signature of an entry; all as it is put."""
        numbers = _NUMBERS.pack(size, tokens, base, len(path) == 1)
        key = keys.entry_key(namespace, path, variant)
        newest = self._keys.newest
        message = _message(namespace, path[0], path[-1], variant, key, numbers, checksum)
        return newest.id + hmac.digest(newest.value, message, "sha256")

    def fault(self, namespace: bytes, system: bytes, chunk: bytes, first: bool, entry: Entry) -> str:
        """Why an entry is not that of a chunk behind a system prompt, or of that itself (`first`); empty if it is."""
        if not entry.signature:
            return "unsigned"
        key = self._keys.find(entry.signature[:ID_BYTES])
        if key is None:
            return "unknown key"
        numbers = _NUMBERS.pack(entry.size, entry.tokens, entry.base, first)
        message = _message(namespace, system, chunk, entry.variant, entry.key, numbers, entry.checksum)
        genuine = hmac.compare_digest(entry.signature[ID_BYTES:], hmac.digest(key.value, message, "sha256"))
        return "" if genuine else "wrong signature"

    def genuine(
        self, namespace: bytes, path: Sequence[tuple[bytes, Sequence[bytes]]], hits: Sequence[Hit]
    ) -> tuple[list[Hit], list[bytes]]:
        """What a lookup found, with a miss for each entry that is none of its chunk's; and the keys of those.

        They are counted, and logged at most once a minute. path: as for `CacheClient.lookup`.
        """
        system, kept, rejected = path[0][0], [], []
        for i, (hit, (chunk, variants)) in enumerate(zip(hits, path, strict=True)):
            if (entry := hit.entry) is not None:
                fault = self.fault(namespace, system, chunk, i == 0, entry)
                if not fault and entry.variant and entry.variant not in variants:
                    fault = "another variant"
                if fault:
                    _rejected.add(1, {"fusionkv.reason": fault})
                    _faults.warning("an entry of the cache is rejected", DataLoss(f"{entry.key.hex()}: {fault}"))
                    rejected.append(entry.key)
                    hit = _MISS
            kept.append(hit)
        return kept, rejected


def _message(*parts: bytes) -> bytes:
    """Each with its length before it, so that no two different inputs have one form."""
    return b"".join(len(part).to_bytes(4, "little") + part for part in (_LABEL, *parts))
