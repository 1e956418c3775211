"""Where the processes of a chaos run live: each in a network namespace with an address and a link of its own, as far
as this machine allows it; otherwise all on the loopback address.
"""

import asyncio
import os
import shutil
import ssl
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.ports import free_port

_OWN = "FUSIONKV_CHAOS_NAMESPACE"
_NET = "10.213.7"


@dataclass(frozen=True)
class Place:
    """An address, what to put before a command that is to run there, and the link and namespace that it is behind."""

    address: str
    before: tuple[str, ...] = ()
    link: str = ""
    namespace: str = ""

    def listen(self) -> str:
        """Host and port to serve on, for good."""
        # In a namespace of its own every port is free, and stays free.
        return f"{self.address}:{7070 if self.link else free_port()}"


class Network:
    """A bridge with one namespace for each place. All of it goes with the process, whatever ends that."""

    def __init__(self) -> None:
        """Raises RuntimeError where namespaces can't be had; the message says why."""
        if not os.environ.get(_OWN):
            raise RuntimeError("no network namespace of its own: needs root (or user namespaces), unshare and ip")
        try:
            # The names of namespaces are files; these are nobody else's.
            Path("/run/netns").mkdir(exist_ok=True)
            _run("mount", "-t", "tmpfs", "none", "/run/netns")
            _run("ip", "link", "set", "lo", "up")
            _run("ip", "link", "add", "br0", "type", "bridge")
            _run("ip", "addr", "add", f"{_NET}.1/24", "dev", "br0")
            _run("ip", "link", "set", "br0", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            raise RuntimeError(f"no network of its own: {getattr(error, 'stderr', '') or error}") from error
        self.here = Place(f"{_NET}.1")
        self._places = 1
        self.no_shapes = ""
        """Why `narrow` and `lose` can't be had here; empty where they can."""
        try:
            self._limit(["tc"], "br0", 1000)
            self._drop(["tc"], "br0", 0.1)
            self._clear(["tc"], "br0")
        except (OSError, subprocess.CalledProcessError) as error:
            self.no_shapes = f"tc can't: {getattr(error, 'stderr', '') or error}".strip()

    def place(self) -> Place:
        self._places += 1
        number = self._places
        name, link, address = f"n{number}", f"v{number}", f"{_NET}.{number}"
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "link", "set", link, "master", "br0", "up")
        _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run("ip", "-n", name, "link", "set", device, "up")
        return Place(address, ("nsenter", f"--net=/run/netns/{name}"), link, name)

    def cut(self, place: Place) -> None:
        """Nothing comes or goes there any more; nobody is told."""
        _run("ip", "link", "set", place.link, "down")

    def mend(self, place: Place) -> None:
        _run("ip", "link", "set", place.link, "up")

    def part(self, places: Sequence[Place], parted: bool) -> None:
        """None of these reaches another of them, while all reach everybody else."""
        for place in places:
            _run("bridge", "link", "set", "dev", place.link, "isolated", "on" if parted else "off")

    def narrow(self, place: Place, kilobits: int) -> None:
        """So many kilobits a second pass, each way. The rest waits, up to half a second's worth; more is dropped."""
        for tc, device in _ends(place):
            self._limit(tc, device, kilobits)

    def lose(self, place: Place, share: float) -> None:
        """That share of all packets is lost, each way."""
        for tc, device in _ends(place):
            self._drop(tc, device, share)

    def sound(self, place: Place) -> None:
        """Ends both."""
        for tc, device in _ends(place):
            self._clear(tc, device)

    @staticmethod
    def _limit(tc: list[str], device: str, kilobits: int) -> None:
        how = ("tbf", "rate", f"{kilobits}kbit", "burst", "4kb", "latency", "500ms")
        _run(*tc, "qdisc", "add", "dev", device, "root", *how)

    @staticmethod
    def _drop(tc: list[str], device: str, share: float) -> None:
        _run(*tc, "qdisc", "add", "dev", device, "clsact")
        # Not every kernel has netem; a classic BPF program needs nothing else. It loads a random number (32 bits at
        # SKF_AD_RANDOM), and returns TC_ACT_UNSPEC if that is large enough, else TC_ACT_SHOT.
        program = f"4,32 0 0 4294963256,53 0 1 {int(share * 2**32)},6 0 0 4294967295,6 0 0 2"
        _run(*tc, "filter", "add", "dev", device, "egress", "bpf", "da", "bytecode", program)

    @staticmethod
    def _clear(tc: list[str], device: str) -> None:
        for kind in ("root", "clsact"):  # one of them may not be there
            subprocess.run([*tc, "qdisc", "del", "dev", device, kind], check=False, capture_output=True)


