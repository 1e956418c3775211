"""Operating-system needs of a service process: cores, memory, files, ports, signals and output lines."""

import asyncio
import contextlib
import ctypes
import errno
import functools
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

# Without about 16 file descriptors of its own, gRPC crashes with SIGSEGV or SIGABRT, and LanceDB panics.
_SPARE_FILES = 32
_PR_SET_PDEATHSIG = 1
# Constants of mallopt from glibc's malloc.h.
_M_ARENA_MAX, _M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -8, -1, -3
_RETURN_SECONDS = 10.0
_CGROUP = Path("/sys/fs/cgroup")


def end_with_parent(by: signal.Signals = signal.SIGKILL, parent: int | None = None) -> None:
    """Makes the system send this process a signal when its parent ends. Linux only.

    Args:
        by: the signal; SIGKILL by default.
        parent: process id of the parent. If it ended before this call, this process exits.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
        if parent is not None and os.getppid() != parent:
            raise SystemExit


def cores(cgroup: Path = _CGROUP) -> int:
    """Cores in this process's affinity mask, capped by its container's CPU quota.

    torch considers neither: 64 threads under a quota of 4 cores are throttled for most of every period.
    """
    available = len(os.sched_getaffinity(0))
    quota, period = _quota(cgroup)
    return max(1, min(available, -(-quota // period))) if quota > 0 and period > 0 else available


def _quota(cgroup: Path) -> tuple[int, int]:
    """The CPU quota and its period, in microseconds, from cgroup v2 or v1; (-1, 1) without a quota."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return (-1, 1) if quota == "max" else (int(quota), int(period))
    except (OSError, ValueError):
        pass
    try:
        quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota), int(period)
    except (OSError, ValueError):
        return -1, 1


def share_heaps() -> None:
    """Limits glibc's malloc arenas to the number of cores. Call it before any thread is started.

    By default, there are up to eight times as many, each of which keeps its freed memory: a gateway with fifty
    threads needs 30 MB less. Does nothing with another malloc.
    """
    _mallopt(_M_ARENA_MAX, max(2, os.cpu_count() or 1))


@functools.cache
def keep_freed_memory() -> None:
    """Makes glibc keep up to 64 MiB of freed memory per arena, and not return it to the kernel; once per process.

    By default, every frame of 1 MiB on a gRPC stream is mapped, faulted in page by page and unmapped: for 64 MiB,
    that takes 55 to 75 ms of processor time on each side, against 16 to 28 ms with reused memory. Does nothing with
    another malloc.
    """
    _mallopt(_M_TRIM_THRESHOLD, 64 << 20)
    _mallopt(_M_MMAP_THRESHOLD, 32 << 20)


def _mallopt(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)


async def return_memory() -> None:
    """Returns free heap memory to the kernel every few seconds, until it is cancelled.

    Freed memory is kept for reuse (`keep_freed_memory`), but a heap enlarged by one long prompt would stay
    large: 190 MB of a worker. Takes 10 ms in a thread. Does nothing with another malloc.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while trim is not None:
        await asyncio.sleep(_RETURN_SECONDS)
        await asyncio.to_thread(trim, 0)


def check_files() -> None:
    """Raises OSError if the limit on open files is too low for a service to start. Call it first."""
    try:
        with contextlib.ExitStack() as spare:
            for _ in range(_SPARE_FILES):
                spare.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise OSError(
            f"only {limit} open files are allowed, which leaves none for connections: raise the limit to 1024 or "
            "more (ulimit -n, or LimitNOFILE of systemd)"
        ) from error


def check_ports(addresses: Sequence[str], flag: str) -> None:
    """Raises OSError if an address is malformed, or another program uses its port; `flag` is the flag that sets them.

    Call it before slow steps of the start: a service binds its ports only when it is ready, and may still fail then.
    """
    for address in addresses:
        if not is_address(address):
            raise OSError(f"{flag} {address}: an address is host:port, such as 127.0.0.1:8080, or unix:/path")
        host, _, port = address.rpartition(":")
        if port == "0" or address.startswith("unix:"):
            continue
        try:
            (family, *_, where), *_ = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except OSError:
            continue  # the server reports it
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(where)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    continue
                raise OSError(
                    f"{address} is in use by another program: stop it, or set another address with {flag}"
                ) from error


def is_address(text: str) -> bool:
    """Whether a text is host:port or unix:/path, without `http://`."""
    host, _, port = text.rpartition(":")
    if text.startswith("unix:"):
        return True
    return bool(host) and "//" not in host and port.isascii() and port.isdigit() and int(port) < 1 << 16


def listens(address: str) -> bool:
    """Whether a process accepts connections at host:port or unix:/path on this machine."""
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
    """Writes a line at once and in one piece. If the stream's disk is full, the line is dropped."""
    with contextlib.suppress(OSError):
        stream.flush()
        os.write(stream.fileno(), f"{line}\n".encode())
