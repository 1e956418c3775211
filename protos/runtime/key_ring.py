"""Secret keys from a file that is read anew when it changes: the first one is used, all of them are accepted."""

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
    """What was made of one key; `id` is the beginning of its SHA-256, which says nothing of it."""

    id: bytes
    value: T = field(repr=False)


class KeyRing(Generic[T]):
    """Keys of one file, 64 hexadecimal digits a line. Safe for use by any thread."""

    def __init__(self, file: Path, what: str, make: Callable[[bytes], T]) -> None:
        """what: the file's name in messages. make: a key's value, from its 32 bytes.

        Raises:
            BadFile: the file can't be read or is not of this form.
        """
        self._file = file
        self._what = what
        self._make = make
        self._keys = Watched([file], self._read)

    @property
    def newest(self) -> Key[T]:
        """The first one."""
        return self._keys.value[0]

    def find(self, id: bytes) -> Key[T] | None:
        """The key of that id; None when it is not in the file, or not any more."""
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
                raise BadFile(f"{self._what} {self._file}: line {number} is no key of {2 * KEY_BYTES} hex digits")
            keys.append(Key(hashlib.sha256(raw).digest()[:ID_BYTES], self._make(raw)))
        if len({key.id for key in keys}) < len(keys) or not keys:
            raise BadFile(f"{self._what} {self._file}: no key, or one of them twice")
        return keys
