"""Values from files that are read again when a file changes: certificates, tokens and quotas, without a restart."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")
# A check is one stat per file, about 3 us each.
_CHECK_SECONDS = 1.0


class BadFile(OSError):
    """A file that can't be used. The message names the file, but never quotes its content."""


class Watched(Generic[T]):
    """The value that `read()` makes of `files`, which raises BadFile if it can't. Thread-safe."""

    def __init__(self, files: Sequence[Path], read: Callable[[], T]) -> None:
        """Reads the files for the first time.

        Raises:
            BadFile: the files can't be used.
        """
        self._files = tuple(files)
        self._read = read
        self._checking = threading.Lock()
        self._stamp = self._stamps()
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
        self._stamp = stamp
        names = ", ".join(map(str, self._files))
        try:
            self._value = self._read()
        except BadFile as error:
            log.warning("%s changed but can't be used; keeping the last valid state: %s", names, error)
        else:
            log.info("%s changed and was read again", names)

    def _stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(file) for file in self._files)


def read_bytes(file: Path, what: str, limit: int = 1 << 20) -> bytes:
    """Reads a whole file of at most `limit` bytes.

    Raises:
        BadFile: the file can't be read, is empty, or is too large.
    """
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
