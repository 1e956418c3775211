"""Keys for encryption of the disk tier and the remote tier."""

from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fusionkv.protos.runtime.key_ring import KeyRing


class DiskKeys(KeyRing[AESGCM]):
    """AES-256-GCM keys: the first encrypts, all decrypt."""

    def __init__(self, file: Path) -> None:
        """Raises BadFile if the file cannot be read or is malformed."""
        super().__init__(file, "the disk keys", AESGCM)
