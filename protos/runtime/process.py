"""Operating-system needs of a service process: cores, memory, files, ports, signals and output lines."""

import contextlib
import ctypes
import errno
import functools
import ipaddress
import os
import signal
import socket
import stat
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

_PR_SET_PDEATHSIG = 1
# Constants of mallopt from glibc's malloc.h.
_M_ARENA_MAX, _M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -8, -1, -3
_RETURN_SECONDS = 10.0
_SO_PEERCRED, _UCRED = 17, struct.Struct("3i")  # pid, uid, gid
# Linux allows 107 bytes and a zero.
_MAX_SOCKET_PATH = 107
_LISTEN = "0A"
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


def open_streams() -> None:
    """Opens /dev/null as standard input, output or error where it is closed, as by `>&-`. Call it before all else.

    Python has None in place of the stream then, and the next file or connection gets its number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - gets the lowest free number, its own


def end_when_told() -> None:
    """Makes SIGTERM end a process that starts, also process 1 of a container. Call it first.

    For process 1 the kernel drops a SIGTERM that nothing handles: a container that is stopped while its model loads
    would serve, and be killed at the end of its grace period.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


def end_when_interrupted() -> None:
    """Makes SIGINT end a service that starts, as SIGTERM does, unless it is ignored. Call it before asyncio.run.

    asyncio would cancel the start only once it awaits something: 22 s later in a worker that loads Qwen2.5-0.5B.
    """
    if os.getpid() != 1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


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
    import asyncio  # not by `fusionkv --help`

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while trim is not None:
        await asyncio.sleep(_RETURN_SECONDS)
        await asyncio.to_thread(trim, 0)


def how_ended(status: int) -> str:
    """How a process ended, by its status as Python has it: "was killed by SIGKILL"."""
    if status >= 0:
        return f"ended with exit code {status}"
    # Real-time signals have no names.
    return f"was killed by {next((known.name for known in signal.Signals if known == -status), f'signal {-status}')}"


def data_folder(path: Path, *files: str) -> None:
    """Creates a folder for data that only this user may read, or makes it one.

    What a group may write to stays open to the group. `files` are files of the service, if they exist. Raises OSError
    if the folder can't be created, or a file is something else: opening a FIFO would wait for its writer.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    allowed = 0o770 if status.st_mode & stat.S_IWGRP else 0o700
    if status.st_uid == os.geteuid() and status.st_mode & 0o777 & ~allowed:
        path.chmod(stat.S_IMODE(status.st_mode) & (allowed | 0o7000))
    for file in (path / name for name in files):
        if file.exists() and not file.is_file():
            raise OSError(f"{file} is not a file: remove it")


@contextlib.contextmanager
def private_sockets() -> Iterator[None]:
    """Unix sockets that are bound meanwhile can't be opened by users outside of this one's group.

    A umask of 002 lets the group in. Files that other threads create meanwhile are closed to others too.
    """
    before = os.umask(0o077)
    os.umask(before | 0o007)
    try:
        yield
    finally:
        os.umask(before)


def check_ports(addresses: Sequence[str], flag: str) -> None:
    """Raises OSError if an address is malformed, or another program uses its port; `flag` is the flag that sets them.

    Raises ValueError if the path of a unix socket can't be one.

    Call it before slow steps of the start: a service binds its ports only when it is ready, and may still fail then.
    """
    check_sockets(addresses)
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


def check_sockets(addresses: Sequence[str]) -> None:
    """Raises ValueError if the path of some unix:/path can't be a socket's."""
    for address in addresses:
        path = address.removeprefix("unix:")
        if path == address:
            continue
        if "," in path:  # gRPC splits addresses there, also at %2C
            raise ValueError(f"{address}: the path of a unix socket can't have a comma; choose another folder")
        if (size := len(os.fsencode(path))) > _MAX_SOCKET_PATH:
            raise ValueError(
                f"{address}: the path of a unix socket has at most {_MAX_SOCKET_PATH} bytes, not {size}; choose "
                "a shorter one, which may be relative to the working folder"
            )


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


def is_ours(address: str) -> bool:
    """Whether what listens at host:port or unix:/path on this machine belongs to this user or to root.

    Linux only: elsewhere nothing does.
    """
    path = address.removeprefix("unix:")
    try:
        if path == address:
            owners = _listeners(int(address.rpartition(":")[2]))
        else:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(path)
                _, uid, _ = _UCRED.unpack(probe.getsockopt(socket.SOL_SOCKET, _SO_PEERCRED, _UCRED.size))
                owners = {uid}
    except OSError:
        return False
    return bool(owners) and owners <= {os.geteuid(), 0}


def _listeners(port: int) -> set[int]:
    """The uids of all that listen on a TCP port, at any address."""
    owners = set()
    for table in filter(Path.exists, map(Path, ("/proc/net/tcp", "/proc/net/tcp6"))):
        for line in table.read_text().splitlines()[1:]:
            _, local, _, state, _, _, _, uid, *_ = line.split()
            if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                owners.add(int(uid))
    return owners


def is_near(host: str) -> bool:
    """Whether a host is this machine or has private addresses alone, as in a cluster: calls use no proxy."""
    try:
        addresses = {str(where[0]).partition("%")[0] for *_, where in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(address).is_private for address in addresses)


def say(line: str, stream: TextIO) -> None:
    """Writes a line at once and in one piece. If the stream's disk is full, the line is dropped."""
    with contextlib.suppress(OSError):
        stream.flush()
        os.write(stream.fileno(), f"{line}\n".encode())


def bind_port(host: str, port: int, backlog: int) -> socket.socket:
    """As gRPC binds: "::" is every address, also of IPv4, and on a machine without IPv6. Raises OSError.

    The socket does not block.
    """
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    listener = socket.create_server((host, port), family=family, backlog=backlog, dualstack_ipv6=host == "::")
    listener.setblocking(False)
    return listener


def bind_unix(path: Path) -> socket.socket:
    """A private socket, which does not block, in place of whatever has this path. Raises OSError."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.setblocking(False)
        with private_sockets():
            listener.bind(str(path))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener
