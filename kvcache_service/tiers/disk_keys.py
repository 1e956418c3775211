"""The keys that the disk tier is encrypted with, from a file that is read anew when it changes."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fusionkv.protos.watched import BadFile, Watched, read_bytes

KEY_BYTES = 32
ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class DiskKey:
    """A key of AES-256-GCM; `id` is the beginning of its SHA-256, which says nothing of it."""

    id: bytes
    cipher: AESGCM


class DiskKeys:
    """Keys of one file, 64 hexadecimal digits a line: the first one writes, all of them read."""

    def __init__(self, file: Path) -> None:
        """Raises BadFile when the file can't be read or is not of this form."""
        self._file = file
        self._keys = Watched([file], self._read)

    @property
    def newest(self) -> DiskKey:
        return self._keys.value[0]

    def find(self, id: bytes) -> DiskKey | None:
        """The key of that id; None when it is not in the file, or not any more."""
        return next((key for key in self._keys.value if key.id == id), None)

    def _read(self) -> list[DiskKey]:
        keys = []
        for number, line in enumerate(read_bytes(self._file, "the disk keys").splitlines(), 1):
            try:
                raw = bytes.fromhex(line.decode())
            except ValueError:
                raw = b"?"
            if not raw:
                continue
            if len(raw) != KEY_BYTES:
                raise BadFile(f"the disk keys {self._file}: line {number} is no key of {2 * KEY_BYTES} hex digits")
            keys.append(DiskKey(hashlib.sha256(raw).digest()[:ID_BYTES], AESGCM(raw)))
        if len({key.id for key in keys}) < len(keys) or not keys:
            raise BadFile(f"the disk keys {self._file}: no key, or one of them twice")
        return keys
