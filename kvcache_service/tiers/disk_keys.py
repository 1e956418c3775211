"""Encryption of blocks of the disk tier and the remote tier, with AES-256-GCM."""

import os
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fusionkv.protos.runtime.watched import ID_BYTES, KeyRing

TAG_BYTES = 16
_NONCE_BYTES = 12
HEAD_BYTES = ID_BYTES + _NONCE_BYTES


class DiskKeys(KeyRing[AESGCM]):
    """Keys of a file: the first encrypts, all decrypt."""

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
