"""What files say, read anew when one of them changes: certificates, tokens and quotas rotate without a restart."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")
# A look is one stat a file, about 3 us each.
_LOOK_SECONDS = 1.0


class BadFile(OSError):
    """A file that can't be used. The message names it and never says what it holds."""


class Watched(Generic[T]):
    """The value that `read()` makes of `files`, which raises BadFile where it can't. Safe for use by any thread."""

    def __init__(self, files: Sequence[Path], read: Callable[[], T]) -> None:
        """Reads the files for the first time.

        Raises:
            BadFile: they can't be used.
        """
        self._files = tuple(files)
        self._read = read
        self._looking = threading.Lock()
        self._stamp = self._stamps()
        self._value = read()
        self._looked = time.monotonic()

    @property
    def value(self) -> T:
        """The newest value, at most a second old. Files that can't be used any more leave the last one in place."""
        if time.monotonic() - self._looked >= _LOOK_SECONDS and self._looking.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._looking.release()
        return self._value

    def _look(self) -> None:
        self._looked = time.monotonic()
        # Taken before reading: files that change meanwhile are read again at the next look.
        stamp = self._stamps()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        names = ", ".join(map(str, self._files))
        try:
            self._value = self._read()
        except BadFile as error:
            log.warning("%s changed and can't be used, the last good state stays: %s", names, error)
        else:
            log.info("%s changed and was read anew", names)

    def _stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(file) for file in self._files)


def read_bytes(file: Path, what: str, most: int = 1 << 20) -> bytes:
    """The whole of a file of at most `most` bytes.

    Raises:
        BadFile: it can't be read, is empty, or is larger.
    """
    try:
        with file.open("rb") as stream:
            data = stream.read(most + 1)
    except OSError as error:
        raise BadFile(f"can't read {what} {file}: {error.strerror}") from error
    if not 0 < len(data) <= most:
        raise BadFile(f"{what} {file} is {f'over {most} bytes' if data else 'empty'}")
    return data


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """Changes whenever the file does, also when it is replaced through a link, as Kubernetes does with secrets."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
