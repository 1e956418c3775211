"""What a process needs of its machine to serve, and the lines in which it says what it does."""

import contextlib
import os
import resource
from typing import TextIO

# Without about sixteen for themselves, gRPC ends the process by SIGSEGV or SIGABRT, and LanceDB panics.
_SPARE_FILES = 32


def check_files() -> None:
    """Raises OSError where so few files may be open that a service could not start. To be asked first of all."""
    spare: list[int] = []
    try:
        for _ in range(_SPARE_FILES):
            spare.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise OSError(
            f"only {limit} open files are allowed, which leaves none for connections: raise the limit to 1024 or "
            "more (ulimit -n, LimitNOFILE of systemd)"
        ) from error
    finally:
        for file in spare:
            os.close(file)


def say(line: str, stream: TextIO) -> None:
    """Writes a line at once and in one piece. A full disk below the stream is no reason to end: then it is lost."""
    with contextlib.suppress(OSError):
        stream.flush()
        os.write(stream.fileno(), f"{line}\n".encode())
