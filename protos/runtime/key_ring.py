"""Secret keys from a file that is read again when it changes: the first key is used, all are accepted."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from fusionkv.protos.runtime.watched import BadFile, Watched, read_bytes

KEY_BYTES = 32
ID_BYTES = 4
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Key(Generic[T]):
    """A value derived from a key; `id` is a prefix of the key's SHA-256, which reveals nothing about the key."""

    id: bytes
    value: T = field(repr=False)


class KeyRing(Generic[T]):
    """Keys from a file with 64 hexadecimal digits per line. Thread-safe."""

    def __init__(self, file: Path, what: str, make: Callable[[bytes], T]) -> None:
        """Reads the file.

        Args:
            what: the file's name in messages.
            make: derives a key's value from its 32 bytes.

        Raises:
            BadFile: the file can't be read or does not have this form.
        """
        self._file = file
        self._what = what
        self._make = make
        self._keys = Watched([file], self._read)

    @property
    def newest(self) -> Key[T]:
        """The first key of the file."""
        return self._keys.value[0]

    def find(self, id: bytes) -> Key[T] | None:
        """The key with an id; None if it is not, or no longer, in the file."""
        return next((key for key in self._keys.value if key.id == id), None)

    def _read(self) -> list[Key[T]]:
        keys = []
        for number, line in enumerate(read_bytes(self._file, self._what).splitlines(), 1):
            try:
                raw = bytes.fromhex(line.decode())
            except ValueError:
                raw = b"?"
            if not raw:
                continue
            if len(raw) != KEY_BYTES:
                raise BadFile(f"{self._what} {self._file}: line {number} is not a key of {2 * KEY_BYTES} hex digits")
            keys.append(Key(hashlib.sha256(raw).digest()[:ID_BYTES], self._make(raw)))
        if len({key.id for key in keys}) < len(keys) or not keys:
            raise BadFile(f"{self._what} {self._file}: the file has no key, or a key twice")
        return keys
