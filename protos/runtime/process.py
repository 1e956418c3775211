"""What a process needs of its machine to serve, and the lines in which it says what it does."""

import asyncio
import contextlib
import ctypes
import errno
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from typing import TextIO

# Without about sixteen for themselves, gRPC ends the process by SIGSEGV or SIGABRT, and LanceDB panics.
_SPARE_FILES = 32
_PR_SET_PDEATHSIG = 1
# mallopt's name and number in glibc's malloc.h.
_M_ARENA_MAX = -8
_RETURN_SECONDS = 10.0


def end_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Has the system end this process by a signal when its parent ends. On Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)


def share_heaps() -> None:
    """Has glibc's threads share as many heaps as there are cores; to be asked before any thread is started.

    Otherwise there are up to eight times as many, and each keeps what was freed in it: a gateway with fifty threads
    has 30 MB less. Does nothing where malloc is another one.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, max(2, os.cpu_count() or 1))


async def return_memory() -> None:
    """Gives what is free in glibc's heaps back to the kernel every few seconds, until it is cancelled.

    Freed memory is kept for what comes next (`frames.keep_freed_memory`), but a heap that one long prompt has made
    large would stay so: 190 MB of a worker's. Takes 10 ms in a thread. Does nothing where malloc is another one.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while trim is not None:
        await asyncio.sleep(_RETURN_SECONDS)
        await asyncio.to_thread(trim, 0)


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


def check_ports(addresses: Sequence[str], flag: str) -> None:
    """Raises OSError where another program has one of these ports; `flag` names what else to say.

    To be asked before what takes long. A service binds its ports when it can answer, and may still be told then.
    """
    for address in addresses:
        host, _, port = address.rpartition(":")
        if address.startswith("unix:") or not port.isdigit() or port == "0":
            continue
        try:
            (family, *_, where), *_ = socket.getaddrinfo(host.strip("[]") or None, int(port), type=socket.SOCK_STREAM)
        except OSError:
            continue  # for the server to say
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(where)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    continue
                raise OSError(
                    f"{address} is taken by another program: stop that one, or name another address by {flag}"
                ) from error


def listens(address: str) -> bool:
    """Whether somebody accepts connections at host:port or unix:/path of this machine."""
    path = address.removeprefix("unix:")
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_UNIX if path != address else socket.AF_INET) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path if path != address else (host, int(port)))
        except OSError:
            return False
        return True


def say(line: str, stream: TextIO) -> None:
    """Writes a line at once and in one piece. A full disk below the stream is no reason to end: then it is lost."""
    with contextlib.suppress(OSError):
        stream.flush()
        os.write(stream.fileno(), f"{line}\n".encode())
