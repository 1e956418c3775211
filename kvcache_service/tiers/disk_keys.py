"""The keys that the disk tier is encrypted with."""

from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fusionkv.protos.runtime.key_ring import KeyRing


class DiskKeys(KeyRing[AESGCM]):
    """Keys of AES-256-GCM: the first one writes, all of them read."""

    def __init__(self, file: Path) -> None:
        """Raises BadFile when the file can't be read or is not of this form."""
        super().__init__(file, "the disk keys", AESGCM)