def _ends(place: Place) -> list[tuple[list[str], str]]:
    """Both ends of a place's link: the command that shapes it, and the device."""
    return [(["tc"], place.link), (["tc", "-n", place.namespace], "eth0")]


def enter() -> str:
    """Starts this program again in namespaces of its own for network and mounts.

    Comes back only in them, or where that can't be: then with the reason.
    """
    if os.environ.get(_OWN):
        # Mounts come into the namespaces of the processes too, and go nowhere else.
        _run("mount", "--make-rshared", "/")
        return ""
    if not (shutil.which("unshare") and shutil.which("ip") and shutil.which("bridge") and shutil.which("nsenter")):
        return "unshare, nsenter, ip or bridge is missing (apt-get install util-linux iproute2)"
    reason = ""
    # Processes as well: whatever ends this one ends all that it started.
    own = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    for flags in (own, ["--map-root-user", *own]):
        probe = subprocess.run(
            ["unshare", *flags, "ip", "link", "add", "probe", "type", "bridge"], capture_output=True
        )
        if probe.returncode == 0:
            os.environ[_OWN] = "1"
            os.execvp("unshare", ["unshare", *flags, sys.executable, "-P", *sys.argv])
        reason = probe.stderr.decode(errors="replace").strip()
    return f"no namespaces here: {reason}"


def mounted(folder: Path, megabytes: int) -> bool:
    """Mounts a small file system there, if that can be."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.environ.get(_OWN):
        return False
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)], capture_output=True
    )
    return done.returncode == 0


def unmounted(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


class Relay:
    """A TCP relay in front of an address: a slow network or server while it holds back, none while it is `shut`."""

    def __init__(self, listen: str, target: str) -> None:
        self.address = listen
        self.delay = 0.0
        self.shut = False
        self._target = target
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: callers speak TLS to it."""
        host, _, port = self.address.rpartition(":")
        self._server = await asyncio.start_server(self._accept, host, int(port), ssl=tls)

    def aim(self, target: str, *, part: bool = True) -> None:
        """From now on it leads elsewhere; connections that there are end, but with `part=False`."""
        self._target = target
        if part:
            self.part()

    def part(self) -> None:
        """Ends all connections that there are."""
        for task in list(self._tasks):
            task.cancel()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.part()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.shut:
            writer.close()
            return
        host, _, port = self._target.rpartition(":")
        try:
            inner, outer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        for source, sink in ((reader, outer), (inner, writer)):
            task = asyncio.create_task(self._copy(source, sink, source is inner))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def passed(self, data: bytes, down: bool) -> bytes | None:
        """What goes on of data, `down` from the target to a caller; with a part of it or None the connection ends."""
        return data

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, down: bool) -> None:
        try:
            while (data := await source.read(1 << 16)) and (passed := self.passed(data, down)) is not None:
                if self.delay:
                    await asyncio.sleep(self.delay)
                sink.write(passed)
                await sink.drain()
                if 0 < len(passed) < len(data):
                    break
        except OSError:
            pass  # one side went away: so does the other
        finally:
            sink.close()
