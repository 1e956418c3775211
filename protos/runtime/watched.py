"""Values from files that are read again when a file changes, without a restart: certificates, keys, tokens."""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")
# A check is one stat per file, about 3 us each.
_CHECK_SECONDS = 1.0
KEY_BYTES = 32
ID_BYTES = 4


class BadFile(OSError):
    """A file that can't be used. The message names the file, but never quotes its content."""


class Watched(Generic[T]):
    """The value that `read()` makes of `files`, which raises BadFile if it can't. Thread-safe."""

    def __init__(self, files: Sequence[Path], read: Callable[[], T]) -> None:
        """Reads the files for the first time. Raises BadFile if they can't be used."""
        self._files = tuple(files)
        self._read = read
        self._checking = threading.Lock()
        self._stamp = self._stamps()
        self._failed: object = None
        self._value = read()
        self._checked_at = time.monotonic()

    @property
    def value(self) -> T:
        """The latest value, at most a second old. If the files become invalid, the last valid value stays."""
        if time.monotonic() - self._checked_at >= _CHECK_SECONDS and self._checking.acquire(blocking=False):
            try:
                self._check()
            finally:
                self._checking.release()
        return self._value

    def _check(self) -> None:
        self._checked_at = time.monotonic()
        # Taken before reading: files that change meanwhile are read again at the next check.
        stamp = self._stamps()
        if stamp == self._stamp:
            return
        names = ", ".join(map(str, self._files))
        try:
            self._value = self._read()
        except BadFile as error:
            # Read again at the next check: no stamp shows a new mode, or that files can be opened again.
            if self._failed != (failed := (stamp, str(error))):
                self._failed = failed
                log.warning("%s changed but can't be used; keeping the last valid state: %s", names, error)
        else:
            self._stamp = stamp
            log.info("%s changed and was read again", names)

    def _stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(file) for file in self._files)


def read_bytes(file: Path, what: str, limit: int = 1 << 20) -> bytes:
    """Reads a file of at most `limit` bytes. Raises BadFile if it can't be read, is empty, or is too large."""
    try:
        with file.open("rb") as stream:
            data = stream.read(limit + 1)
    except OSError as error:
        raise BadFile(f"can't read {what} {file}: {error.strerror}") from error
    if not 0 < len(data) <= limit:
        raise BadFile(f"{what} {file} is {f'larger than {limit} bytes' if data else 'empty'}")
    return data


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """A value that changes with the file, also when a link to it is replaced, as Kubernetes does for secrets."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True, slots=True)
class Key(Generic[T]):
    """A value derived from a key; `id` is a prefix of the key's SHA-256, which reveals nothing about the key."""

    id: bytes
    value: T = field(repr=False)


class KeyRing(Watched[list[Key[T]]]):
    """Keys from a file with 64 hexadecimal digits per line: the first is used, all are accepted. Thread-safe."""

    def __init__(self, file: Path, what: str, make: Callable[[bytes], T]) -> None:
        """Reads the file. Raises BadFile if it can't be read or does not have this form.

        what: the file's name in messages. make: derives a key's value from its 32 bytes.
        """

        def read() -> list[Key[T]]:
            keys = []
            for number, line in enumerate(read_bytes(file, what).splitlines(), 1):
                try:
                    raw = bytes.fromhex(line.decode())
                except ValueError:
                    raw = b"?"
                if not raw:
                    continue
                if len(raw) != KEY_BYTES:
                    raise BadFile(f"{what} {file}: line {number} is not a key of {2 * KEY_BYTES} hex digits")
                keys.append(Key(hashlib.sha256(raw).digest()[:ID_BYTES], make(raw)))
            if len({key.id for key in keys}) < len(keys) or not keys:
                raise BadFile(f"{what} {file}: the file contains {'a key twice' if keys else 'no key'}")
            return keys

        super().__init__([file], read)

    @property
    def newest(self) -> Key[T]:
        return self.value[0]

    def find(self, id: bytes) -> Key[T] | None:
        """The key with an id; None if it is not, or no longer, in the file."""
        return next((key for key in self.value if key.id == id), None)
