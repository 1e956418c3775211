"""Services as forks of a process that has loaded what they import: six CPU seconds of a worker, one of each other.

A fork is a process like any other: it has its own pid, arguments, environment, output, signals and exit status.
"""

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

# What every service loads as it starts to serve.
_SERVING = ("grpc_reflection.v1alpha.reflection", "opentelemetry.instrumentation.grpc")
# By service. Not lancedb itself, which starts threads, and those are not in a fork.
IMPORTS = {
    "fusionkv.kvcache_service": ("fusionkv.kvcache_service.__main__", *_SERVING),
    "fusionkv.fusion_worker": ("fusionkv.fusion_worker.servicer", *_SERVING),
    "fusionkv.gateway": ("fusionkv.gateway.application", "lance_namespace", *_SERVING),
}
# What a service reads of its environment after the imports; a test that sets anything else has a process started.
LATE = ("FUSIONKV_", "OTEL_", "PYTEST_", "PYTHONUNBUFFERED", "TORCHINDUCTOR_CACHE_DIR")


class Fork:
    """What the tests use of `subprocess.Popen`."""

    def __init__(self, output: int, status: int) -> None:
        """Takes file descriptors over: the process's output, and a pipe that says its pid, then its exit status."""
        self.stdout = os.fdopen(output, encoding="utf-8")
        self.returncode: int | None = None
        self._status = os.fdopen(status, "rb", buffering=0)
        self._lock = threading.Lock()
        self.pid = int(self._status.readline())

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, or minus the signal that ended it.

        Raises:
            subprocess.TimeoutExpired: it runs for longer than `timeout` seconds.
        """
        status = self._ended(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            waiting = select.poll()
            waiting.register(self._status, select.POLLIN)
            waiting.poll(None if timeout is None else timeout * 1000)
            with self._lock:
                if self.returncode is None and waiting.poll(0):
                    self.returncode = int(self._status.readline())
        return self.returncode


class Forks:
    """The process that has loaded what one service imports, started when it is first needed."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._process: subprocess.Popen[bytes] | None = None
        self.before: dict[str, str] = {}
        """The environment before the test that runs, which libraries that tests import add to."""

    def start(self, flags: Sequence[str], environment: Mapping[str, str]) -> Fork | None:
        """Starts the service; None: its environment may change what the imports do."""
        if self._process is None:
            self._here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with there:
                command = [sys.executable, "-P", __file__, self._service]
                self._process = subprocess.Popen(
                    command, stdin=there.fileno(), env={**self.before, "PYTHONUNBUFFERED": "1"}
                )
        if _early(environment) != _early(self.before):
            return None
        output, status = os.pipe(), os.pipe()
        wanted = json.dumps([list(flags), dict(environment), os.getcwd()]).encode()
        socket.send_fds(self._here, [wanted], [output[1], status[1]])
        os.close(output[1])
        os.close(status[1])
        return Fork(output[0], status[0])

    def close(self) -> None:
        if self._process:
            self._here.close()
            self._process.wait()
            self._process = None


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(LATE)}


def _serve(requests: socket.socket) -> list[str] | None:
    """A service's flags in each fork, which is ready to be it; None once nobody asks for more."""
    signal.signal(signal.SIGCHLD, _reap)
    # Ctrl-C ends the tests, and they end this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        wanted, given, *_ = socket.recv_fds(requests, 1 << 20, 2)
        if not wanted:
            return None
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            requests.close()
            return _fork(given[0], given[1], *json.loads(wanted))
        for descriptor in given:
            os.close(descriptor)


def _reap(*_: object) -> None:
    """So that their CPU seconds count as this process's children's."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _fork(output: int, status: int, flags: list[str], environment: dict[str, str], folder: str) -> list[str]:
    """The flags in the service's process; its parent waits for its end and tells of it."""
    pid = os.fork()
    if pid:
        os.close(output)
        os.write(status, b"%d\n" % pid)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):  # the tests ended first
            os.write(status, b"%d\n" % ended)
        os._exit(0)
    os.close(status)
    for standard, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(descriptor, standard)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    return flags


if __name__ == "__main__":
    service = sys.argv[1]
    for module in IMPORTS[service]:
        importlib.import_module(module)
    found = _serve(socket.socket(fileno=os.dup(0)))
    if found is not None:
        sys.argv = [service, *found]
        sys.modules.pop(f"{service}.__main__", None)  # of which runpy would warn
        runpy.run_module(service, run_name="__main__", alter_sys=True)
