"""A DNS server whose answers are as old as a cluster's may be, and the command that lets a process ask it."""

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_A, _NXDOMAIN = 1, 3


class Nameserver:
    """Answers with the addresses that a name had up to `ttl` seconds ago, as CoreDNS does from its cache."""

    def __init__(self, ttl: float) -> None:
        self.names: dict[str, list[str]] = {}
        self.ttl = ttl
        self._cached: dict[str, tuple[float, list[str]]] = {}
        # One for each test process on this machine; the port can't be chosen.
        self.address = f"127.53.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((self.address, 53))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _addresses(self, name: str) -> list[str]:
        until, known = self._cached.get(name, (0.0, []))
        if time.monotonic() >= until:
            known = list(self.names.get(name, []))
            self._cached[name] = time.monotonic() + self.ttl, known
        return known

    def _serve(self) -> None:
        while True:
            try:
                query, asker = self._socket.recvfrom(4096)
            except OSError:
                return
            if not query:
                return
            labels, at = [], 12
            while length := query[at]:
                labels.append(query[at + 1 : at + 1 + length].decode())
                at += 1 + length
            question = query[12 : at + 5]
            found = self._addresses(".".join(labels).lower())
            records = found if struct.unpack("!H", query[at + 1 : at + 3])[0] == _A else []
            header = query[:2] + struct.pack("!HHHHH", 0x8180 | (not found) * _NXDOMAIN, 1, len(records), 0, 0)
            answers = [struct.pack("!HHHIH", 0xC00C, _A, 1, 1, 4) + socket.inet_aton(each) for each in records]
            self._socket.sendto(header + question + b"".join(answers), asker)


@contextlib.contextmanager
def serving(folder: Path, ttl: float) -> Iterator[tuple[Nameserver, tuple[str, ...]]]:
    """A server, and the command to run a process with that asks it; skips the test where that can't be."""
    try:
        server = Nameserver(ttl)
    except OSError as error:
        pytest.skip(f"no DNS server can listen: {error}")
    with contextlib.closing(server):
        file = folder / "resolv.conf"
        file.write_text(f"nameserver {server.address}\n")
        script = f'mount --bind {file} /etc/resolv.conf && exec "$@"'
        before = ("unshare", "--map-root-user", "--mount", "sh", "-c", script, "--")
        server.names["probe.test"] = ["127.9.9.9"]
        probe = "import socket, sys; sys.exit(socket.gethostbyname('probe.test') != '127.9.9.9')"
        try:
            subprocess.run([*before, sys.executable, "-c", probe], check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"no process can be told of another DNS server (root, or user namespaces): {error}")
        yield server, before
