"""Runs servers as processes; and what a process computes."""

import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from fusionkv.protos.runtime.process import listens

_START_SECONDS = 60.0


class Process:
    """A server process, whose output goes to a file in the folder."""

    def __init__(self, folder: Path, *command: str, env: Mapping[str, str] | None = None) -> None:
        """env: environment variables besides this process's."""
        self._command = command
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as out:
            self._log = Path(out.name)
            given = {**os.environ, **(env or {})}
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=given)
        self.pid = self._process.pid

    @property
    def addresses(self) -> list[str]:
        """Addresses of a service of ours, from its output, once it serves. Raises OSError if it does not start."""
        self._wait(lambda: re.search(r" serving on .*\n", self._log.read_text()) is not None)
        return self._log.read_text().partition(" serving on ")[2].partition("\n")[0].split()

    def listens(self, port: int, seconds: float = _START_SECONDS) -> "Process":
        """Waits until something listens at the port. Raises OSError if nothing does."""
        self._wait(lambda: listens(f"127.0.0.1:{port}"), seconds)
        return self

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:  # a peer that hangs
            self._process.kill()
            self._process.wait()

    def _wait(self, ready: Callable[[], bool], seconds: float = _START_SECONDS) -> None:
        end = time.monotonic() + seconds
        while not ready():
            if self._process.poll() is not None or time.monotonic() > end:
                raise OSError(f"{self._command[0]} did not start:\n{self._log.read_text()}")
            time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process so far, with those of threads that have ended. Raises OSError if there is none."""
    return time.clock_gettime(~pid << 3 | 2)  # the clock of clock_getcpuclockid(3)
